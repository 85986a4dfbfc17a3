"""Sections 3 and 5 of the design on one GPU: layouts, scatters, chunks, counts and groups of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dcpcomm.testing.conformance.partials import LAYOUTS
from tests.gpu.rig import (
    BF16,
    DEVICE,
    F16,
    F32,
    ONE_GPU,
    Replay,
    blank_empty_rows,
    by_call,
    capture,
    finished,
    merger_for,
    mine,
    on_device,
    poison_heap,
    poisoned,
    room_for,
    row_counts,
    run,
    together,
)
from tests.oracle import INF, NAN, Case, judge, make_case, same_bits

pytestmark = ONE_GPU
RANKS = pytest.mark.parametrize("n", [2, 4])
SCATTERS = pytest.mark.parametrize("scatter", ["heads", "tokens", "none"])


def any_layout(group: Any, case: Case, scatter: str) -> Any:
    """Each layout of the partials, and another one of the LSE, on the odd ranks alone; then on all."""
    rank = group.rank
    names = list(LAYOUTS)
    shape = {"scatter": scatter, "dtype": case.outs.dtype, "head_dim": case.outs.shape[3]}
    ((partial, lse),) = mine([case], rank)
    calls = [(partial, lse)]
    for i, name in enumerate(names):
        for everywhere in (False, True):
            odd = everywhere or rank % 2
            other = LAYOUTS[names[(i + 3 + rank) % len(names)]]
            calls.append((LAYOUTS[name](partial), other(lse)) if odd else (partial, lse))
    with merger_for(group, shape) as merger:
        together()
        results = []
        for one in calls:
            poison_heap(partial)
            results.append(merger.merge(*one, return_lse=True))
        return finished(merger, results)


@SCATTERS
@pytest.mark.parametrize(("n", "dtype", "d"), [(2, BF16, 128), (4, F16, 40), (2, F32, 33), (4, BF16, 80)], ids=str)
def test_layouts_on_some_ranks_change_no_bit(
    n: int, dtype: torch.dtype, d: int, rng: torch.Generator, scatter: str
) -> None:
    """Row 14."""
    case = make_case(rng, n, b=2 * n, d=d, dtype=dtype)
    case.outs[0, 1], case.lses[0, 1] = NAN, -INF
    first, *others = by_call(run(n, any_layout, case, scatter))
    judge(first, case, scatter)
    for i, results in enumerate(others):
        for rank in range(n):
            what = f"rank {rank}, call {i} ({list(LAYOUTS)[i // 2]})"
            assert all(same_bits(a, b) for a, b in zip(results[rank], first[rank], strict=True)), what


def strided_out(group: Any, cases: list[Case], scatter: str) -> Any:
    """Into every layout, with an LSE and without; how many values beside the result were written."""
    rank = group.rank
    data = mine(cases, rank)
    shape = {"scatter": scatter, "dtype": cases[0].outs.dtype}
    with merger_for(group, shape) as merger:
        plain, _ = room_for(merger, cases[0].outs.shape[1])
        rooms = [layout(plain) for layout in LAYOUTS.values()]
        together()
        results = []
        for i, (room, one) in enumerate(zip(rooms, data, strict=True)):
            if i % 2:
                got, lse = merger.merge(*one, out=room, return_lse=True)
                results.append((got, lse))
            else:
                got = merger.merge(*one, out=room)
                results.append(got)
            assert got.data_ptr() == room.data_ptr()
            assert got.stride() == room.stride()
        results = finished(merger, results)
        whole = [room.as_strided((room.untyped_storage().nbytes() // room.itemsize,), (1,), 0) for room in rooms]
        beside = [int((~storage.isnan()).sum()) - room.numel() for storage, room in zip(whole, rooms, strict=True)]
    return results, beside


@SCATTERS
@pytest.mark.parametrize(("n", "dtype"), [(2, BF16), (4, F32), (4, F16)], ids=str)
def test_out_may_be_any_view(n: int, dtype: torch.dtype, rng: torch.Generator, scatter: str) -> None:
    cases = [make_case(rng, n, b=2 * n, dtype=dtype) for _ in LAYOUTS]
    for case in cases:
        case.outs[:, 0], case.lses[:, 0] = NAN, NAN  # empty everywhere: zeros are written as well
    by_rank = run(n, strided_out, cases, scatter)
    assert [beside for _, beside in by_rank] == [[0] * len(LAYOUTS)] * n, f"beside results, by {list(LAYOUTS)}"
    for results, case, layout in zip(by_call([got for got, _ in by_rank]), cases, LAYOUTS, strict=True):
        judge(results, case, scatter, layout)


def in_chunks(group: Any, cases: list[Case], scatter: str) -> Any:
    rank = group.rank
    data = mine(cases, rank)
    counts = [on_device(case.counts[rank].to([torch.int32, torch.int64][rank % 2])) for case in cases]
    with merger_for(group, {"scatter": scatter, "max_tokens": 5}) as merger:
        together()
        results = []
        for i, (one, count) in enumerate(zip(data, counts, strict=True)):
            poison_heap(one[0])
            results.append(merger.merge(*one, valid_counts=count, return_lse=bool(i % 2)))
        return finished(merger, results)


@RANKS
@SCATTERS
def test_more_rows_than_an_exchange_carries(n: int, rng: torch.Generator, scatter: str) -> None:
    """B = 0, max_tokens - 1 .. + 1, and many chunks; counts go by rows of the whole call."""
    sizes = (0, n, 3 * n, 5 * n, n) if scatter == "tokens" else (4, 5, 6, 0, 18, 1)
    cases = []
    for b in sizes:
        case = make_case(rng, n, b=b)
        case.counts = torch.randint(0, 2, (n, b), generator=rng)
        cases.append(blank_empty_rows(case))
    for i, results in enumerate(by_call(run(n, in_chunks, cases, scatter))):
        if sizes[i] == 0:
            assert all((one[0] if isinstance(one, tuple) else one).numel() == 0 for one in results)
        else:
            judge(results, cases[i], scatter, f"B={sizes[i]}")


def each_its_own_way(group: Any, case: Case, lens: torch.Tensor, starts: torch.Tensor) -> Any:
    """Dtype of LSE, form of counts, and whether the LSE comes back: each rank's own affair."""
    rank = group.rank
    ((partial, lse),) = mine([case], rank)
    lse = lse.to([F32, F16, BF16, F32][rank % 4])
    keywords: dict[str, Any] = {"valid_counts": on_device(case.counts[rank].to([torch.int64, torch.int32][rank % 2]))}
    if rank % 3 == 1:
        keywords = {"seq_lens": on_device(lens[rank]), "query_start_loc": on_device(starts.to(torch.int32))}
    with merger_for(group) as merger:
        together()
        return finished(merger, [merger.merge(partial, lse, return_lse=rank % 2 == 0, **keywords)])[0]


