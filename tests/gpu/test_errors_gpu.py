"""Rows 16, 40 and 40a of the list of faults on one GPU: an error that a kernel finds is told by check() and the next
call, and what was asked for is NaN, never another call's rows.

On a CPU the call itself raises; `met` makes one of the two.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import pytest
import torch

from tests.gpu.rig import (
    ON_GPU,
    ONE_GPU,
    by_call,
    capture,
    fetched,
    finished,
    merger_for,
    mine,
    room_for,
    run,
    settle,
    together,
)
from tests.oracle import Case, judge, make_case
from tests.world import Raised, listening, meet, outcome

pytestmark = ONE_GPU
RANKS = pytest.mark.parametrize("n", [2, 4])
DEADLINE_S, SLACK_S = 1.5, 3.0
IMPATIENT = {"watchdog": {"timeout_s": DEADLINE_S}}


class Met(NamedTuple):
    """What came of a call that can't be right: results on CPU (None where the call raised), what check() then raised,
    and what the next call did.
    """

    results: Any
    checked: Any
    following: Any
    seconds: float


def met(merger: Any, partial: torch.Tensor, lse: torch.Tensor, **keywords: Any) -> Met:
    """Into results that are 0, so that NaN in them was written."""
    out, _ = room_for(merger, partial.shape[0], value=0.0)
    start = time.monotonic()
    raised = outcome(merger.merge, partial, lse, out=out, return_lse=True, **keywords)
    settle()
    seconds = time.monotonic() - start
    if isinstance(raised, Raised):
        assert not ON_GPU, raised.trace
        return Met(None, raised, outcome(merger.merge, partial, lse, **keywords), seconds)
    return Met(
        (out.cpu(), raised[1].cpu()),
        outcome(merger.check),
        outcome(merger.merge, partial, lse, **keywords),
        seconds,
    )


def judge_met(one: Met, kind: str, words: tuple[object, ...], what: str) -> None:
    for error, when in ((one.checked, "check()"), (one.following, "the next call")):
        assert isinstance(error, Raised), f"{what}: {when} went on: {error}"
        assert kind in error.kinds, f"{what}: {when}: {error.trace}"
        assert error.names(*words), f"{what}: {when} does not name all of {words}: {error.text}"
    assert "reset" in one.following.text, f"{what}: the next call does not say how to go on: {one.following.text}"
    judge_all_nan(one.results, what)


def judge_all_nan(results: Any, what: str) -> None:
    for name, tensor in zip(("out", "lse"), results or (), strict=False):
        alive = int((~tensor.isnan()).sum())
        assert not alive, f"{what}: {alive} of {tensor.numel()} values of {name} are no NaN: what are they then?"


def odd_call(group: Any, cases: list[Case], odd: int, how: str) -> Any:
    rank = group.rank
    data = mine(cases, rank)
    (partial, lse), (again, again_lse) = data[1], data[2]
    with merger_for(group, {"channels": 2}) as merger:
        good = [merger.merge(*data[0], return_lse=True, tag=3)]
        settle()
        merger.check()
        rows, tag = len(partial), 41
        if rank == odd:
            rows, tag = (rows, 77) if how == "tag" else (rows - 2, 41)
        wrong = met(merger, partial[:rows], lse[:rows], tag=tag)
        good.append(merger.merge(again, again_lse, return_lse=True, channel=1))
        together()
        merger.reset()
        for k in (0, 1, 0):
            good.append(merger.merge(again, again_lse, return_lse=True, channel=k, tag=3))
        return wrong, finished(merger, good)


@RANKS
@pytest.mark.parametrize("how", ["tag", "rows"])
def test_ranks_in_different_calls_are_told_so(n: int, rng: torch.Generator, how: str) -> None:
    """Row 40a; the other channel goes on, and reset() makes it right again."""
    for odd in (0, n - 1):
        cases = [make_case(rng, n, b=b) for b in (5, 11, 6)]
        by_rank = run(n, odd_call, cases, odd, how)
        for rank, (wrong, _) in enumerate(by_rank):
            words = ("rank " + str(odd), *((41, 77) if how == "tag" else ("B=11", "B=9")))
            judge_met(wrong, "CallMismatch", words, f"rank {rank}, rank {odd} with another {how}")
            own = f"rank {rank} came with"
            assert own in wrong.checked.text, f"the own side, {own!r}, is missing: {wrong.checked.text}"
        results = by_call([good for _, good in by_rank])
        for i, got in enumerate(results):
            judge(got, cases[0] if i == 0 else cases[2], what=f"good call {i}")


def odd_in_a_graph(group: Any, cases: list[Case], odd: int) -> Any:
    """A replay of tag 8 on one rank, of tag 9 on the others; only after ten more replays does anybody look."""
    data = mine(cases, group.rank)
    with merger_for(group) as merger:
        out, out_lse = room_for(merger, len(data[0][0]), value=0.0)

        def step() -> None:
            out_lse.copy_(merger.merge(*data[0], out=out, return_lse=True, tag=8 + (group.rank == odd))[1])

        graph = capture(step)
        raised = [outcome(graph.replay) for _ in range(11)]
        settle()
        first = outcome(merger.check)
        wrong = fetched([(out, out_lse)])[0] if ON_GPU else None
        together()
        merger.reset()
        return raised, first, wrong, finished(merger, [merger.merge(*data[1], return_lse=True)])


@RANKS
def test_a_mismatch_in_a_replay_is_found_at_the_next_check(n: int, rng: torch.Generator) -> None:
    cases = [make_case(rng, n, b=4) for _ in range(2)]
    by_rank = run(n, odd_in_a_graph, cases, 1)
    for rank, (raised, first, wrong, _) in enumerate(by_rank):
        assert ON_GPU is not any(isinstance(one, Raised) for one in raised)
        assert isinstance(first, Raised), f"rank {rank}: check() saw nothing"
        assert "CallMismatch" in first.kinds, first.trace
        assert first.names("tag 8", "tag 9", "rank 1"), first.text
        judge_all_nan(wrong, f"rank {rank}")
    judge([good[0] for *_, good in by_rank], cases[1])


def wrong_on_one(group: Any, cases: list[Case], odd: int, check_first: bool) -> Any:
    """Rank `odd` raises ShapeError; the others hear it from check(), before or after the next call; no reset."""
    rank = group.rank
    data = mine(cases, rank)
    wide = data[1][1].double()
    heard: Any = None
    with merger_for(group) as merger:
        good = [merger.merge(*data[0], return_lse=True)]
        out, _ = room_for(merger, len(data[1][0]), value=0.0)
        together()
        if rank == odd:
            called = outcome(merger.merge, data[1][0], wide)
        else:
            called = outcome(merger.merge, *data[1], out=out, return_lse=True)
        if check_first:
            settle()
            heard = outcome(merger.check)
        for one in data[2:]:
            good.append(merger.merge(*one, return_lse=True))
        settle()
        if not check_first:
            heard = outcome(merger.check)
        more = outcome(merger.check)
        if isinstance(called, Raised):  # at once: here the error is, or on a CPU
            return called, heard or more, None, finished(merger, good)
        return heard, more, fetched([(out, called[1])])[0], finished(merger, good)


@RANKS
@pytest.mark.parametrize("check_first", [True, False], ids=["check, then call", "call, then check"])
def test_a_wrong_argument_on_one_rank_is_told_once(n: int, rng: torch.Generator, check_first: bool) -> None:
    """Row 16: its peers hear its rank and reason, and the next calls work without reset()."""
    for odd in (0, n - 1):
        cases = [make_case(rng, n, b=b) for b in (5, 7, 7, 3)]
        by_rank = run(n, wrong_on_one, cases, odd, check_first)
        for rank, (told, more, results, _) in enumerate(by_rank):
            assert more is None, f"rank {rank}: there was more to tell: {more.text}"
            assert isinstance(told, Raised), f"rank {rank}: check() saw nothing"
            if rank == odd:
                assert "ShapeError" in told.kinds, told.trace
                continue
            assert "CallMismatch" in told.kinds, told.trace
            assert told.names(f"rank {odd}"), told.text
            assert "float64" in told.text, told.text
            assert "reset" not in told.text, told.text
            judge_all_nan(results, f"rank {rank}")
        goods = by_call([good for *_, good in by_rank])
        for got, case in zip(goods, [cases[0], *cases[2:]], strict=True):
            judge(got, case, what=f"B={case.outs.shape[1]}, rank {odd} wrong before")


# ---------------------------------------------------------------- absence


def stops_calling(group: Any, case: Case, missing: int) -> Any:
    """Two merges by all, one without rank `missing`, which comes too late; a reset, and right again."""
    rank = group.rank
    ((partial, lse),) = mine([case], rank)
    with merger_for(group, {"channels": 2}, **IMPATIENT) as merger:
        good = [merger.merge(partial, lse) for _ in range(2)]
        together()
        first = None if rank == missing else met(merger, partial, lse)
        together()
        late = met(merger, partial, lse) if rank == missing else None
        together()
        good.append(merger.merge(partial, lse, channel=1))
        together()
        merger.reset()
        good += [merger.merge(partial, lse, channel=k) for k in (0, 1, 0)]
        return first, late, finished(merger, good)


@RANKS
def test_a_rank_that_stops_calling_is_named_and_reset_brings_it_back(n: int, rng: torch.Generator) -> None:
    """Row 40: within the deadline; the rank that comes late is told, the other channel goes on."""
    case = make_case(rng, n, b=5)
    for missing in (0, n - 1):
        by_rank = run(n, stops_calling, case, missing)
        for rank, (first, late, _) in enumerate(by_rank):
            if rank == missing:
                judge_met(late, "TransportTimeout", (), f"rank {rank}, late")
                continue
            judge_met(first, "TransportTimeout", (missing,), f"rank {rank} without rank {missing}")
            assert first.seconds < DEADLINE_S + SLACK_S, f"rank {rank} waited {first.seconds:.1f} s"
        named = [first.checked.ranks for first, *_ in by_rank if first is not None]
        assert (missing,) in named, f"rank {missing} is missing; its peers blame {named}"
        assert all(missing in ranks for ranks in named), f"rank {missing} is missing; its peers blame {named}"
        for results in by_call([good for *_, good in by_rank]):
            judge(results, case)


def gives_up(group: Any, case: Case, missing: int) -> Any:
    ((partial, lse),) = mine([case], group.rank)
    with merger_for(group, **IMPATIENT) as merger:
        together()
        first = None if group.rank == missing else met(merger, partial, lse)
        together()
        return first


def test_no_peer_blames_another_one_that_waits_too(rng: torch.Generator) -> None:
    """Row 40: also those whose deadline comes a moment after the first one's."""
    by_rank = run(4, gives_up, make_case(rng, 4, b=5), 2)
    named = [first.checked.ranks for first in by_rank if first is not None]
    assert named == [(2,)] * 3, f"rank 2 is missing; its peers blame {named}"


