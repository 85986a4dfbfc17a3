"""Configurations: what they mean, which source wins, and what transports and ranks make of them."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, field_validator

import dcpcomm.configs
from dcpcomm import registry
from dcpcomm.config import (
    MergeConfig,
    config_fingerprint,
    config_schema,
    load_config,
    options_for,
    read_config,
)
from dcpcomm.errors import ConfigError
from dcpcomm.transport import Capabilities, MergeTransport
from tests.third_party import TRANSPORT, install

SHIPPED = sorted(Path(dcpcomm.configs.__path__[0]).glob("*.yaml"))
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


class Tuned(MergeTransport):
    """A transport with options."""

    name = "tuned"
    capabilities = Capabilities(devices=("cpu",))

    class Options(BaseModel):
        class Ring(BaseModel, extra="forbid"):
            depth: int = 1

        blocks: int = 4
        mode: str = "fast"
        ring: Ring = Ring()

        @field_validator("mode")
        @classmethod
        def _explodes(cls, value: str) -> str:
            if value == "explode":
                raise RuntimeError("bang")
            return value

    def prepare(self) -> bytes:
        return b""

    def connect(self, peers: list[bytes]) -> None:
        pass

    def exchange(self, send: Any, channel: int, recv: Any = None) -> Any:
        return send

    def close(self) -> None:
        pass


class Plain(Tuned):
    name = "plain"
    Options = None  # type: ignore[assignment]


class Needy(Tuned):
    name = "needy"

    class Options(BaseModel):  # type: ignore[assignment]
        device: str


@pytest.fixture
def transports() -> None:
    for cls in (Tuned, Plain, Needy):
        registry.register_transport(cls.name, cls)


# --- what is right --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_file_loads_by_path_and_by_name(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(path) == load_config(path.name) == load_config(path.stem)


def test_shipped_auto_names_every_key_and_changes_nothing() -> None:
    said = yaml.safe_load(next(path for path in SHIPPED if path.stem == "auto").read_text())
    assert list(said) == list(MergeConfig.model_fields)
    assert load_config("auto") == MergeConfig()


def test_a_file_of_that_name_comes_before_a_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "auto.yaml").write_text("max_live: 7")
    assert load_config("auto.yaml").max_live == 7
    assert load_config("auto").max_live == 2


def test_the_whole_of_design_section_8(node: Yaml, transports: None) -> None:
    config = load_config(
        node(
            "transport: auto\nprefer: [tuned, gloo_a2a]\nforbid: [loopback]\non_unavailable: fallback\n"
            "projection: before\ndeterministic: true\nmax_live: 1\nmax_sms: 8\ncost_table: builtin\n"
            "verify: {level: off, deadline_s: 2}\nwatchdog: {timeout_s: 1e2, action: log}\n"
            "options:\n  tuned: {blocks: 010}\n"
        )
    )
    assert (config.prefer, config.forbid, config.max_sms) == (("tuned", "gloo_a2a"), ("loopback",), 8)
    assert (config.verify.level, config.verify.deadline_s) == ("off", 2.0)
    assert (config.watchdog.timeout_s, config.watchdog.action) == (100.0, "log")
    assert options_for(config, Tuned).blocks == 10


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "{}"])
def test_an_empty_file_is_auto(node: Yaml, text: str) -> None:
    assert load_config(node(text)) == MergeConfig()


def test_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbfmax_live: 3\r\nmax_sms: 4\r\n")
    assert load_config(path).max_sms == 4


def test_a_config_is_frozen_and_survives_pickling() -> None:
    config = load_config({"prefer": ["gloo_a2a"], "verify": {"level": "quick"}})
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert again.model_fields_set == config.model_fields_set
    with pytest.raises(ValueError, match="frozen"):
        config.max_live = 3  # type: ignore[misc]


def test_a_config_does_not_share_its_callers_mapping(transports: None) -> None:
    given_options = {"tuned": {"blocks": 1}}
    config = load_config({"options": given_options})
    given_options["tuned"]["blocks"] = 2
    assert config.options == {"tuned": {"blocks": 1}}


_names = st.lists(st.sampled_from(["gloo_a2a", "loopback"]), unique=True)


@st.composite
def _valid(draw: st.DrawFn) -> dict[str, Any]:
    prefer = draw(_names)
    values = {
        "prefer": prefer,
        "forbid": [name for name in draw(_names) if name not in prefer],
        "on_unavailable": draw(st.sampled_from(["error", "fallback"])),
        "projection": draw(st.sampled_from(["auto", "before", "after"])),
        "deterministic": draw(st.booleans()),
        "max_live": draw(st.integers(1, 99)),
        "max_sms": draw(st.one_of(st.just("auto"), st.integers(1, 999))),
        "verify": {"level": draw(st.sampled_from(["off", "quick", "standard", "soak"]))},
        "watchdog": {
            "timeout_s": draw(st.floats(1e-3, 1e6)),
            "action": draw(st.sampled_from(["raise", "log"])),
        },
    }
    return {key: value for key, value in values.items() if draw(st.booleans())}


@given(_valid())
@settings(deadline=None)
def test_a_valid_mapping_and_its_yaml_mean_the_same(tmp_path_factory: Any, values: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "same.yaml"
    path.write_text(json.dumps(values))  # JSON is YAML 1.2
    config = load_config(values)
    assert load_config(path) == config == load_config(config)
    assert config_fingerprint(load_config(path)) == config_fingerprint(config)
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(path) == config


# --- authority ------------------------------------------------------------------------------------


def test_environment_wins_over_a_file_however_it_was_named(node: Yaml, monkeypatch: pytest.MonkeyPatch) -> None:
    path = node("transport: gloo_a2a\nmax_live: 3")
    assert load_config(path).transport == "gloo_a2a"
    monkeypatch.setenv("DCPCOMM_TRANSPORT", "loopback")
    assert load_config(path).transport == load_config(str(path)).transport == "loopback"
    monkeypatch.setenv("DCPCOMM_CONFIG", str(path))
    assert (load_config().transport, load_config().max_live) == ("loopback", 3)
    monkeypatch.setenv("DCPCOMM_TRANSPORT", "auto")
    assert load_config().transport == "auto"


def test_an_argument_wins_over_the_environment_in_what_it_sets(node: Yaml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCPCOMM_CONFIG", str(node("max_live: 9")))
    monkeypatch.setenv("DCPCOMM_TRANSPORT", "loopback")
    assert load_config({"transport": "gloo_a2a"}).transport == "gloo_a2a"
    assert load_config({"transport": "auto"}).transport == "auto"
    assert load_config(MergeConfig(transport="auto")).transport == "auto"
    assert load_config({"max_live": 4}).transport == "loopback"
    assert load_config(MergeConfig(max_live=4)).transport == "loopback"
    assert load_config({}).max_live == 2
    assert load_config(load_config({"transport": "gloo_a2a"})).transport == "gloo_a2a"


def test_empty_variables_count_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCPCOMM_CONFIG", "")
    monkeypatch.setenv("DCPCOMM_TRANSPORT", "")
    assert load_config() == MergeConfig()


def test_mistakes_in_the_environment_name_the_variable(node: Yaml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCPCOMM_TRANSPORT", "glo_a2a")
    with pytest.raises(ConfigError, match=r"^environment DCPCOMM_TRANSPORT: .*did you mean 'gloo_a2a'\?"):
        load_config()
    monkeypatch.setenv("DCPCOMM_TRANSPORT", "gloo_a2a")
    path = node("forbid: [gloo_a2a]")
    with pytest.raises(ConfigError, match=r"node\.yaml:1: .*asked for by environment DCPCOMM_TRANSPORT"):
        load_config(path)
    monkeypatch.setenv("DCPCOMM_CONFIG", "/no/such/file.yaml")
    with pytest.raises(ConfigError, match=r"^DCPCOMM_CONFIG '/no/such/file\.yaml': no such file"):
        load_config()


# --- options of transports ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (
            "tuned:\n    blocks: many",
            3,
            r"options\.tuned\.blocks: Input should be a valid integer.*it is 'many'",
        ),
        (
            "tuned:\n    block: 1",
            3,
            r"key 'options\.tuned\.block' is not known; did you mean 'blocks'\? .*ring",
        ),
        ("tuned:\n    ring:\n      dept: 1", 4, r"key 'options\.tuned\.ring\.dept' is not known"),
        ("tuned:\n    mode: explode", 2, r"options\.tuned: checking it raised RuntimeError: bang"),
        ("plain:\n    x: 1", 2, r"transport 'plain' has no options; remove options\.plain"),
        ("needy: {}", 2, r"options\.needy\.device is missing, and the transport needs it"),
    ],
)
def test_options_are_judged_by_the_transports_own_model(
    node: Yaml, transports: None, text: str, line: int, message: str
) -> None:
    path = node(f"options:\n  {text}\n")
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}:{line}: {message}"):
        load_config(path)


def test_options_for(transports: None) -> None:
    config = load_config({"options": {"tuned": Tuned.Options(blocks=9), "plain": {}}})
    assert config.options["tuned"] == {"blocks": 9}
    assert options_for(config, Tuned) == Tuned.Options(blocks=9)
    assert options_for(MergeConfig(), Tuned) == Tuned.Options()
    assert options_for(config, Plain) is None
    with pytest.raises(ConfigError, match=r"options\.needy\.device is missing"):
        options_for(config, Needy)


def test_options_of_what_can_not_be_imported_are_kept_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "acme-cfg", {"acme_cfg": "acme_cfg:Ring"}, {"acme_cfg": "import acme_absent"})
    monkeypatch.syspath_prepend(tmp_path)
    reading = read_config({"options": {"acme_cfg": {"x": 1}}}, {})
    assert reading.config is not None
    assert reading.config.options == {"acme_cfg": {"x": 1}}
    assert "acme_absent" in reading.notes[0]


def test_options_of_a_third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: Yaml) -> None:
    source = TRANSPORT.format(name="acme_opt")
    install(tmp_path, "acme-opt", {"acme_opt": "acme_opt:Ring"}, {"acme_opt": source})
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(node("prefer: [acme_opt]\noptions:\n  acme_opt: {blocks: 2}"))
    assert options_for(config, registry.load_transport("acme_opt")).blocks == 2
    assert config_schema()["properties"]["options"]["properties"]["acme_opt"]["properties"]["blocks"]


# --- fingerprint, schema --------------------------------------------------------------------------


def test_fingerprint_is_flat_text_and_shows_the_difference(transports: None) -> None:
    one = config_fingerprint(load_config({"options": {"tuned": {"ring": {"depth": 1}}}}))
    two = config_fingerprint(load_config({"options": {"tuned": {"ring": {"depth": 2}}}}))
    assert {key for key in one.keys() | two.keys() if one.get(key) != two.get(key)} == {"options.tuned.ring.depth"}
    assert one["verify.level"] == '"standard"'
    assert all(isinstance(value, str) for value in one.values())
    assert one == config_fingerprint(
        pickle.loads(pickle.dumps(load_config({"options": {"tuned": {"ring": {"depth": 1}}}})))
    )


def test_a_cost_table_is_found_beside_its_file_and_counts_by_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prints = []
    for host, content in (("a", "x: 1"), ("b", "x: 1"), ("c", "x: 2")):
        folder = tmp_path / host
        folder.mkdir()
        (folder / "costs.yaml").write_text(content)
        (folder / "node.yaml").write_text("cost_table: costs.yaml")
        prints.append(config_fingerprint(load_config(folder / "node.yaml")))
    assert prints[0] == prints[1] != prints[2]
    monkeypatch.chdir(tmp_path / "a")
    config = load_config({"cost_table": Path("costs.yaml")})
    assert config.cost_table == str(tmp_path / "a" / "costs.yaml")
    (tmp_path / "a" / "costs.yaml").unlink()
    with pytest.raises(ConfigError, match="can't be read"):
        config_fingerprint(config)


def test_schema_names_transports_and_resolves_its_references(transports: None) -> None:
    schema = config_schema()
    json.dumps(schema)
    properties = schema["properties"]
    assert set(properties) == set(MergeConfig.model_fields)
    assert {"auto", "gloo_a2a", "loopback", "tuned"} <= set(properties["transport"]["enum"])
    assert "auto" not in properties["prefer"]["items"]["enum"]
    assert properties["options"]["properties"]["plain"]["maxProperties"] == 0
    references = set(re.findall(r'"\$ref": "#/\$defs/([^"]+)"', json.dumps(schema)))
    assert "tuned.Ring" in references
    assert references <= set(schema["$defs"])
