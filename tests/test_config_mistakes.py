"""Mistakes in a configuration: each is found, has its place, its nearest valid word and its remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpcomm import registry
from dcpcomm.config import MergeConfig, VerifyConfig, load_config, read_config
from dcpcomm.configcheck import _EXPECTED
from dcpcomm.errors import ConfigError

Yaml = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_by_call", {})
    for variable in ("DCPCOMM_CONFIG", "DCPCOMM_TRANSPORT", "DCPCOMM_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def node(tmp_path: Path) -> Yaml:
    """`node(text)` writes node.yaml and returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "node.yaml"
        path.write_text(text)
        return path

    return write


_WRONG = [
    # text, line, rest of the message
    (
        "# c\n\nprefered: [gloo_a2a]",
        3,
        r"key 'prefered' is not known; did you mean 'prefer'\? Valid keys: transport, ",
    ),
    ("zzz: 1", 1, r"key 'zzz' is not known; remove it\. Valid keys: transport, "),
    ("1: x", 1, r"key '1' is not known"),
    (
        "verify:\n  levle: off",
        2,
        r"key 'verify\.levle' is not known; did you mean 'level'\? Valid keys of verify: ",
    ),
    (
        "transport: glo_a2a",
        1,
        r"transport: .*'glo_a2a'; did you mean 'gloo_a2a'\? Registered: cupy_ipc, .*gloo_a2a, loopback",
    ),
    ("prefer:\n- gloo_a2a\n- lopback", 3, r"prefer\[1\]: no .*'lopback'; did you mean 'loopback'\?"),
    ("forbid: [\n nope]", 2, r"forbid\[0\]: no transport is registered as 'nope'\. .*install the package"),
    ("options:\n  lopback:\n    a: 1", 2, r"options\.lopback: .*did you mean 'loopback'"),
    ("prefer: [auto]", 1, r"prefer\[0\]: no transport is registered as 'auto'"),
    ("prefer: gloo_a2a", 1, r"prefer is 'gloo_a2a'; expected a list .*write \[gloo_a2a\]"),
    ("prefer: [gloo_a2a, 3]", 1, r"prefer\[1\] is 3; expected the registered name"),
    ("prefer: [loopback, loopback]", 1, r"prefer lists 'loopback' twice"),
    ("transport:", 1, r"transport is empty; expected auto, or"),
    ("transport: 3", 1, r"transport is 3; expected auto, or"),
    (
        "on_unavailable: fallbck",
        1,
        r"on_unavailable is 'fallbck'; expected one of error, fallback; .*'fallback'\?",
    ),
    ("on_unavailable: null", 1, r"on_unavailable is empty; expected one of error, fallback$"),
    ("projection: 3", 1, r"projection is 3; expected one of auto, before, after$"),
    ("deterministic: yes", 1, r"deterministic is 'yes'; expected true or false; write true"),
    ("deterministic: 1", 1, r"deterministic is 1; expected true or false"),
    ("max_live: 0", 1, r"max_live is 0; expected a whole number above 0"),
    ("max_live: '2'", 1, r"max_live is '2'; expected a whole number"),
    ("max_live: 1.5", 1, r"max_live is 1\.5; expected a whole number"),
    ("max_live: true", 1, r"max_live is True; expected a whole number"),
    ("max_sms: 0", 1, r"max_sms is 0; expected auto, or a whole number above 0$"),
    ("max_sms: atuo", 1, r"max_sms is 'atuo'; .*did you mean 'auto'\?"),
    (
        "cost_table: gone.yaml",
        1,
        r"cost_table: no such file, '.*gone\.yaml'; correct the path, or write auto or builtin",
    ),
    ("cost_table: ''", 1, r"cost_table is ''; expected auto, builtin, or the path"),
    ("verify: off", 1, r"verify is 'off'; expected a mapping, such as \{level: "),
    ("verify: {level: false}", 1, r"verify\.level is False; expected one of off, quick"),
    ("verify:\n  deadline_s: 0", 2, r"verify\.deadline_s is 0; expected a number of seconds above 0"),
    ("verify: {deadline_s: .inf}", 1, r"verify\.deadline_s is inf; expected a number of seconds"),
    ("watchdog: {timeout_s: .nan}", 1, r"watchdog\.timeout_s is nan; expected a number of seconds"),
    ("watchdog: {timeout_s: 1:30}", 1, r"watchdog\.timeout_s is '1:30'; expected a number of seconds"),
    ("watchdog:\n  action: rise", 2, r"watchdog\.action is 'rise'; expected one of raise, log; .*'raise'\?"),
    ("options: [gloo_a2a]", 1, r"options is \['gloo_a2a'\]; expected a mapping of transports' names"),
    (
        "options: {gloo_a2a: }",
        1,
        r"options\.gloo_a2a is empty; expected a mapping of the transport's options",
    ),
    ("max_live: 1\nmax_sms: 2\nmax_live: 3", 3, r"key 'max_live' is given twice, first in line 1"),
    ("verify:\n  level: off\n  level: soak", 3, r"key 'verify\.level' is given twice, first in line 2"),
    (
        "prefer: [gloo_a2a]\nforbid:\n- gloo_a2a",
        3,
        r"'gloo_a2a' is forbidden here, and asked for by the key 'prefer'",
    ),
    ("forbid: [gloo_a2a]\ntransport: gloo_a2a", 1, r"'gloo_a2a' is forbidden .* by the key 'transport'"),
    ("a: 1\nb: [1,\nc: 2", 3, r"not valid YAML: .*; correct the syntax there"),
    ("max_live: 1\n\tmax_sms: 2", 2, r"not valid YAML: .*'\\t'"),
    ("max_live: 1\nx: \x01", 2, r"not valid YAML: special characters are not allowed; remove"),
    ("max_live: 1\n---\nmax_live: 2", 2, r"not valid YAML: .*another document"),
    (
        "transport: !!python/name:os.system",
        1,
        r"tag 'tag:yaml.org,2002:python/name:os.system' is not supported",
    ),
    ("verify: !box {}", 1, r"tag '!box' is not supported"),
    ("options: {gloo_a2a: &a {b: *a}}", 1, r"options\.gloo_a2a\.b contains itself"),
    ("? [a]\n: 1", 1, r"a list or mapping is used as a key"),
    ("max_live: !!int two", 1, r"'two' can't be read as int"),
    ("- transport", 1, r"holds \['transport'\]; expected a mapping"),
    ("auto", 1, r"holds 'auto'; expected a mapping"),
    ("[" * 20000, 1, r"nested too deeply"),
]