MERGES = 30


def replays_alone(group: Any, case: Case, missing: int) -> Any:
    """A graph of many merges, replayed by all, and then without rank `missing`."""
    rank = group.rank
    ((partial, lse),) = mine([case], rank)
    with merger_for(group, **IMPATIENT) as merger:
        rooms = [room_for(merger, len(partial), value=0.0)[0] for _ in range(MERGES)]

        def step() -> None:
            for i, room in enumerate(rooms):
                merger.merge(partial, lse, out=room, tag=i)

        graph = capture(step)
        graph.replay()
        good = finished(merger, rooms)
        for room in rooms:
            room.fill_(0.0)
        together()
        spent, error, alone = 0.0, None, None
        if rank != missing:
            start = time.monotonic()
            raised = outcome(graph.replay)
            settle()
            spent = time.monotonic() - start
            error = outcome(merger.check)
            alone = fetched(rooms) if not isinstance(raised, Raised) else None
        together()
        merger.reset()
        good.append(finished(merger, [merger.merge(partial, lse)])[0])
        return spent, error, alone, good


@RANKS
def test_a_replayed_graph_costs_one_deadline(n: int, rng: torch.Generator) -> None:
    """Row 40: one deadline, not one for each merge."""
    case, missing = make_case(rng, n, b=5), n - 1
    by_rank = run(n, replays_alone, case, missing)
    for rank, (spent, error, alone, _) in enumerate(by_rank):
        if rank == missing:
            continue
        assert spent < DEADLINE_S + SLACK_S, f"rank {rank}: {spent:.1f} s for {MERGES} merges"
        assert isinstance(error, Raised), f"rank {rank}: check() saw nothing"
        assert "TransportTimeout" in error.kinds, error.trace
        assert error.names(missing), error.text
        for room in alone or ():
            judge_all_nan((room,), f"rank {rank}")
    for i, results in enumerate(by_call([good for *_, good in by_rank])):
        judge(results, case, what=f"merge {i}")


