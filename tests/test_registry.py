"""Names -> classes: found without importing, held to the contract, and never a crash."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpcomm import registry
from dcpcomm.errors import ConfigError, DCPCommError, TransportUnavailable
from dcpcomm.transport import API_VERSION, Capabilities, MergeTransport, PeerMemoryTransport
from tests.third_party import TRANSPORT, install

Write = Callable[..., None]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_by_call", {})
    monkeypatch.delenv("DCPCOMM_PLUGINS", raising=False)
    before = set(sys.modules)
    yield
    for module in set(sys.modules) - before:
        if module.startswith("acme_"):
            del sys.modules[module]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """`write(distribution, entry_points, modules)` installs a third party's distribution."""
    monkeypatch.syspath_prepend(tmp_path)
    return lambda *args, **kwargs: install(tmp_path, *args, **kwargs)


class Good(MergeTransport):
    name = "good"
    capabilities = Capabilities(devices=("cpu",))

    def prepare(self) -> bytes:
        return b""

    def connect(self, peers: list[bytes]) -> None:
        pass

    def exchange(self, send: Any, channel: int, recv: Any = None) -> Any:
        return send

    def close(self) -> None:
        pass


def test_own_transports_come_by_entry_point() -> None:
    entries = registry.registered_transports()
    assert {"gloo_a2a", "loopback"} <= set(entries)
    assert list(entries) == sorted(entries)
    assert entries["gloo_a2a"].distribution.startswith("dcpcomm ")
    assert entries["gloo_a2a"].dotted_path == "dcpcomm.backends.gloo_a2a:GlooA2A"


@pytest.mark.parametrize("name", ["gloo_a2a", "loopback"])
def test_own_transports_keep_the_contract(name: str) -> None:
    cls = registry.load_transport(name)
    assert issubclass(cls, MergeTransport)
    assert cls.name == name


