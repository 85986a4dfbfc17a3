"""A sweep says what it means: every mistake in it is told before anything is measured."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from dcpcomm.bench.sweep import LISTS, Cell, Sweep, cells_of, read_sweep, why_not
from dcpcomm.errors import ConfigError

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> Path:
        file = tmp_path / "sweep.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    return written


def problems(file: Path | None, options: dict[str, tuple[str, object]] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        read_sweep(file, options or {})
    return str(raised.value).splitlines()


def test_a_file_an_option_and_the_default_in_this_order_of_authority(write: Write) -> None:
    file = write("rows: [1, 16]\ndim: [128, 512]\nprojection: [none, before]\nempty: 0\nrivals: true\n")
    found = read_sweep(file, {"dim": ("--dim", "64"), "skew_us": ("--skew-us", "0,2.5")})
    assert (found.rows, found.dim, found.projection) == ((1, 16), (64,), ("none", "before"))
    assert (found.skew_us, found.empty, found.rivals, found.heads) == ((0.0, 2.5), (0.0,), True, (128,))


def test_every_axis_multiplies_the_cells() -> None:
    values = {
        "rows": (1, 2), "heads": (4, 8), "dim": (16, 32), "dtype": ("bfloat16", "float32"), "ranks": (2, 4),
        "projection": ("none", "after"), "empty": (0.0, 0.5), "skew_us": (0.0, 9.0),
    }  # fmt: skip
    assert set(values) == set(LISTS) - {"transport"}
    sweep = Sweep(**values)
    cells = [cell for size in sweep.ranks for cell in cells_of(sweep, size)]
    assert len(cells) == len(set(cells)) == 2**8
    assert {cell.v_head_dim for cell in cells if cell.projection == "none"} == {None}
    scenes = [(cell.ranks, cell.heads, cell.dim, cell.dtype, cell.projection) for cell in cells]
    changes = sum(one != other for one, other in pairwise(scenes))
    assert changes == 2**5 - 1, "cells that share a merger are next to each other"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rows: [1]\nheds: 64\n", ":2: key 'heds' is not known; did you mean 'heads'?"),
        ("rows:\n- 1\n- x\n", ":3: rows[1] is 'x'; expected a whole number above 0"),
        ("rows: [0]\n", ":1: rows[0] is 0; expected a whole number above 0"),
        ("rows: []\n", ":1: rows is empty"),
        ("rows: [1, 1]\n", ":1: rows lists 1 twice; remove one"),
        ('heads: "64"\n', ":1: heads is '64'; expected a whole number"),
        (
            "dtype: bfloat\n",
            ":1: dtype is 'bfloat'; expected one of bfloat16, float16, float32; did you mean 'bfloat16'?",
        ),
        (
            "projection: [none, befor]\n",
            ":1: projection[1] is 'befor'; expected one of none, before, after; did you mean",
        ),
        ("transport: [gloo]\n", ":1: transport[0]: no transport is registered as 'gloo'; did you mean 'gloo_a2a'?"),
        ("transport: 'cupy_ipc:fast'\n", ":1: transport: 'cupy_ipc:fast': 'fast' is no KEY=VALUE"),
        ("empty: 1.0\n", ":1: empty is 1.0; expected a share of the rows, 0 to below 1"),
        ("skew_us: [-1]\n", ":1: skew_us[0] is -1; expected microseconds, 0 or more"),
        ("rivals: yes\n", ":1: rivals is 'yes'; expected true or false"),
        ("replays: 2\n", ":1: replays is 2; expected a whole number of 3 or more"),
        ("dim: {a: 1}\n", ":1: dim is {'a': 1}; expected a whole number above 0"),
        ("rows: [1\n", "not valid YAML"),
        ("- rows\n", ":1: holds ['rows']; expected a mapping"),
        ("7: 1\n", "expected one of rows, heads"),
        ("rows: 1\nrows: 2\n", ":2: key 'rows' is given twice"),
    ],
)
def test_a_mistake_is_told_with_its_line_and_the_nearest_word(write: Write, text: str, said: str) -> None:
    file = write(text)
    (line,) = problems(file)
    assert line.startswith(str(file))
    assert said in line


def test_all_mistakes_are_told_at_once_and_options_by_their_names(write: Write) -> None:
    file = write("heds: 1\ndtype: int8\nrows: [x]\n")
    said = problems(file, {"rows": ("--rows", "1,y"), "device": ("--device", "gpu")})
    assert len(said) == 4
    assert any(line.startswith("--rows: rows[1] is 'y'") for line in said)
    assert any(line.startswith("--device: device is 'gpu'; expected one of cpu, cuda") for line in said)
    assert not any("'x'" in line for line in said), "what an option replaces is not judged"


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert "No such file" in problems(tmp_path / "no.yaml")[0]
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe")
    assert "not UTF-8" in problems(binary)[0]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"ranks": 1}, "one rank exchanges nothing"),
        ({"ranks": 3}, "8 heads don't divide over 3 ranks"),
        ({"empty": 0.1}, "0.1 of 4 rows is none: nothing would be empty"),
        ({"empty": 0.25}, ""),
    ],
)
def test_what_cannot_be_measured_says_why(changes: dict[str, object], why: str) -> None:
    given = {
        "ranks": 2,
        "heads": 8,
        "dim": 16,
        "dtype": "bfloat16",
        "projection": "none",
        "v_head_dim": None,
        "rows": 4,
    }
    assert why_not(Cell(**{**given, **changes})) == why  # type: ignore[arg-type]


def test_the_sweep_of_the_docs_is_one() -> None:
    sweep = read_sweep(Path(__file__).parent.parent / "docs/examples/sweep.yaml", {})
    cells = list(cells_of(sweep, 2))
    assert len(cells) == 3 * 2 * 2 * 3 * 2 * 2
    assert {why_not(cell) for cell in cells} == {"", "0.5 of 1 rows is none: nothing would be empty"}