def two_mergers(group: Any, case: Case) -> Any:
    """One merger's channel is lost for want of a rank; the other merger does not notice."""
    rank = group.rank
    ((partial, lse),) = mine([case], rank)
    with merger_for(group, **IMPATIENT) as one, merger_for(group) as other:
        together()
        first = None if rank == 1 else met(one, partial, lse)
        meet()
        return first, finished(other, [other.merge(partial, lse) for _ in range(3)])


@RANKS
def test_a_lost_channel_of_one_merger_leaves_the_other_alone(n: int, rng: torch.Generator) -> None:
    case = make_case(rng, n, b=5)
    by_rank = run(n, two_mergers, case)
    for rank, (first, _) in enumerate(by_rank):
        if rank != 1:
            judge_met(first, "TransportTimeout", (1,), f"rank {rank}")
    for results in by_call([good for _, good in by_rank]):
        judge(results, case)


def patient(group: Any, case: Case) -> Any:
    """The last rank comes long after the deadline, and nobody gives up."""
    ((partial, lse),) = mine([case], group.rank)
    with merger_for(group, watchdog={"timeout_s": 0.5, "action": "log"}) as merger:
        merger.merge(partial, lse)
        together()
        with listening() as heard:
            if group.rank == group.size - 1:
                time.sleep(2.0)
            results = finished(merger, [merger.merge(partial, lse, return_lse=True)])
        meet()
        return results, heard


