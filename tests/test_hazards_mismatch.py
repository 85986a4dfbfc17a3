"""Rows 16 and 40a of the list of faults: ranks that meet with different calls are told so, and by whom."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.oracle import NAN, Case, judge, make_case
from tests.steps import step_results
from tests.world import AT_ONCE_S, Raised, World, dawdle, meet, merger_for, outcome, rank_of, size_of

BF16 = torch.bfloat16

#: wrong calls, and a word of the reason that peers must be told
WRONG = {
    "lse dtype": "float64",
    "heads": "partial_out",
    "dtype": "float32",
    "counts twice": "valid_counts",
    "counts too few": "valid_counts",
    "out overlaps": "overlap",
    "out dtype": "float16",
    "grad": "grad",
    "rows of lse": "partial_lse",
}


def wrong_call(merger: Any, kind: str, partial: torch.Tensor, lse: torch.Tensor) -> Any:
    """A merge of the same B that this rank alone gets wrong."""
    b, h, d = partial.shape
    kw: dict[str, Any] = {}
    if kind == "lse dtype":
        lse = lse.double()
    elif kind == "heads":
        partial = partial[:, : h - 1]
    elif kind == "dtype":
        partial = partial.float()
    elif kind == "counts twice":
        one = torch.ones(b, dtype=torch.int32)
        kw = {"valid_counts": one, "seq_lens": one, "query_start_loc": torch.arange(b + 1)}
    elif kind == "counts too few":
        kw = {"valid_counts": torch.ones(b - 1, dtype=torch.int32)}
    elif kind == "out overlaps":
        kw = {"out": partial[:, :4]}
    elif kind == "out dtype":
        kw = {"out": torch.full((b, 4, d), NAN, dtype=torch.float16)}
    elif kind == "grad":
        partial = partial.clone().requires_grad_()
    elif kind == "rows of lse":
        lse = lse[: b - 1]
    return merger.merge(partial, lse, **kw)


def one_rank_wrong(group: Any, case: Case, seed: int, first: bool) -> Any:
    """For every kind: one rank calls wrongly, all others rightly; then all rightly.

    `first`: the wrong rank has raised before its peers call, which also shows that it waits for nobody.
    """
    rank, n = rank_of(group), size_of(group)
    rng = random.Random(f"{seed}/{rank}")
    partial, lse = case.outs[rank], case.lses[rank]
    met, good = {}, []
    with merger_for(group) as merger:
        for i, kind in enumerate(WRONG):
            if rank == i % n:
                dawdle(rng, 0 if first else 0.05)
                met[kind] = outcome(wrong_call, merger, kind, partial, lse)
            if first:
                meet()
            if rank != i % n:
                met[kind] = outcome(merger.merge, partial, lse)
            good.append(merger.merge(partial, lse, return_lse=True))
    return met, good


@pytest.mark.parametrize("first", [True, False], ids=["raised first", "raised last"])
def test_a_call_wrong_on_one_rank_is_reported_to_its_peers(
    peers: World, rng: torch.Generator, seed: int, first: bool
) -> None:
    """The peers raise with its rank and reason, nobody waits, and the next call works on all."""
    case = make_case(rng, peers.n, b=5)
    by_rank = peers.run(one_rank_wrong, case, seed, first)
    for i, (kind, word) in enumerate(WRONG.items()):
        culprit = i % peers.n
        for rank, (met, _) in enumerate(by_rank):
            error = met[kind]
            assert isinstance(error, Raised), f"{kind}: rank {rank} was answered, though rank {culprit} sent nothing"
            expected = "ShapeError" if rank == culprit else "CallMismatch"
            assert expected in error.kinds, f"{kind} on rank {culprit}: rank {rank}: {error.trace}"
            assert word in error.text, f"{kind}: rank {rank} does not give the reason: {error.text}"
            assert rank == culprit or error.names(culprit), f"{kind}: {error.text} does not name rank {culprit}"
            assert error.seconds < AT_ONCE_S, f"{kind}: rank {rank} waited {error.seconds:.1f} s"
    for results in step_results([good for _, good in by_rank]):
        judge(results, case)


def wrong_twice_then_right(group: Any, case: Case) -> Any:
    """The culprit raises twice in a row while its peers make two calls: each of theirs answers one of its."""
    rank, n = rank_of(group), size_of(group)
    with merger_for(group, {"channels": 2}) as merger:
        met = []
        for _ in range(2):
            bad = rank == n - 1
            met.append(outcome(merger.merge, case.outs[rank], case.lses[rank].double() if bad else case.lses[rank]))
        return met, [merger.merge(case.outs[rank], case.lses[rank], channel=k) for k in (1, 0)]


def test_two_wrong_calls_in_a_row_on_one_rank(peers: World, rng: torch.Generator) -> None:
    case = make_case(rng, peers.n, b=5)
    by_rank = peers.run(wrong_twice_then_right, case)
    for rank, (met, _) in enumerate(by_rank):
        for error in met:
            assert ("ShapeError" if rank == peers.n - 1 else "CallMismatch") in error.kinds
    for results in step_results([good for _, good in by_rank]):
        judge(results, case)


def wrong_on_two_ranks(group: Any, case: Case) -> Any:
    rank = rank_of(group)
    with merger_for(group) as merger:
        lse = case.lses[rank].double() if rank < 2 else case.lses[rank]
        return outcome(merger.merge, case.outs[rank], lse), merger.merge(case.outs[rank], case.lses[rank])


def test_wrong_on_some_ranks_for_the_same_reason(peers: World, rng: torch.Generator) -> None:
    """At N=2 that is all of them: each finds its own fault and must not count the other's as an answer."""
    case = make_case(rng, peers.n, b=5)
    by_rank = peers.run(wrong_on_two_ranks, case)
    for rank, (error, _) in enumerate(by_rank):
        assert ("ShapeError" if rank < 2 else "CallMismatch") in error.kinds, error.trace
    judge([good for _, good in by_rank], case)


