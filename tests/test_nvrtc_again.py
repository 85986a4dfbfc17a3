"""Calls like one that went well take a short way: the same bits, the same errors. Over the fused kernel, over packed
blocks on a GPU (both by the kernels' own source), and over packed blocks on CPU."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dcpcomm
from dcpcomm.again import Again
from dcpcomm.errors import CallMismatch, DCPCommError, ShapeError
from dcpcomm.testing import LoopbackWorld
from tests.emulated import COMPILER
from tests.oracle import Case, judge, make_case
from tests.pretend_gpu import pretend
from tests.world import shape_of

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernels for the CPU with")
N, D = 2, 16


TRANSPORT = {"fused": "loopback_peer", "packed": "loopback", "cpu": "loopback"}


class Taken(list[bool]):
    """Whether each attempt to take the short way did.

    Attributes:
        over: of TRANSPORT.
    """

    over = ""


@pytest.fixture(params=TRANSPORT)
def short_ways(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Taken:
    taken = Taken()
    taken.over = request.param
    if request.param != "cpu":
        pretend(monkeypatch, tmp_path_factory.getbasetemp())
    real = Again.merge

    def noting(self: Again, *args: Any) -> Any:
        result = real(self, *args)
        taken.append(result is not None)
        return result

    monkeypatch.setattr(Again, "merge", noting)
    return taken


def run(short_ways: Taken, fn: Callable[[dcpcomm.DCPMerger, int], Any], **shape: Any) -> list[Any]:
    """`fn(merger, rank)` on each rank."""
    transport = TRANSPORT[short_ways.over]

    def on_rank(group: Any) -> Any:
        config = {"transport": transport, "verify": {"level": "off"}, "watchdog": {"timeout_s": 20}}
        with dcpcomm.DCPMerger(group, shape_of(N, head_dim=D, **shape), config, "cpu") as merger:
            return fn(merger, group.rank)

    return LoopbackWorld(N, "cpu").run(on_rank)


def strided(x: torch.Tensor, how: int) -> torch.Tensor:
    """The same values at other strides and alignments."""
    if how == 0:
        return x.clone()
    if how == 1:
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    room = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)  # an odd address
    return room.copy_(x)


@pytest.mark.parametrize("scatter", ["heads", "tokens", "none"])
@pytest.mark.parametrize("counted", [None, "by row", "by request"])
def test_the_short_way_gives_what_is_right(
    scatter: Any, counted: str | None, rng: torch.Generator, short_ways: Taken
) -> None:
    ways = [*itertools.product(range(3), range(3), (False, True), (False, True))]
    cases = [make_case(rng, N, b=4, d=D) for _ in range(3 * len(ways))]
    if counted:
        for case in cases:
            case.counts = torch.randint(0, 3, (N, 4), generator=rng)
    # Rows of each request, in turn: of its length by rank, with rows of padding at the end or without.
    starts = [torch.tensor(one) for one in ([0, 1, 2, 3, 4], [0, 0, 2, 3, 4], [0, 1, 1, 2, 3])]
    lens = torch.randint(0, 3, (len(cases), N, 4), generator=rng)
    if counted == "by request":
        for i, case in enumerate(cases):
            by_row = torch.repeat_interleave(lens[i], starts[i % 3].diff(), dim=1)
            case.counts = torch.nn.functional.pad(by_row, (0, 4 - by_row.shape[1]))

    def calls(merger: dcpcomm.DCPMerger, rank: int) -> Any:
        results = []
        for i, case in enumerate(cases):
            how, how_out, want_lse, into = ways[i % len(ways)]
            out = None
            if into:
                rows, heads = merger.shape.result_rows(4, N)
                out = strided(torch.full((rows, heads, D), 7.0, dtype=case.outs.dtype), how_out)
            counts: dict[str, torch.Tensor] = {}
            if counted == "by row":
                assert case.counts is not None
                counts = {"valid_counts": case.counts[rank].to(torch.int32)}
            elif counted == "by request":
                counts = {"seq_lens": lens[i, rank].to(torch.int32), "query_start_loc": starts[i % 3].clone()}
            given = strided(case.outs[rank], how), case.lses[rank].clone()
            got = merger.merge(*given, out=out, tag=i, return_lse=want_lse, **counts)  # type: ignore[call-overload]
            assert out is None or (got[0] if want_lse else got) is out
            results.append(got)
        return results

    by_rank = run(short_ways, calls, scatter=scatter)
    # On CPU counts are looked at before, which makes another LSE.
    known = not (counted and short_ways.over == "cpu")
    assert (short_ways.count(True) >= N * len(ways)) == known, "the short way was hardly taken"
    for i, case in enumerate(cases):
        judge([results[i] for results in by_rank], case, scatter, what=f"call {i}")


def good(rank: int, call: int) -> tuple[torch.Tensor, torch.Tensor]:
    given = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randn(3, 4 * N, D, generator=given).bfloat16(), torch.randn(3, 4 * N, generator=given)


def overlapping(merger: dcpcomm.DCPMerger, rank: int) -> Any:
    both = torch.zeros(4, 4 * N, D, dtype=torch.bfloat16)
    return merger.merge(both[:3], good(rank, 9)[1], out=both[1:].view(-1)[: 3 * 4 * D].view(3, 4, D))


def over_starts(merger: dcpcomm.DCPMerger, rank: int) -> Any:
    room = torch.zeros(3 * 4 * D + 16, dtype=torch.bfloat16)
    starts = room.view(torch.int64)[1:4].copy_(torch.tensor([0, 1, 3]))
    out = room[: 3 * 4 * D].view(3, 4, D)
    return merger.merge(*good(rank, 9), seq_lens=torch.ones(2, dtype=torch.int32), query_start_loc=starts, out=out)


def own_memory(merger: dcpcomm.DCPMerger) -> torch.Tensor:
    own = merger._session.workspace
    assert own is not None
    return own[: 3 * 4 * D * 2].view(torch.bfloat16).view(3, 4, D)


WRONG: dict[str, Callable[[dcpcomm.DCPMerger, int], Any]] = {
    "out overlaps": overlapping,
    "out reads negated": lambda m, r: m.merge(*good(r, 9), out=torch.zeros(3, 4, D, dtype=torch.bfloat16)._neg_view()),
    "tag": lambda m, r: m.merge(*good(r, 9), tag=2**31),
    "tag's type": lambda m, r: m.merge(*good(r, 9), tag=1.0),
    "grad": lambda m, r: m.merge(good(r, 9)[0].requires_grad_(), good(r, 9)[1]),
    "no memory": lambda m, r: m.merge(torch._efficientzerotensor((3, 4 * N, D), dtype=torch.bfloat16), good(r, 9)[1]),
    "own memory": lambda m, r: m.merge(*good(r, 9), out=own_memory(m)),
    "counts' memory": lambda m, r: m.merge(
        *good(r, 9), valid_counts=torch._efficientzerotensor((3,), dtype=torch.int32)
    ),
    "lengths' memory": lambda m, r: m.merge(
        *good(r, 9),
        seq_lens=torch._efficientzerotensor((2,), dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1, 3]),
    ),
    "starts alone": lambda m, r: m.merge(*good(r, 9), query_start_loc=torch.tensor([0, 1, 3])),
    "lengths alone": lambda m, r: m.merge(*good(r, 9), seq_lens=torch.ones(2, dtype=torch.int32)),
    "both forms": lambda m, r: m.merge(
        *good(r, 9),
        valid_counts=torch.ones(3, dtype=torch.int32),
        seq_lens=torch.ones(2, dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1, 3]),
    ),
    "out overlaps starts": lambda m, r: over_starts(m, r),
    "counts' length": lambda m, r: m.merge(*good(r, 9), valid_counts=torch.ones(2, dtype=torch.int32)),
}


def told_by_a_call_or_later(merger: dcpcomm.DCPMerger, *given: torch.Tensor) -> None:
    """A good call on rank 0; on a GPU it returns NaN, and the error comes by `check`."""
    merged = merger.merge(*(given or good(0, 9)))
    assert bool(merged.isnan().all())
    merger.check()


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_told_also_when_its_layout_is_known(what: str, short_ways: Taken) -> None:
    """The same errors as of a first call, here and on the peer, and the next call is right."""
    if what == "own memory" and short_ways.over == "fused":
        pytest.skip("there is none")

    def calls(merger: dcpcomm.DCPMerger, rank: int) -> Any:
        room = torch.zeros(3, 4, D, dtype=torch.bfloat16)
        for call in range(3):
            merger.merge(*good(rank, call))
            merger.merge(*good(rank, call), out=room)
            merger.merge(*good(rank, call), valid_counts=torch.ones(3, dtype=torch.int32))
            lengths = {"seq_lens": torch.ones(2, dtype=torch.int32), "query_start_loc": torch.tensor([0, 1, 3])}
            merger.merge(*good(rank, call), **lengths)  # type: ignore[call-overload]
            merger.merge(*good(rank, call), out=room, **lengths)  # type: ignore[call-overload]
        latest: list[dict[str, Any]] = [{}, {"out": room}, {"valid_counts": torch.ones(3, dtype=torch.int32)}]
        for keywords in latest:  # one after the other is what the wrong call is compared with
            for call in range(2):
                merger.merge(*good(rank, call), **keywords)
            if rank == 1:
                with pytest.raises(ShapeError, match="rank 1"):
                    WRONG[what](merger, rank)
            else:
                with pytest.raises(CallMismatch, match=r"rank 1 raised in call .* ShapeError"):
                    told_by_a_call_or_later(merger)
        return merger.merge(*good(rank, 5), return_lse=True)

    results = run(short_ways, calls)
    partials = [good(rank, 5) for rank in range(N)]
    case = Case(*(torch.stack(one) for one in zip(*partials, strict=True)))
    judge(results, case)


def test_a_view_that_negates_is_read_as_it_reads(short_ways: Taken) -> None:
    """Its layout is that of a plain one that came before, or comes after."""

    def calls(merger: dcpcomm.DCPMerger, rank: int) -> Any:
        results, lses = [], []
        for call in range(4):
            made = torch.Generator().manual_seed(10 * call + rank)
            lse = torch.complex(*torch.randn(2, 3, 4 * N, generator=made)).conj().imag
            if call in (1, 3):
                lse = torch.empty_strided(lse.shape, lse.stride()).copy_(lse)
            results.append(merger.merge(good(rank, call)[0], lse, return_lse=True))
            lses.append(lse.clone())
        return results, lses

    by_rank = run(short_ways, calls)
    for call in range(4):
        outs = torch.stack([good(rank, call)[0] for rank in range(N)])
        case = Case(outs, torch.stack([lses[call] for _, lses in by_rank]))
        judge([results[call] for results, _ in by_rank], case, what=f"call {call}")


def test_a_channel_that_is_no_number_is_told(short_ways: Taken) -> None:
    def calls(merger: dcpcomm.DCPMerger, rank: int) -> Any:
        for call in range(2):
            merger.merge(*good(rank, call))
        with pytest.raises(ShapeError, match="channel is False"):
            merger.merge(*good(rank, 2), channel=False)

    run(short_ways, calls)


def test_after_a_reset_and_after_a_close_nothing_is_remembered(short_ways: Taken) -> None:
    def calls(merger: dcpcomm.DCPMerger, rank: int) -> Any:
        for call in range(3):
            merger.merge(*good(rank, call))
        merger.reset()
        before = len(short_ways)
        merger.merge(*good(rank, 3))
        merger.merge(*good(rank, 4))
        merger.close()
        with pytest.raises(DCPCommError, match="closed"):
            merger.merge(*good(rank, 5))
        return before

    run(short_ways, calls)
    assert short_ways.count(True) >= N


def test_a_channel_in_use_is_told(short_ways: Taken) -> None:
    def calls(merger: dcpcomm.DCPMerger, rank: int) -> Any:
        for call in range(2):
            merger.merge(*good(rank, call))
        channel = merger._session.channels[0]
        assert channel._busy.acquire(blocking=False)  # as another thread's call has it
        with pytest.raises(DCPCommError, match="inside a call of another thread"):
            merger.merge(*good(rank, 2))
        channel._busy.release()
        with pytest.raises(DCPCommError, match="two threads"):
            merger.merge(*good(rank, 2))

    run(short_ways, calls)


def test_the_ranks_stay_in_step_where_one_takes_the_long_way(short_ways: Taken, rng: torch.Generator) -> None:
    cases = [make_case(rng, N, b=3, d=D) for _ in range(6)]

    def calls(merger: dcpcomm.DCPMerger, rank: int) -> Any:
        results = []
        for i, case in enumerate(cases):
            if (i + rank) % 2:
                merger._known.clear()
            results.append(merger.merge(case.outs[rank], case.lses[rank], return_lse=True, tag=i))
        return results

    for i, results in enumerate(zip(*run(short_ways, calls), strict=True)):
        judge(list(results), cases[i], what=f"call {i}")


class Unreadable(torch.Tensor):
    """Whose address nobody gets."""

    def __getattribute__(self, name: str) -> Any:
        if name == "data_ptr":
            raise RuntimeError("no address for you")
        return super().__getattribute__(name)


@pytest.mark.parametrize("what", ["partial_out", "partial_lse", "out"])
def test_whatever_a_known_layout_raises_the_peers_are_told(what: str, short_ways: Taken) -> None:
    """Raised without a word, it would let the peer merge its rows with those of this rank's next call."""

    def calls(merger: dcpcomm.DCPMerger, rank: int) -> Any:
        for call in range(3):
            merger.merge(*good(rank, call))
            merger.merge(*good(rank, call), out=torch.zeros(3, 4, D, dtype=torch.bfloat16))
        if rank == 1:
            out, lse = good(rank, 9)
            given = {"partial_out": out, "partial_lse": lse}
            if what == "out":
                given["out"] = torch.zeros(3, 4, D, dtype=torch.bfloat16)
            given[what] = given[what].as_subclass(Unreadable)
            with pytest.raises(RuntimeError, match="no address for you"):
                merger.merge(**given)  # type: ignore[call-overload]
        else:
            with pytest.raises(CallMismatch, match=r"rank 1 raised in call .* RuntimeError: no address for you"):
                told_by_a_call_or_later(merger)
        return merger.merge(*good(rank, 5), return_lse=True)

    results = run(short_ways, calls)
    partials = [good(rank, 5) for rank in range(N)]
    judge(results, Case(*(torch.stack(one) for one in zip(*partials, strict=True))))