def test_listing_imports_no_backend_and_not_torch() -> None:
    script = (
        "import sys, dcpcomm; dcpcomm.registered_transports();"
        "bad = [m for m in sys.modules if m in ('torch', 'pydantic') or 'dcpcomm.backends.' in m];"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_third_party_is_found_and_loaded(write: Write) -> None:
    write("acme-ring", {"ring": "acme_ring:Ring"}, {"acme_ring": TRANSPORT.format(name="ring")})
    entry = registry.registered_transports()["ring"]
    assert (entry.target, entry.distribution, entry.blocked) == ("acme_ring:Ring", "acme-ring 1.2", "")
    assert "acme_ring" not in sys.modules
    assert registry.load_transport("ring").name == "ring"


def test_two_distributions_of_one_name_are_both_named(write: Write) -> None:
    write("acme-one", {"ring": "acme_one:Ring"})
    write("acme-two", {"ring": "acme_two:Ring"})
    with pytest.raises(ConfigError, match=r"'ring'.*acme-one 1\.2.*acme-two 1\.2.*uninstall"):
        registry.registered_transports()


def test_shadowing_an_own_name_is_refused(write: Write) -> None:
    write("acme-gloo", {"gloo_a2a": "acme_gloo:Gloo"})
    with pytest.raises(ConfigError, match=r"acme-gloo 1\.2.*dcpcomm"):
        registry.load_transport("gloo_a2a")


def test_same_distribution_twice_on_the_path_is_one(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("acme-ring", {"ring": "acme_ring:Ring"})
    install(tmp_path / "again", "Acme.Ring", {"ring": "acme_ring:Ring"}, version="1.2")
    monkeypatch.syspath_prepend(tmp_path / "again")
    assert registry.registered_transports()["ring"].dotted_path == "acme_ring:Ring"


@pytest.mark.parametrize("allowed", ["", "other", "acme", "ring2, other"])
def test_allow_list_blocks_without_importing(write: Write, monkeypatch: pytest.MonkeyPatch, allowed: str) -> None:
    write("acme-ring", {"ring": "acme_ring:Ring"}, {"acme_ring": "raise SystemExit('must not be imported')"})
    monkeypatch.setenv("DCPCOMM_PLUGINS", allowed)
    entries = registry.registered_transports()
    assert "DCPCOMM_PLUGINS" in entries["ring"].blocked
    assert entries["gloo_a2a"].blocked == ""
    with pytest.raises(TransportUnavailable, match=r"DCPCOMM_PLUGINS.*add one of them"):
        registry.load_transport("ring")
    assert "acme_ring" not in sys.modules


@pytest.mark.parametrize("allowed", ["acme-ring", "ACME_Ring", "x , ring"])
def test_allow_list_allows_by_distribution_or_name(write: Write, monkeypatch: pytest.MonkeyPatch, allowed: str) -> None:
    write("acme-ring", {"ring": "acme_ring:Ring"}, {"acme_ring": TRANSPORT.format(name="ring")})
    monkeypatch.setenv("DCPCOMM_PLUGINS", allowed)
    assert registry.load_transport("ring").name == "ring"


def test_allow_list_settles_a_conflict(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("acme-one", {"ring": "acme_one:Ring"})
    write("acme-two", {"ring": "acme_two:Ring"})
    monkeypatch.setenv("DCPCOMM_PLUGINS", "acme-two")
    assert registry.registered_transports()["ring"].distribution == "acme-two 1.2"


def test_a_reserved_name_is_listed_as_blocked(write: Write) -> None:
    write("acme-auto", {"auto": "acme_auto:Auto"})
    assert "acme-auto must rename" in registry.registered_transports()["auto"].blocked


def test_unknown_name_gives_the_nearest_and_the_list() -> None:
    with pytest.raises(ConfigError, match=r"'glo_a2a'; did you mean 'gloo_a2a'\? Registered: .*loopback"):
        registry.load_transport("glo_a2a")


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (
            "import acme_driver",
            r"needs the module 'acme_driver'.*install what provides 'acme_driver'.*acme-ring",
        ),
        (
            "raise ImportError('libacme.so.1: cannot open')",
            r"libacme\.so\.1.*install what that names.*\[ring\]",
        ),
        ("1 / 0", r"raised ZeroDivisionError: division by zero.*report that to acme-ring"),
        ("raise SystemExit(3)", r"raised SystemExit: 3"),
        ("raise type('Fatal', (BaseException,), {})('no driver')", r"raised Fatal: no driver"),
        ("def broken(:", r"raised SyntaxError"),
        ("Rings = 1", r"has no 'Ring'.*correct the path"),
    ],
)
def test_a_plug_in_that_fails_to_import_is_a_reason(write: Write, module: str, expected: str) -> None:
    write("acme-ring", {"ring": "acme_ring:Ring"}, {"acme_ring": module})
    with pytest.raises(TransportUnavailable, match=expected) as raised:
        registry.load_transport("ring")
    assert raised.value.__cause__ is not None
    cls, verdict = registry.try_load("ring")
    assert cls is None
    assert not verdict.ok
    assert verdict.reason
    assert verdict.remedy


def test_a_missing_module_of_the_plug_in_itself(write: Write) -> None:
    write("acme-ring", {"ring": "acme_gone.sub:Ring"})
    with pytest.raises(TransportUnavailable, match=r"acme_gone, isn't there; reinstall acme-ring 1\.2"):
        registry.load_transport("ring")


def test_a_malformed_entry_point_harms_only_itself(write: Write) -> None:
    write("acme-ring", {"ring": "not a path"})
    assert "gloo_a2a" in registry.registered_transports()
    with pytest.raises(TransportUnavailable, match="no dotted path"):
        registry.load_transport("ring")


def test_a_distribution_without_metadata_is_still_listed(write: Write, tmp_path: Path) -> None:
    write("acme-ring", {"ring": "acme_ring:Ring"})
    (tmp_path / "acme_ring-1.2.dist-info" / "METADATA").unlink()
    assert registry.registered_transports()["ring"].distribution == "unknown-distribution"


def test_extras_of_an_entry_point_are_no_part_of_the_path(write: Write) -> None:
    write("acme-ring", {"ring": "acme_ring:Ring [fast]"}, {"acme_ring": TRANSPORT.format(name="ring")})
    assert registry.load_transport("ring").name == "ring"


def _variant(base: Any = Good, **attributes: Any) -> Any:
    return type("Variant", (base,), attributes)


class _Unnamed(MergeTransport):
    capabilities = Good.capabilities
    prepare, connect, exchange, close = Good.prepare, Good.connect, Good.exchange, Good.close


class _Incapable(_Unnamed):
    name = "good"
    capabilities = None  # type: ignore[assignment]


class _Still(_Unnamed):
    name = "good"
    exchange = MergeTransport.exchange


class _HalfPeer(PeerMemoryTransport):
    name = "good"
    capabilities = Good.capabilities
    prepare, connect, close = Good.prepare, Good.connect, Good.close


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (int, r"is class int; expected a subclass of dcpcomm\.MergeTransport; derive"),
        (
            _variant(api_version=API_VERSION + 1),
            rf"api_version {API_VERSION + 1}; .*expects {API_VERSION}; install",
        ),
        (_variant(api_version="1"), r"api_version '1'"),
        (_Unnamed, r"no class attribute `name`.*set `name = 'good'`"),
        (_variant(name="bad"), r"calls itself 'bad'; expected the registered name 'good'"),
        (_Incapable, r"no class attribute `capabilities`.*set `capabilities"),
        (
            _variant(capabilities={"devices": "cpu"}),
            r"capabilities \{'devices': 'cpu'\}; expected a dcpcomm\.Cap",
        ),
        (_HalfPeer, r"lacks map_symmetric; .*write map_symmetric"),
        (_Still, r"neither `exchange` nor `fused_merge`"),
        (_variant(Options=dict), r"Options .*dict.*expected a pydantic model or None"),
    ],
)
def test_the_contract_says_what_came_and_what_to_change(cls: Any, expected: str) -> None:
    registry.register_transport("good", cls)
    with pytest.raises(TransportUnavailable, match=expected):
        registry.load_transport("good")