@pytest.mark.parametrize("n", [2, 4, 8])
def test_ranks_need_not_agree_on_what_is_local(n: int, rng: torch.Generator) -> None:
    case, starts = make_case(rng, n, b=9), torch.tensor([0, 2, 2, 5, 8])
    lens = torch.randint(0, 3, (n, 4), generator=rng)
    case.counts = torch.stack([row_counts(lens[rank], starts, 9) for rank in range(n)])
    for rank in range(n):
        case.lses[rank] = case.lses[rank].to([F32, F16, BF16, F32][rank % 4]).float()
    judge(run(n, each_its_own_way, blank_empty_rows(case), lens, starts), case)


# ---------------------------------------------------------------- one rank


def alone(group: Any, cases: list[Case], scatter: str) -> Any:
    """Eager with each form of counts, then in a graph whose counts change."""
    data = mine(cases, 0)
    counts = [on_device(case.counts[0].to(torch.int32)) for case in cases]
    starts = torch.arange(cases[0].outs.shape[1] + 1, device=DEVICE)
    with merger_for(group, {"scatter": scatter}) as merger:
        assert merger.device_bytes == 0
        results = [merger.merge(*data[0], valid_counts=counts[0], return_lse=True)]
        results.append(merger.merge(*data[1], seq_lens=counts[1], query_start_loc=starts, return_lse=True))
        out = LAYOUTS["last_stride_2"](room_for(merger, len(data[2][0]))[0])
        results.append(merger.merge(*data[2], valid_counts=counts[2], out=out))
        now = counts[3].clone()
        replay = Replay(merger, cases[3], 0, valid_counts=now)
        for i in (3, 4):
            now.copy_(counts[i])
            results.append(replay(*data[i]))
        return finished(merger, results)


@SCATTERS
def test_a_group_of_one_cleans_empty_rows(rng: torch.Generator, scatter: str) -> None:
    cases = []
    for _ in range(5):
        case = make_case(rng, 1, b=9)
        case.counts = torch.randint(0, 2, (1, 9), generator=rng)
        case.lses[0, 3], case.lses[0, 4], case.lses[0, 5] = INF, NAN, -INF
        case.outs[0, 3:6] = NAN
        cases.append(blank_empty_rows(case))
    for i, results in enumerate(by_call(run(1, alone, cases, scatter))):
        judge(results, cases[i], scatter, f"call {i}")


def same_bits_everywhere(group: Any, case: Case) -> Any:
    """Eager, at another B beside other rows, in chunks, and by a replay."""
    ((partial, lse),) = mine([case], group.rank)
    b = len(partial)
    more, more_lse = poisoned((b + 7, *partial.shape[1:]), BF16, 2.0), poisoned((b + 7, lse.shape[1]), F32, -1.0)
    more[:b].copy_(partial)
    more_lse[:b].copy_(lse)
    with (
        merger_for(group, {"head_dim": partial.shape[2]}) as merger,
        merger_for(group, {"max_tokens": 4, "head_dim": partial.shape[2]}) as small,
    ):
        out, _ = room_for(merger, b)
        graph = capture(lambda: merger.merge(partial, lse, out=out))
        eager = merger.merge(partial, lse)
        among = merger.merge(more, more_lse)[:b].clone()
        chunked = small.merge(partial, lse)
        graph.replay()
        return finished(merger, [eager, among, chunked, out])


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_row_has_the_same_bits_however_it_is_merged(n: int, rng: torch.Generator) -> None:
    """Section 3: whatever B, chunk or graph."""
    case = make_case(rng, n, b=9, d=192)
    first, *others = by_call(run(n, same_bits_everywhere, case))
    judge(first, case)
    for how, results in zip(("among others", "in chunks", "replayed"), others, strict=True):
        assert all(same_bits(a, b) for a, b in zip(results, first, strict=True)), how
