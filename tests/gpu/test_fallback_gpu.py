"""The engine of torch operations, which serves where the kernels can't be compiled, beside that of the kernels: two
ranks by hand, one after the other on one stream, whose wire buffers are copied across.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dcpcomm
from dcpcomm.combine.cuda_engine import CudaEngine, kernels_for
from dcpcomm.combine.engine import Layout, Partials
from dcpcomm.combine.torch_cuda import TorchCudaEngine
from dcpcomm.combine.wire import KIND_CANCELLED, Header, row_bytes, wire_views
from dcpcomm.graphs import captured
from dcpcomm.rows import RowCounts
from tests.gpu.rig import BF16, DEVICE, F16, F32, ON_GPU, ONE_GPU, blank_empty_rows, mine, on_device, poisoned, settle
from tests.oracle import NAN, Case, judge, make_case, same_bits, ulp

pytestmark = ONE_GPU
N = 2
PAIRS = [("torch", "torch"), ("torch", "kernels"), ("kernels", "torch")] if ON_GPU else [("torch", "torch")]


@pytest.fixture(autouse=True)
def memory_that_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)


class Side:
    """One rank: its engine, buffers and result."""

    def __init__(self, kind: str, rank: int, shape: dcpcomm.MergeShape, t: int) -> None:
        self.rank, self.shape, self.t = rank, shape, t
        kernels = kernels_for(DEVICE, shape.dtype, N) if kind == "kernels" else None
        self.engine: Any = (
            CudaEngine(shape, rank, N, kernels) if kernels is not None else TorchCudaEngine(shape, rank, N, DEVICE)
        )
        if ON_GPU:
            self.engine.reset()
        heads = shape.result_rows(t, N)[1]
        nbytes = N * (1 + t * heads) * row_bytes(shape.head_dim, shape.dtype.itemsize)
        regions = [torch.full((nbytes,), 0xA5, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
        self.send, self.recv = wire_views(*regions, N, t, heads, shape.head_dim, shape.dtype, False)
        self.out, self.lse = poisoned((t, heads, shape.head_dim), shape.dtype), poisoned((t, heads), F32)

    def bring(self, out: torch.Tensor, lse: torch.Tensor, counts: torch.Tensor | None = None) -> None:
        self.given = out, lse, counts
        layout = Layout(len(out), self.t, self.shape.head_dim, out.stride(), lse.stride(), lse.dtype)
        self.call = self.engine.packed_call(0, layout, self.send, self.recv)

    def partials(self) -> Partials:
        out, lse, counts = self.given
        partials = Partials(out, lse, None if counts is None else RowCounts(counts))
        return partials if counts is None or self.engine.reads_counts else partials.cleaned()

    def header(self, tag: int) -> Header:
        return Header(0, tag, len(self.given[0]), 0, self.shape.head_dim)

    def failure(self) -> Any:
        settle()
        return self.engine.failure(0)


def step(sides: list[Side], tags: tuple[int, int] = (4, 4), called_off: int | None = None) -> None:
    """One merge by both: pack, across, combine."""
    for side, tag in zip(sides, tags, strict=True):
        if side.rank == called_off:
            side.call.call_off(Header(0, 0, 0, 0, 0, KIND_CANCELLED))
        else:
            side.call.pack(side.partials(), 0, side.header(tag))
    for side in sides:
        for source in range(N):
            side.recv.blocks[source].copy_(sides[source].send.blocks[side.rank])
    for side, tag in zip(sides, tags, strict=True):
        if side.rank != called_off:
            assert side.call.combine(side.partials(), 0, side.header(tag), side.out, side.lse)


def sides_for(kinds: tuple[str, str], case: Case, scatter: str = "heads") -> list[Side]:
    b, h, d = case.outs.shape[1:]
    shape = dcpcomm.MergeShape(
        max_tokens=b, num_heads=h, head_dim=d, dtype=case.outs.dtype, lse_base=case.base, scatter=scatter
    )
    return [Side(kind, rank, shape, shape.result_rows(b, N)[0]) for rank, kind in enumerate(kinds)]


def bring(sides: list[Side], case: Case) -> None:
    for side in sides:
        counts = None if case.counts is None else on_device(case.counts[side.rank].to(torch.int32))
        ((out, lse),) = mine([case], side.rank)
        side.bring(out, lse, counts)


def results(sides: list[Side]) -> list[Any]:
    settle()
    return [(side.out.cpu().clone(), side.lse.cpu().clone()) for side in sides]


def counted_case(rng: torch.Generator, dtype: torch.dtype, base: str, d: int = 64) -> Case:
    """Rows empty by count here, everywhere, and by what the LSE says."""
    case = make_case(rng, N, b=10, h=6, d=d, dtype=dtype, base=base)
    case.counts = torch.randint(0, 3, (N, 10), generator=rng)
    case.counts[:, 2] = 0
    case.counts[:, 5:] = 1
    blank_empty_rows(case)
    for row, value in ((5, NAN), (6, torch.inf), (7, -torch.inf)):
        case.lses[0, row], case.outs[0, row] = value, NAN
    return case


@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
@pytest.mark.parametrize("scatter", ["heads", "tokens", "none"])
@pytest.mark.parametrize(("dtype", "base", "d"), [(BF16, "e", 64), (F16, "2", 40), (F32, "e", 33)], ids=str)
def test_the_fallback_is_the_oracle(
    kinds: tuple[str, str], scatter: str, dtype: torch.dtype, base: str, d: int, rng: torch.Generator
) -> None:
    """Also where the other rank has the kernels: the wire is one."""
    case = counted_case(rng, dtype, base, d)
    sides = sides_for(kinds, case, scatter)
    bring(sides, case)
    step(sides)
    judge(results(sides), case, scatter, str(kinds))
    assert [side.failure() for side in sides] == [None, None]


@pytest.mark.skipif(not ON_GPU, reason="the kernels need a GPU")
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_both_engines_agree_to_an_ulp(dtype: torch.dtype, rng: torch.Generator) -> None:
    case = counted_case(rng, dtype, "e")
    both = []
    for kind in ("torch", "kernels"):
        sides = sides_for((kind, kind), case)
        bring(sides, case)
        step(sides)
        both.append(results(sides))
    for (one, one_lse), (other, other_lse) in zip(*both, strict=True):
        bound = ulp(other.double(), dtype) + 1e-6
        assert bool(((one.double() - other.double()).abs() <= bound).all())
        torch.testing.assert_close(one_lse, other_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_a_header_that_differs_is_noted_once_and_all_is_nan(kinds: tuple[str, str], rng: torch.Generator) -> None:
    """The first failure stays until it is settled; then the next call is right."""
    case = counted_case(rng, BF16, "e")
    sides = sides_for(kinds, case)
    bring(sides, case)
    step(sides)
    step(sides, tags=(5, 6))
    for out, lse in results(sides):
        assert bool(out.isnan().all()), f"{int((~out.isnan()).sum())} values are no NaN"
        assert bool(lse.isnan().all())
    step(sides, tags=(7, 8))
    for side in sides:
        failure = side.failure()
        assert failure is not None
        assert failure.mine == side.header(5 + side.rank)._replace(ordinal=1), f"rank {side.rank}: {failure.mine}"
        other = Header.from_words(failure.came[1 - side.rank])
        assert other == side.header(6 - side.rank)._replace(ordinal=1), f"rank {side.rank}: {other}"
        assert Header.from_words(failure.came[side.rank]) == failure.mine
    for side in sides:
        side.engine.settle(0)
    step(sides)
    judge(results(sides), case)
    assert [side.failure() for side in sides] == [None, None]


@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_a_call_called_off_is_noted_as_such(kinds: tuple[str, str], rng: torch.Generator) -> None:
    case = make_case(rng, N, b=4, h=4)
    sides = sides_for(kinds, case)
    bring(sides, case)
    step(sides, called_off=1)
    assert sides[1].failure() is None
    failure = sides[0].failure()
    assert failure is not None
    assert Header.from_words(failure.came[1]).kind == KIND_CANCELLED
    assert Header.from_words(failure.came[1]).ordinal == failure.mine.ordinal == 0
    assert bool(results(sides)[0][0].isnan().all())
    sides[0].engine.settle(0)
    step(sides)
    judge(results(sides), case)


@pytest.mark.skipif(not ON_GPU, reason="is about graphs")
@pytest.mark.parametrize("kinds", [*PAIRS, ("kernels", "kernels")], ids="-".join)
def test_the_fallback_in_a_graph(kinds: tuple[str, str], rng: torch.Generator) -> None:
    """Replays with new rows and counts, an eager call in between, and a mismatch that a replay notes."""
    cases = [counted_case(rng, BF16, "e") for _ in range(5)]
    sides = sides_for(kinds, cases[0])
    bring(sides, cases[0])
    step(sides)  # what is used for the first time
    judge(results(sides), cases[0])
    graph = captured(lambda: step(sides), DEVICE)
    for i, case in enumerate(cases):
        for side in sides:
            out, lse, counts = side.given
            out.copy_(case.outs[side.rank])
            lse.copy_(case.lses[side.rank])
            counts.copy_(case.counts[side.rank])
            side.out.fill_(NAN)
        step(sides) if i == 2 else graph.replay()
        judge(results(sides), case, what=f"call {i}")
        assert [side.failure() for side in sides] == [None, None], f"call {i}"
    sides[1].engine.ordinals.add_(1)  # as if it had made a call more
    graph.replay()
    for side in sides:
        assert side.failure() is not None
    assert all(bool(out.isnan().all()) for out, _ in results(sides))
    sides[1].engine.ordinals.sub_(1)
    for side in sides:
        side.engine.settle(0)
    graph.replay()
    again = results(sides)
    judge(again, cases[-1])
    step(sides)
    assert all(
        same_bits(a, b)
        for one, other in zip(again, results(sides), strict=True)
        for a, b in zip(one, other, strict=True)
    )