@RANKS
def test_asked_to_log_the_others_wait_on_and_the_late_rank_is_named(n: int, rng: torch.Generator) -> None:
    case = make_case(rng, n, b=5)
    by_rank = run(n, patient, case)
    judge([results[0] for results, _ in by_rank], case)
    for rank in range(n - 1):
        said = [text for text in by_rank[rank][1] if f"rank {rank} has waited" in text]
        assert said, f"rank {rank} said nothing of its wait: {by_rank[rank][1]}"
        assert f"rank {n - 1}: channel 0: idle after call 0" in said[0], said


def idle_after_a_wrong_call(group: Any, case: Case) -> Any:
    ((partial, lse),) = mine([case], group.rank)
    with merger_for(group, watchdog={"timeout_s": 0.5, "action": "log"}) as merger:
        merger.merge(partial, lse)
        together()
        with listening() as heard:
            wrong = outcome(merger.merge, partial, lse.double() if group.rank == 0 else lse)
            settle()
            outcome(merger.check)
            time.sleep(1.5)
        meet()
        return wrong, heard, finished(merger, [merger.merge(partial, lse, return_lse=True)])


@RANKS
def test_a_call_that_was_called_off_is_not_waited_for(n: int, rng: torch.Generator) -> None:
    case = make_case(rng, n, b=5)
    by_rank = run(n, idle_after_a_wrong_call, case)
    assert isinstance(by_rank[0][0], Raised)
    for rank, (_, heard, _) in enumerate(by_rank):
        assert not [text for text in heard if "has waited" in text], f"rank {rank}: {heard}"
    judge([results[0] for _, _, results in by_rank], case)
