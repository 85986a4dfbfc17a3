"""Files that nobody meant: each is told with its line and in no time, and none is taken for something else."""

from __future__ import annotations

import re
import time
from importlib import resources
from pathlib import Path

import pytest

from dcpcomm import costtable
from dcpcomm.config import load_config
from dcpcomm.errors import ConfigError

#: Nine aliases to nine aliases, nine times over: a billion values in half a kilobyte.
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


def first_row(**changes: str) -> str:
    """A measured table whose first row has other figures."""
    given = {"wire_bytes": "16384", "median_us": "12.59", "mad_us": "0.018", "n": "30", **changes}
    row = ", ".join(f"{name}: {value}" for name, value in given.items())
    shipped = resources.files("dcpcomm.configs") / "costs/nvidia-h200-x2-nv18.yaml"
    text, count = re.subn(r"- \{wire_bytes: 16384.*?\}", f"- {{{row}}}", shipped.read_text(encoding="utf-8"), count=1)
    assert count == 1
    return text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds nothing; expected a cost table"),
        ("# a comment\n", "holds nothing"),
        ("- 1\n", "the table"),
        (LAUGHS, "more than 100000 values"),
        ("merges: {a: {bfloat16: []}}\nmerges: {}\n", "given twice"),
        ("merges: [\n", "not valid YAML"),
        ("mergs: {}\n", "mergs"),
    ],
    ids=["empty", "comment", "list", "laughs", "twice", "torn", "misspelt"],
)
def test_what_is_no_cost_table_is_told(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(text)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        costtable.read(path)
    assert re.match(rf"{re.escape(str(path))}:\d+: ", str(raised.value))
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "changes",
    [
        {"median_us": ".nan"}, {"median_us": "-1.0"}, {"median_us": ".inf"}, {"median_us": "fast"}, {"mad_us": "-0.1"},
        {"mad_us": ".nan"}, {"wire_bytes": "-5"}, {"n": "0"}, {"wire_bytes": "65536"},
    ],
    ids=str,
)  # fmt: skip
def test_figures_that_cannot_be_are_told(changes: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(first_row())
    costtable.read(path)
    path.write_text(first_row(**changes))
    with pytest.raises(ConfigError, match=r"table\.yaml:\d+: "):
        costtable.read(path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00a", None], ids=["binary", "folder"])
def test_what_cannot_be_read_is_told(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="can't be read"):
        costtable.read(path)


def test_a_configuration_of_laughs_and_a_table_that_is_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(LAUGHS)
    with pytest.raises(ConfigError, match="more than 100000 values"):
        load_config(path)
    path.write_text(f"cost_table: {tmp_path}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml:1: cost_table: a folder"):
        load_config(path)