@pytest.mark.parametrize(("text", "line", "message"), _WRONG, ids=[text[:30] for text, _, _ in _WRONG])
def test_a_mistake_in_a_file_has_its_place_and_its_remedy(node: Yaml, text: str, line: int, message: str) -> None:
    path = node(text)
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    first = str(raised.value).splitlines()
    pattern = f"{re.escape(str(path))}:{line}: {message}"
    assert any(re.match(pattern, problem) for problem in first), f"{first} does not match {pattern}"


def test_all_mistakes_are_told_at_once_in_the_files_order(node: Yaml) -> None:
    path = node("options: {gloo_a2a: {no_such: 1}}\nmax_live: 0\nprefered: []\nforbid: [nope]\nmax_live: 2\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    lines = [int(line.removeprefix(f"{path}:").split(":")[0]) for line in str(raised.value).splitlines()]
    assert lines == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prefered": []}, r"config mapping: key 'prefered' is not known; did you mean 'prefer'\?"),
        ({3: 1}, r"config mapping: key '3' is not known"),
        ({"verify": {"level": "of"}}, r"config mapping: verify\.level is 'of'; .*did you mean 'off'\?"),
        ({"transport": "nope"}, r"config mapping: transport: no transport is registered as 'nope'"),
        (
            {"options": {"gloo_a2a": {"f": print}}},
            r"config mapping: options\.gloo_a2a\.f is <built-in.*expected text",
        ),
        ({"prefer": {"gloo_a2a"}}, r"config mapping: prefer is \{'gloo_a2a'\}, of type set"),
        ({"options": {3: {}}}, r"config mapping: options\[3\]: no transport is registered as 3"),
    ],
)
def test_a_mistake_in_a_mapping(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        load_config(values)


def test_a_mistake_in_keywords_is_a_config_error_too() -> None:
    with pytest.raises(ConfigError, match="'prefered' is not known"):
        MergeConfig(prefered=["gloo_a2a"])  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="registered as 'nope'"):
        MergeConfig(transport="nope")


@pytest.mark.parametrize("source", [3, b"auto", ["auto"], VerifyConfig()])
def test_a_source_of_another_kind(source: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected a (path|dcpcomm\.MergeConfig)"):
        load_config(source)


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file; did you mean 'multi-node'\? .*auto, cpu, multi-node, node"):
        load_config("multinode")
    with pytest.raises(ConfigError, match=r"gone\.yaml': no such file\. Give the path"):
        load_config(tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match="it is a directory"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"transport: \xe9\n")
    with pytest.raises(ConfigError, match=r"not UTF-8 text .*save it as UTF-8"):
        load_config(tmp_path / "latin.yaml")


@given(st.text())
@settings(deadline=None)
def test_no_text_escapes_as_another_error(tmp_path_factory: Any, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    reading = read_config(path, {})
    assert (reading.config is None) == bool(reading.problems)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["auto", "off", "gloo_a2a", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["level", "x", "gloo_a2a"]), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*MergeConfig.model_fields, "x"]), _json, max_size=5))
@settings(deadline=None)
def test_no_mapping_escapes_as_another_error(values: dict[str, Any]) -> None:
    reading = read_config(values, {})
    assert (reading.config is None) == bool(reading.problems)


def test_every_key_says_what_it_expects() -> None:
    schema = MergeConfig.model_json_schema()
    for name, body in schema["properties"].items():
        assert body.get("description"), name
        assert (name,) in _EXPECTED or "enum" in body, name
