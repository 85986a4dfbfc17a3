"""Rows 16, 40 and 42 of the list of faults: ranks that do not come are named within a deadline."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.oracle import Case, judge, make_case
from tests.steps import step_results
from tests.world import AT_ONCE_S, Raised, World, config_for, meet, merger_for, outcome, rank_of, size_of

DEADLINE_S = 1.5
SLACK_S = 8.0  # two cores, four ranks, and other things to do
IMPATIENT = {"watchdog": {"timeout_s": DEADLINE_S}, "verify": {"level": "quick", "deadline_s": DEADLINE_S}}


def judge_absence(error: Any, missing: int, n: int, what: str) -> None:
    assert isinstance(error, Raised), f"{what}: went on without rank {missing}: {error}"
    assert "TransportTimeout" in error.kinds, f"{what}: {error.trace}"
    assert error.names(missing), f"{what}: rank {missing} is not named: {error.text}"
    assert error.ranks == (missing,), f"{what}: blames {error.ranks} of {n} ranks, not {missing}: {error.text}"
    assert error.seconds < DEADLINE_S + SLACK_S, f"{what}: took {error.seconds:.1f} s"


def never_constructs(group: Any, missing: int) -> Any:
    rank = rank_of(group)
    error = None if rank == missing else outcome(merger_for, group, None, **IMPATIENT)
    meet()
    return error


def test_a_rank_that_never_comes_to_construction_is_named(peers: World) -> None:
    for missing in {2: (0,), 3: (2,), 4: (1,)}[peers.n]:  # rank 0 decides: its absence is another path
        errors = peers.run(never_constructs, missing, fresh=True)
        for rank, error in enumerate(errors):
            if rank != missing:
                judge_absence(error, missing, peers.n, f"rank {rank}")


def stops_calling(group: Any, case: Case, missing: int) -> Any:
    """Two merges by all, one without rank `missing`, which calls too late; a reset, and right again."""
    rank = rank_of(group)
    partial, lse = case.outs[rank], case.lses[rank]
    merger = merger_for(group, {"channels": 2}, **IMPATIENT)
    good = [merger.merge(partial, lse) for _ in range(2)]
    error = None if rank == missing else outcome(merger.merge, partial, lse)
    meet()
    late = outcome(
        merger.merge, partial, lse
    )  # on all: the others' channel is poisoned, and the late rank must hear it
    meet()
    merger.reset()
    good += [merger.merge(partial, lse, channel=k) for k in (0, 1, 0)]
    merger.check()
    merger.close()
    total = torch.ones(1)
    if isinstance(group, dist.ProcessGroup):
        dist.all_reduce(total, group=group)  # the engine's own group has survived
    else:
        total *= size_of(group)
    return error, late, total.item(), good


def test_a_rank_that_stops_calling_is_named_and_reset_brings_it_back(peers: World, rng: torch.Generator) -> None:
    """Row 40, as far as a CPU goes: every peer names the same rank, none of them another victim."""
    case = make_case(rng, peers.n, b=5)
    for missing in {2: (0, 1), 3: (1,), 4: (0, 3)}[peers.n]:
        by_rank = peers.run(stops_calling, case, missing, fresh=True)
        for rank, (error, late, total, _) in enumerate(by_rank):
            if rank != missing:
                judge_absence(error, missing, peers.n, f"rank {rank}")
                assert isinstance(late, Raised), f"rank {rank}: a merge went through on a poisoned channel"
                assert "reset" in late.text, f"does not say how to go on: {late.text}"
            assert isinstance(late, Raised), f"rank {rank}: a merge went through on a poisoned channel"
            assert "DCPCommError" in late.kinds, late.trace
            assert late.seconds < DEADLINE_S + SLACK_S
            assert total == peers.n
        for results in step_results([good for *_, good in by_rank]):
            judge(results, case)


def waits_once(group: Any, case: Case, missing: int) -> Any:
    """Many merges without rank `missing`: the deadline is paid once, not once a call."""
    rank = rank_of(group)
    merger = merger_for(group, **IMPATIENT)
    start = time.monotonic()
    errors = [] if rank == missing else [outcome(merger.merge, case.outs[rank], case.lses[rank]) for _ in range(20)]
    spent = time.monotonic() - start
    meet()
    outcome(merger.close)
    return errors, spent


def test_one_deadline_not_one_for_each_call(some: World, rng: torch.Generator) -> None:
    """Row 40: one deadline, not 61."""
    case = make_case(rng, some.n, b=5)
    for rank, (errors, spent) in enumerate(some.run(waits_once, case, 1, fresh=True)):
        if rank != 1:
            judge_absence(errors[0], 1, some.n, f"rank {rank}")
            assert all(isinstance(e, Raised) and "DCPCommError" in e.kinds for e in errors)
            assert spent < DEADLINE_S + SLACK_S


# ---------------------------------------------------------------- different constructions


def constructs_differently(group: Any, odd: int, shape: dict, config: dict) -> Any:
    rank = rank_of(group)
    if config.get("forbid"):  # a registered name that is not the one under test
        names = {"gloo_a2a", "loopback"} - {config_for(group)["transport"]}
        config = {"forbid": sorted(names)}
    mine = (shape, config) if rank == odd else ({}, {})
    return outcome(merger_for, group, mine[0], **mine[1])


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "max_tokens": ({"max_tokens": 33}, {}),
    "head_dim": ({"head_dim": 48}, {}),
    "dtype": ({"dtype": torch.float16}, {}),
    "lse_base": ({"lse_base": "2"}, {}),
    "scatter": ({"scatter": "none"}, {}),
    "channels": ({"channels": 2}, {}),
    "v_head_dim": ({"v_head_dim": 16}, {}),
    "deterministic": ({}, {"deterministic": True}),
    "forbid": ({}, {"forbid": ["the other one"]}),
    "transport": ({}, {"transport": "auto"}),
    "max_live": ({}, {"max_live": 1}),
    "timeout_s": ({}, {"watchdog": {"timeout_s": 14}}),
}


def test_different_shapes_or_configs_are_a_mismatch_on_every_rank(some: World, rng: torch.Generator) -> None:
    """Row 42, section 7.1: SelectionMismatch everywhere, naming the fields; then a right one works."""
    for i, (field, (shape, config)) in enumerate(DIFFERENT.items()):
        odd = i % some.n
        for rank, error in enumerate(some.run(constructs_differently, odd, shape, config)):
            assert isinstance(error, Raised), f"{field}: rank {rank} went on"
            assert "SelectionMismatch" in error.kinds, f"{field}: rank {rank}: {error.trace}"
            assert field in error.text, f"{field}: rank {rank}: {error.text}"
            assert error.names(odd), f"{field}: rank {rank} does not say that rank {odd} differs: {error.text}"
            alike = [f for f in DIFFERENT if f != field and f + "=" in error.text]
            assert not alike, f"{field}: names {alike}, which do not differ"
            assert error.seconds < AT_ONCE_S
    case = make_case(rng, some.n, b=3)
    judge(some.run(right_after_all, case), case)


def right_after_all(group: Any, case: Case) -> Any:
    rank = rank_of(group)
    with merger_for(group) as merger:
        return merger.merge(case.outs[rank], case.lses[rank])


def differs_in_heads(group: Any) -> Any:
    """On one rank alone the heads do not divide: it must not leave its peers waiting for the deadline."""
    rank, n = rank_of(group), size_of(group)
    return outcome(merger_for, group, {"num_heads": 4 * n + (rank == n - 1)})


def test_heads_that_do_not_divide_on_one_rank_alone(some: World) -> None:
    for rank, error in enumerate(some.run(differs_in_heads, fresh=True)):
        assert isinstance(error, Raised)
        expected = {"SelectionMismatch"} if rank < some.n - 1 else {"SelectionMismatch", "ShapeError"}
        assert expected & set(error.kinds), error.trace
        assert "num_heads" in error.text
        assert error.seconds < AT_ONCE_S


@pytest.mark.parametrize("name", ["no_such_transport", "glo_a2a"])
def test_an_unknown_transport_is_a_config_error_at_once(some: World, name: str) -> None:
    for error in some.run(constructs_unknown, name):
        assert "ConfigError" in error.kinds, error.trace
        assert name in error.text
        assert error.seconds < AT_ONCE_S


def constructs_unknown(group: Any, name: str) -> Any:
    return outcome(merger_for, group, None, transport=name)