@pytest.mark.parametrize("path", [f"{__name__}:Good", f"{__name__}.Good"])
def test_register_by_dotted_path(path: str) -> None:
    registry.register_transport("good", path)
    assert registry.registered_transports()["good"].distribution == "register_transport"
    assert registry.load_transport("good") is Good


def test_register_a_class_twice_is_once_and_another_is_refused() -> None:
    registry.register_transport("good", Good)
    registry.register_transport("good", Good)
    assert registry.load_transport("good") is Good
    with pytest.raises(ConfigError, match=r"already registered .*Good by this name"):
        registry.register_transport("good", _variant())
    registry.unregister_transport("good")
    registry.unregister_transport("good")
    assert "good" not in registry.registered_transports()


def test_register_can_not_take_an_entry_points_name() -> None:
    with pytest.raises(ConfigError, match=r"dcpcomm .* has already registered"):
        registry.register_transport("gloo_a2a", Good)


def test_what_the_process_registers_itself_needs_no_allow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCPCOMM_PLUGINS", "")
    registry.register_transport("good", Good)
    assert registry.load_transport("good") is Good


@pytest.mark.parametrize("name", ["auto", "", "two words", "a.b", "x\n", None, 3])
def test_register_refuses_names_that_a_config_could_not_say(name: Any) -> None:
    with pytest.raises(ConfigError, match="can't be a transport's name"):
        registry.register_transport(name, Good)


@pytest.mark.parametrize("target", ["Class", "pkg:", ":Class", "pkg mod:Class", "", 3, Good.name])
def test_register_refuses_what_is_no_class(target: Any) -> None:
    with pytest.raises(ConfigError, match=r"no dotted path|expected a class"):
        registry.register_transport("x", target)


@given(st.text(max_size=30), st.text(max_size=30))
@settings(deadline=None)
def test_no_input_escapes_as_another_error(name: str, target: str) -> None:
    try:
        with contextlib.suppress(DCPCommError):
            registry.register_transport(name, target)
            registry.load_transport(name)
    finally:
        registry.unregister_transport(name)