# ---------------------------------------------------------------- tags and B


def meet_differently(group: Any, case: Case, odd: int, usual: dict, other: dict, shape: dict) -> Any:
    """Rank `odd` comes with `other` {b, tag}, the rest with `usual`; and what follows, past a reset."""
    rank = rank_of(group)
    partial, lse = case.outs[rank], case.lses[rank]
    given = other if rank == odd else usual
    with merger_for(group, {"channels": 2, **shape}) as merger:
        before = merger.merge(partial[:4], lse[:4], tag=given["tag"] if other["tag"] == usual["tag"] else 3)
        mismatch = outcome(merger.merge, partial[: given["b"]], lse[: given["b"]], tag=given["tag"])
        meet()
        poisoned = [outcome(merger.merge, partial[:4], lse[:4], tag=7) for _ in range(2)]
        meet()
        elsewhere = merger.merge(partial[:6], lse[:6], channel=1, tag=7)
        merger.reset()
        after = [merger.merge(partial[:b], lse[:b], channel=k, tag=9) for b, k in ((4, 0), (6, 1), (6, 0))]
        return mismatch, poisoned, [before, elsewhere, *after]


DIFFERENT = {
    "tag": ({"b": 11, "tag": 41}, {"b": 11, "tag": 77}, {}),
    "b": ({"b": 11, "tag": 5}, {"b": 13, "tag": 5}, {}),
    "b smaller": ({"b": 13, "tag": 5}, {"b": 11, "tag": 5}, {}),
    "tag and b": ({"b": 11, "tag": 41}, {"b": 13, "tag": 77}, {}),
    "b beyond max_tokens": ({"b": 6, "tag": 5}, {"b": 13, "tag": 5}, {"max_tokens": 6}),
    "b, in chunks": ({"b": 13, "tag": 5}, {"b": 17, "tag": 5}, {"max_tokens": 6}),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different_calls_raise_naming_both_sides_until_reset(peers: World, rng: torch.Generator, kind: str) -> None:
    """Row 40a: never another step's data; the channel carries nothing until `reset()`, the others go on."""
    usual, other, shape = DIFFERENT[kind]
    n, odd = peers.n, peers.n - 1
    case = make_case(rng, n, b=17)
    by_rank, _ = peers.run_counting_warnings(meet_differently, case, odd, usual, other, shape)
    values = [(usual[key], other[key]) for key in ("tag", "b") if usual[key] != other[key]]
    for rank, (mismatch, poisoned, _) in enumerate(by_rank):
        assert isinstance(mismatch, Raised), f"rank {rank} was answered"
        assert "CallMismatch" in mismatch.kinds, mismatch.trace
        assert mismatch.names(odd), f"rank {odd} is not named: {mismatch.text}"
        assert mismatch.names(rank), f"the own side, rank {rank}, is not named: {mismatch.text}"
        assert any(mismatch.names(*pair) for pair in values), f"no pair of {values} is named: {mismatch.text}"
        assert mismatch.seconds < AT_ONCE_S
        for error in poisoned:
            assert isinstance(error, Raised), f"rank {rank}: a merge went through on the channel before reset"
            assert "DCPCommError" in error.kinds, error.trace
            assert "reset" in error.text, error.text
            assert error.seconds < AT_ONCE_S
    rows = [4, 6, 4, 6, 6]
    for i, results in enumerate(step_results([good for _, _, good in by_rank])):
        judge(results, Case(case.outs[:, : rows[i]], case.lses[:, : rows[i]]), what=f"good call {i}")


def skip_a_merge(group: Any, cases: list[Case], skipper: int) -> Any:
    """Tags 0, 1, 2 against 0, 2: one layer is left out on one rank."""
    rank = rank_of(group)
    with merger_for(group) as merger:
        met = []
        for tag, case in enumerate(cases):
            if not (rank == skipper and tag == 1):
                met.append(outcome(merger.merge, case.outs[rank], case.lses[rank], tag=tag))
                if isinstance(met[-1], Raised):
                    break
        meet()
        merger.reset()
        return met, merger.merge(cases[2].outs[rank], cases[2].lses[rank], tag=2)


def test_a_skipped_merge_is_found_at_the_next_one(peers: World, rng: torch.Generator) -> None:
    """Row 40a."""
    cases = [make_case(rng, peers.n, b=5) for _ in range(3)]
    for skipper in (0, peers.n - 1):
        by_rank = peers.run(skip_a_merge, cases, skipper)
        judge([met[0] for met, _ in by_rank], cases[0])
        for rank, (met, _) in enumerate(by_rank):
            assert len(met) == 2, f"rank {rank} went on"
            assert isinstance(met[1], Raised), f"rank {rank} was answered with another layer's data"
            assert "CallMismatch" in met[1].kinds, met[1].trace
            assert met[1].names(skipper, 1, 2), met[1].text
        judge([good for _, good in by_rank], cases[2])


def mismatch_at_different_times(group: Any, case: Case, seed: int) -> Any:
    """One mismatch after the other, each followed by a reset; ranks late at random."""
    rank, n = rank_of(group), size_of(group)
    rng = random.Random(f"{seed}/{rank}")
    errors, good = [], []
    with merger_for(group) as merger:
        for i in range(4):
            dawdle(rng, 0.01)
            errors.append(outcome(merger.merge, case.outs[rank], case.lses[rank], tag=100 if rank == i % n else 50))
            dawdle(rng, 0.01)
            merger.reset()
            for _ in range(2):
                dawdle(rng)
                good.append(merger.merge(case.outs[rank], case.lses[rank], tag=i))
    return errors, good


def test_reset_again_and_again(peers: World, rng: torch.Generator, seed: int) -> None:
    """Section 10: reset is a new generation: nothing of the old one comes through."""
    case = make_case(rng, peers.n, b=5)
    by_rank = peers.run(mismatch_at_different_times, case, seed)
    for errors, _ in by_rank:
        assert all("CallMismatch" in error.kinds for error in errors)
    for results in step_results([good for _, good in by_rank]):
        judge(results, case)


def reset_without_a_reason(group: Any, case: Case) -> Any:
    rank = rank_of(group)
    with merger_for(group) as merger:
        merger.reset()
        first = merger.merge(case.outs[rank], case.lses[rank])
        merger.reset()
        merger.reset()
        merger.check()
        return first, merger.merge(case.outs[rank], case.lses[rank])


def test_reset_of_a_healthy_merger_changes_nothing(world: World, rng: torch.Generator) -> None:
    case = make_case(rng, world.n, b=5)
    for results in step_results(world.run(reset_without_a_reason, case)):
        judge(results, case)


def empty_on_one_rank(group: Any, cases: list[Case], odd: int) -> Any:
    """Rank `odd` comes with B=0 while its peers come with rows; then all go on with what they think is next."""
    rank = rank_of(group)
    first, second = cases
    with merger_for(group) as merger:
        rows = 0 if rank == odd else first.outs.shape[1]
        met = [outcome(merger.merge, first.outs[rank, :rows], first.lses[rank, :rows])]
        if rank == odd:
            met.append(outcome(merger.merge, second.outs[rank], second.lses[rank]))
        meet()
        merger.reset()
        return met, merger.merge(second.outs[rank], second.lses[rank])


def test_no_rows_on_one_rank_alone_is_found_at_the_next_exchange(peers: World, rng: torch.Generator) -> None:
    """Row 40a: B=0 touches no peer, but the call after it must not be answered with the peers' call before."""
    cases = [make_case(rng, peers.n, b=5) for _ in range(2)]
    by_rank = peers.run(empty_on_one_rank, cases, 0)
    for rank, (met, _) in enumerate(by_rank):
        assert isinstance(met[-1], Raised), f"rank {rank} was answered with another call's data"
        assert "CallMismatch" in met[-1].kinds, met[-1].trace
    judge([good for _, good in by_rank], cases[1])


def tags_at_the_edge(group: Any, case: Case) -> Any:
    rank = rank_of(group)
    partial, lse = case.outs[rank], case.lses[rank]
    with merger_for(group) as merger:
        good = [merger.merge(partial, lse, tag=tag) for tag in (0, -1, 2**31 - 1, -(2**31))]
        bad = [outcome(merger.merge, partial, lse, tag=tag) for tag in (1.5, "layer", None)]
        wide = outcome(merger.merge, partial, lse, tag=2**32 if rank == 0 else 0)
        meet()
        merger.reset()
        sign = outcome(merger.merge, partial, lse, tag=-1 if rank == 0 else 2**32 - 1)
        meet()
        merger.reset()
        return good, bad, wide, sign, merger.merge(partial, lse)


def test_tags_are_compared_whole(peers: World, rng: torch.Generator) -> None:
    """A tag cut to 32 bits on its way would make 0 of 2**32, and meet another layer's call."""
    case = make_case(rng, peers.n, b=3)
    by_rank = peers.run(tags_at_the_edge, case)
    for _, bad, wide, sign, _ in by_rank:
        assert all(isinstance(error, Raised) and "ShapeError" in error.kinds for error in bad)
        for error in (wide, sign):
            assert isinstance(error, Raised), "two different tags were taken for one"
            assert "DCPCommError" in error.kinds, error.trace
    for results in step_results([good for good, *_ in by_rank]):
        judge(results, case)
    judge([last for *_, last in by_rank], case)
