"""Hazards 32, 33, 39, 41, 42: whatever fails, and wherever, all ranks decide the same and say why."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import dcpcomm
from dcpcomm.backends.loopback import Loopback
from dcpcomm.errors import ConfigError, SelectionMismatch, TransportUnavailable, VerificationFailed
from dcpcomm.testing import Fault
from tests.agreement import (
    PATIENCE_S,
    REASONS,
    STAGES,
    Built,
    Failed,
    construct,
    flaky,
    merges_right,
    others_than,
    rank_here,
    registered,
    settings,
    stage_of,
)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    for variable in ("DCPCOMM_CONFIG", "DCPCOMM_TRANSPORT", "DCPCOMM_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("DCPCOMM_CACHE_DIR", str(tmp_path / "cache"))
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("rank ")], "a rank's thread was left behind"


def all_built(fates: list[Any], transport: str) -> list[Built]:
    for rank, fate in enumerate(fates):
        assert isinstance(fate, Built), f"rank {rank}: {getattr(fate, 'trace', fate)}"
        assert fate.transport == transport
        assert fate.right, f"rank {rank}: the first merge over {transport} is wrong"
    return fates


def all_failed(fates: list[Any], kind: type[Exception]) -> list[Failed]:
    for rank, fate in enumerate(fates):
        assert isinstance(fate, Failed), f"rank {rank}: {fate}"
        assert fate.kind is kind, fate.trace
        assert fate.text.startswith(f"rank {rank}: "), fate.text
    return fates


# ---------------------------------------------------------------- one rank fails (32)


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("failing", STAGES)
def test_one_rank_fails_and_all_take_the_same_fallback(failing: str, culprit: int) -> None:
    with registered(flaky("shaky", {culprit: failing})):
        fates = construct(3, settings(prefer=["shaky", "loopback"]))
    for fate in all_built(fates, "loopback"):
        line = fate.line("shaky")
        assert f"fell at {stage_of(failing)} on rank {culprit}" in line
        assert REASONS[failing] in line
        assert fate.line("loopback").startswith("loopback: in use")
    assert len({fate.line("shaky") for fate in fates}) == 1


@pytest.mark.parametrize("failing", STAGES)
def test_a_named_transport_that_fails_on_one_rank_raises_on_all(failing: str) -> None:
    kind = VerificationFailed if failing == "verify" else TransportUnavailable
    with registered(flaky("shaky", {1: failing})):
        for fate in all_failed(construct(3, settings(transport="shaky")), kind):
            assert f"{stage_of(failing)} on rank 1" in fate.text
            assert REASONS[failing] in fate.text
            assert "on_unavailable: fallback" in fate.text


def test_a_named_transport_that_fails_falls_back_where_that_is_wanted() -> None:
    with registered(flaky("shaky", {1: "connect"}), flaky("shakier", {0: "check", 2: "verify"})):
        config = settings(transport="shaky", on_unavailable="fallback", prefer=["shakier"])
        for fate in all_built(construct(3, config), "loopback"):
            assert "connect on rank 1" in fate.line("shaky")
            assert "check on rank 0" in fate.line("shakier")


def test_a_named_transport_that_works_is_taken_whatever_else_does() -> None:
    with registered(flaky("aaa", {}), flaky("steady", {})):
        for n in (2, 4):
            all_built(construct(n, settings(transport="steady")), "steady")


def test_the_fallen_are_closed_on_every_rank() -> None:
    closed: list[tuple[str, int]] = []

    class Closing(Loopback):
        def close(self) -> None:
            closed.append((self.name, self.group.rank))
            super().close()

    with registered(flaky("a", {1: "connect"}, inner=Closing), flaky("b", {0: "verify"}, inner=Closing)):
        all_built(construct(3, settings(prefer=["a", "b", "loopback"])), "loopback")
    assert {(name, rank) for name in "ab" for rank in range(3)} <= set(closed)


# ---------------------------------------------------------------- not there, not fit (33, 41)


def test_a_named_transport_that_is_not_there_is_an_error_everywhere() -> None:
    for fate in construct(3, settings(transport="shakky")):
        assert isinstance(fate, Failed)
        assert fate.kind is ConfigError
        assert "shakky" in fate.text
        assert "loopback" in fate.text
        assert fate.seconds < PATIENCE_S


def test_a_named_transport_that_cannot_work_here_says_why_and_what_to_do() -> None:
    with registered(flaky("gpu", dict.fromkeys(range(2), "declared"))):
        for fate in all_failed(construct(2, settings(transport="gpu")), TransportUnavailable):
            assert "works on cuda" in fate.text
            assert "cpu" in fate.text


def test_what_is_importable_but_compiled_out_gives_its_reason() -> None:
    too_old = flaky("oldlib", {}, Fault("refuse", stage="check", reason="liboldlib 1.0 has no a2a; 1.4 is needed"))
    with registered(too_old):
        for fate in all_built(construct(2, settings(prefer=["oldlib", "loopback"])), "loopback"):
            assert "fell at check on rank 0: liboldlib 1.0 has no a2a; 1.4 is needed" in fate.line("oldlib")


def test_nothing_is_left_when_all_is_forbidden() -> None:
    for fate in all_failed(construct(2, settings(forbid=others_than())), TransportUnavailable):
        assert "forbid" in fate.text


# ---------------------------------------------------------------- two hosts (39)


def test_one_host_transports_drop_out_by_host_identity_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcpcomm.topology.host_identity", lambda: f"host-{rank_here() // 2}")
    tried = Fault("delay", stage="prepare", seconds=0)
    near, far = flaky("near", {}, tried), flaky("far", {}, tried, multi_host=True)
    with registered(near, far):
        for fate in all_built(construct(4, settings(prefer=["near", "far"])), "far"):
            line = fate.line("near")
            assert "fell at declared on rank 0" in line
            assert "host" in line
            assert "2" in line
            assert "2 host(s)" in fate.explained
        assert len(far.injected) == 4
        assert near.injected == []
        for fate in all_failed(construct(4, settings(transport="near")), TransportUnavailable):
            assert "host" in fate.text
        assert near.injected == []


def test_one_host_is_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcpcomm.topology.host_identity", lambda: "the-same")
    with registered(flaky("near", {})):
        all_built(construct(3, settings(prefer=["near"])), "near")


# ---------------------------------------------------------------- ranks that came with different settings (42)


@pytest.mark.parametrize(
    ("here", "there", "key"),
    [
        ({}, {"prefer": ["loopback"]}, "config.prefer"),
        ({}, {"transport": "loopback"}, "config.transport"),
        ({}, {"max_live": 3}, "config.max_live"),
        ({}, {"options": {"with_options": {"blocks": 2}}}, "config.options.with_options.blocks"),
        ({}, {"watchdog": {"timeout_s": 2 * PATIENCE_S}}, "config.watchdog.timeout_s"),
    ],
)
def test_different_configs_are_named_by_key_and_rank(here: dict[str, Any], there: dict[str, Any], key: str) -> None:
    from pydantic import BaseModel

    class WithOptions(Loopback):
        class Options(BaseModel):
            blocks: int = 1

    with registered(flaky("with_options", {}, inner=WithOptions)):
        fates = construct(3, lambda rank: settings(**(there if rank == 1 else here)))
    for fate in all_failed(fates, SelectionMismatch):
        (line,) = (line for line in fate.text.splitlines() if line.strip().startswith(f"{key}:"))
        assert all(f"rank {rank}: " in line for rank in range(3))
        named = [line.strip().partition(":")[0] for line in fate.text.splitlines()[1:-1]]
        assert all(key.startswith(name) for name in named), f"a key that doesn't differ is named: {fate.text}"
        assert fate.seconds < PATIENCE_S, "nobody waits for a rank that came"


def test_different_shapes_and_configs_are_all_named() -> None:
    fates = construct(
        3,
        lambda rank: settings(deterministic=rank == 2),
        lambda rank: {"max_tokens": 16 if rank == 0 else 8, "lse_base": "2" if rank == 1 else "e"},
    )
    for fate in all_failed(fates, SelectionMismatch):
        assert "shape.max_tokens: rank 0: 16, rank 1: 8, rank 2: 8" in fate.text
        assert "shape.lse_base: rank 0: e, rank 1: 2, rank 2: e" in fate.text
        assert "config.deterministic: rank 0: false, rank 1: false, rank 2: true" in fate.text
        assert "shape.head_dim" not in fate.text


def test_a_rank_whose_config_is_wrong_raises_everywhere_with_its_reason() -> None:
    fates = construct(3, lambda rank: settings(**({"max_live": 0} if rank == 2 else {})))
    assert fates[2].kind is ConfigError
    for fate in all_failed(fates[:2], SelectionMismatch):
        assert "rank 2" in fate.text
        assert "max_live" in fate.text


# ---------------------------------------------------------------- proven_on, max_live


def test_outside_its_proven_places_a_transport_waits_to_be_asked_for() -> None:
    with registered(flaky("proven", {}, proven_on=("sm_100",))):
        for fate in construct(2, settings()):
            assert fate.transport != "proven"
            assert "proven on sm_100" in fate.line("proven")
            assert "loopback" in fate.line("proven")
        for asked in ({"prefer": ["proven"]}, {"transport": "proven"}):
            all_built(construct(2, settings(**asked)), "proven")
    with registered(flaky("proven", {}, proven_on=("loopback", "sm_100"))):
        all_built(construct(2, settings(forbid=others_than("proven"))), "proven")


@pytest.mark.parametrize("max_live", [1, 2])
def test_no_more_transports_stay_connected_than_allowed(max_live: int) -> None:
    live: dict[int, set[str]] = {rank: set() for rank in range(3)}

    class Counted(Loopback):
        def connect(self, peers: list[bytes]) -> None:
            super().connect(peers)
            live[self.group.rank].add(self.name)

        def close(self) -> None:
            super().close()
            live[self.group.rank].discard(self.name)

    seen: dict[int, set[str]] = {}

    def look(rank: int, merger: dcpcomm.DCPMerger) -> None:
        seen[rank] = set(live[rank])
        assert all(merges_right(merger, tokens) for tokens in (1, 2, 5, 8, 20))

    with registered(*(flaky(name, {}, inner=Counted) for name in "abc")):
        fates = construct(3, settings(forbid=others_than(*"abc"), max_live=max_live), inside=look)
    assert all(isinstance(fate, Built) and fate.right for fate in fates), fates
    assert len({frozenset(names) for names in seen.values()}) == 1
    assert 1 <= len(seen[0]) <= max_live
    assert live == {rank: set() for rank in range(3)}


# ---------------------------------------------------------------- any verdicts


NAMES = ("a", "b", "c")
verdicts = st.integers(2, 4).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.fixed_dictionaries(
            {name: st.dictionaries(st.integers(0, n - 1), st.sampled_from(STAGES), max_size=n) for name in NAMES}
        ),
        st.permutations(NAMES),
        st.sampled_from(["prefer", "auto"]),
    )
)


@given(verdicts)
@hypothesis_settings(deadline=None, max_examples=30)
def test_any_verdicts_end_in_one_decision(given_: tuple[int, dict[str, dict[int, str]], list[str], str]) -> None:
    n, plans, order, how = given_
    asked = {"prefer": list(order)} if how == "prefer" else {}
    with registered(*(flaky(name, plan) for name, plan in plans.items())):
        fates = construct(n, settings(forbid=others_than(*NAMES), **asked))
    sound = [name for name in (order if how == "prefer" else NAMES) if not plans[name]]
    fallen = [name for name in order if plans[name]]
    if how == "prefer" and sound:
        all_built(fates, sound[0])
    elif sound:
        assert all(isinstance(fate, Built) and fate.right for fate in fates), fates
        assert len({fate.transport for fate in fates}) == 1
        assert fates[0].transport in sound
    else:
        wrong = any(isinstance(fate, Failed) and fate.kind is VerificationFailed for fate in fates)
        texts = [fate.text for fate in all_failed(fates, VerificationFailed if wrong else TransportUnavailable)]
        assert len({text.partition(": ")[2] for text in texts}) == 1, texts
    for fate in fates:
        said = fate.text if isinstance(fate, Failed) else fate.explained
        for name in fallen:
            if f"{name}: not tried" in said:
                continue
            line = next(line for line in said.splitlines() if line.strip().startswith(f"{name}:"))
            places = [f"fell at {stage_of(stage)} on rank {rank}" for rank, stage in plans[name].items()]
            assert any(place in line for place in places), (line, plans)