@pytest.mark.parametrize("want_lse", [False, True])
def test_a_result_without_room_the_first_time_is_right(
    want_lse: bool, short_ways: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short way then is none, and the long way asks for memory again."""
    shapes = [(3, 4, D), (3, 4)][: 1 + want_lse]
    refused: list[tuple[int, ...]] = []
    real = torch.empty

    def scarce(*args: Any, **kwargs: Any) -> torch.Tensor:
        here = sys._getframe(1).f_code.co_filename
        if here.endswith("again.py") and args[0] in shapes and tuple(args[0]) not in refused:
            refused.append(tuple(args[0]))
            raise torch.OutOfMemoryError("no room")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", scarce)

    def calls(merger: dcpcomm.DCPMerger, rank: int) -> Any:
        for call in range(4):
            merger.merge(*good(rank, call), return_lse=want_lse)  # type: ignore[call-overload]
        return merger.merge(*good(rank, 5), return_lse=want_lse)  # type: ignore[call-overload]

    results = run(short_ways, calls)
    assert refused == shapes
    partials = [good(rank, 5) for rank in range(N)]
    judge(results, Case(*(torch.stack(one) for one in zip(*partials, strict=True))))


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("of", ["rows", "LSE"])
def test_a_rank_without_room_for_its_result_tells_the_peers(
    of: str, chunks: int, short_ways: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is sent: else they would merge its rows, and be a call ahead."""
    real, b = torch.empty, 3 * chunks
    short: list[bool] = []

    def scarce(*args: Any, **kwargs: Any) -> torch.Tensor:
        wanted = [(b, 4, D), (b, 4)][of == "LSE"]
        if threading.current_thread().name == "rank 1" and short and args[0] == wanted:
            raise torch.OutOfMemoryError("no room")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", scarce)

    def calls(merger: dcpcomm.DCPMerger, rank: int) -> Any:
        def more(call: int) -> Any:
            return tuple(torch.cat([one] * chunks) for one in good(rank, call))

        for call in range(2):
            merger.merge(*more(call), return_lse=True)
        if rank == 1:
            short.append(True)
            with pytest.raises(torch.OutOfMemoryError, match="no room"):
                merger.merge(*more(9), return_lse=True)
            short.clear()
        else:
            with pytest.raises(CallMismatch, match=r"rank 1 raised in call .* OutOfMemoryError: no room"):
                told_by_a_call_or_later(merger, *more(9))
        return merger.merge(*good(rank, 5), return_lse=True)

    results = run(short_ways, calls, max_tokens=3)
    partials = [good(rank, 5) for rank in range(N)]
    judge(results, Case(*(torch.stack(one) for one in zip(*partials, strict=True))))
