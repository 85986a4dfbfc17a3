"""The two GPU engines without a GPU: the kernels' own source run on CPU, and torch's operations, behind `Engine`.

A group's ranks pack, their blocks are handed over, and they combine: as channels do, with layouts, counts and chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dcpcomm
from dcpcomm.combine import cuda_engine, torch_cuda
from dcpcomm.combine.engine import Engine, Layout, Partials, engine_in_words
from dcpcomm.combine.gpu import GpuEngine
from dcpcomm.combine.nvrtc import KernelsUnavailable
from dcpcomm.combine.wire import KIND_CANCELLED, Header, row_bytes, wire_views
from dcpcomm.rows import RowCounts
from tests.emulated import COMPILER, EmulatedKernels
from tests.kernel_rig import Rig, any_lse, layouts
from tests.oracle import ulp

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernels for the CPU with")
ENGINES = [pytest.param("cuda", marks=needs_compiler), "torch"]
B, H, D = 12, 6, 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture
def rig(folder: Path, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(GpuEngine, "stream", lambda engine: 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Rig(torch.device("cpu"), lambda dtype, n, generic: EmulatedKernels(dtype, n, folder), rng)
    torch.set_num_threads(threads)


class Exchange:
    """N ranks of one shape, each with an engine and wire buffers; `merge` is a call of all of them."""

    def __init__(self, rig: Rig, which: str, shape: dcpcomm.MergeShape, n: int) -> None:
        self.shape, self.n = shape, n
        nbytes = n * (1 + shape.rows_per_destination(shape.max_tokens, n)) * row_bytes(D, shape.dtype.itemsize)
        self.memory = torch.full((n, 2, nbytes), 0xA5, dtype=torch.uint8)
        self.engines: list[Any] = []
        for rank in range(n):
            one: Engine
            if which == "cuda":
                one = cuda_engine.CudaEngine(shape, rank, n, rig.kernels(shape.dtype, n))
            else:
                one = torch_cuda.TorchCudaEngine(shape, rank, n, torch.device("cpu"))
            self.engines.append(one)
        self.calls: dict[Any, Any] = {}

    def merge(
        self,
        partials: list[Partials],
        start: int,
        t: int,
        headers: list[Header],
        outs: list[Any],
        off: tuple[int, ...] = (),
    ) -> list[torch.Tensor]:
        """The merged LSEs by rank; `off`: ranks that call the call off."""
        h = self.shape.result_rows(B, self.n)[1]
        made = []
        for rank, one in enumerate(self.engines):
            given = partials[rank]
            if given.counts is not None and not one.reads_counts:
                given = given.cleaned()
            layout = Layout(B, t, D, given.out.stride(), given.lse.stride(), given.lse.dtype)
            found = self.calls.get((rank, layout))
            if found is None:
                send, recv = wire_views(*self.memory[rank], self.n, t, h, D, self.shape.dtype, False)
                found = self.calls[rank, layout] = one.packed_call(0, layout, send, recv), send, recv
            call, send, _ = found
            if rank in off:
                call.call_off(headers[rank])
            else:
                call.pack(given, start, headers[rank])
            made.append((*found, given))
        for rank, (_, _, recv, _) in enumerate(made):
            for source in range(self.n):
                if source != rank:
                    recv.blocks[source].copy_(made[source][1].blocks[rank])
        lses = [torch.full((t, h), 7.0) for _ in range(self.n)]
        for rank, (call, _, _, given) in enumerate(made):
            if rank not in off:
                assert call.combine(given, start, headers[rank], outs[rank], lses[rank])
        return lses


def shape_of(scatter: Any, dtype: torch.dtype = torch.bfloat16, base: Any = "e") -> dcpcomm.MergeShape:
    return dcpcomm.MergeShape(max_tokens=B, num_heads=H, head_dim=D, dtype=dtype, lse_base=base, scatter=scatter)


def judge(shape: Any, outs: Any, lses: Any, got: list[torch.Tensor], got_lses: list[torch.Tensor], part: slice) -> None:
    want, want_lse = dcpcomm.reference.merge_partials(outs, lses, lse_base=shape.lse_base, scatter=shape.scatter)
    for rank, (out, lse) in enumerate(zip(got, got_lses, strict=True)):
        right = want[rank][part]
        bound = 2e-6 * outs.double().nan_to_num().abs().max() + ulp(right, shape.dtype)
        assert bool(((out.double() - right).abs() <= bound).all()), f"rank {rank}"
        torch.testing.assert_close(lse.double(), want_lse[rank][part], rtol=1e-5, atol=1e-5)


def counts_for(rig: Rig, number: int) -> RowCounts | None:
    if number % 3 == 0:
        return None
    if number % 3 == 1:
        return RowCounts(rig.randint(0, 2, (B,)).to(torch.int32))
    return RowCounts(None, rig.randint(0, 2, (3,)), torch.tensor([1, 4, 4, B - 2], dtype=torch.int32))


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("scatter", ["heads", "tokens", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_whatever_the_layouts_counts_and_chunks(rig: Rig, which: str, scatter: Any, dtype: torch.dtype) -> None:
    n = 3
    shape = shape_of(scatter, dtype, "2" if scatter == "none" else "e")
    t, h = shape.result_rows(B, n)
    world = Exchange(rig, which, shape, n)
    for number in range(8):
        outs, lses = rig.randn(n, B, H, D, dtype=dtype), any_lse(rig, n, B, H)
        partials = []
        for rank in range(n):
            counts = counts_for(rig, number + rank)
            names = list(layouts(outs[rank], rig.device).values())
            given = Partials(names[(3 * rank + number) % len(names)], lses[rank].clone(), counts)
            if counts is not None:
                lses[rank][counts.empty(B)] = -torch.inf
            outs[rank][~(lses[rank] < torch.inf) | (lses[rank] == -torch.inf)] = 0
            partials.append(given)
        start = number % 2
        result = [torch.full((t, h, 2 * D), torch.nan, dtype=dtype)[..., :: 1 + number % 2][..., :D] for _ in range(n)]
        headers = [Header(number, 5, B, start, D)] * n
        got_lses = world.merge(partials, start, t - start, headers, [one[start:] for one in result])
        judge(shape, outs, lses, [one[start:] for one in result], got_lses, slice(start, t))
        assert all(one.failure(0) is None for one in world.engines)
    assert all(int(one.ordinals[0]) == 8 for one in world.engines), "every exchange counts once"


@pytest.mark.parametrize("which", ENGINES)
def test_another_call_of_a_peer_is_noted_and_its_rows_are_nowhere(rig: Rig, which: str) -> None:
    n, shape = 3, shape_of("heads")
    t, h = shape.result_rows(B, n)
    world = Exchange(rig, which, shape, n)

    def call(headers: list[Header], off: tuple[int, ...] = ()) -> list[torch.Tensor]:
        outs, lses = rig.randn(n, B, H, D, dtype=shape.dtype), rig.randn(n, B, H)
        partials = [Partials(out, lse, None) for out, lse in zip(outs, lses, strict=True)]
        result = [torch.zeros(t, h, D, dtype=shape.dtype) for _ in range(n)]
        got_lses = world.merge(partials, 0, t, headers, result, off)
        if len(set(headers)) == 1 and not off:
            judge(shape, outs, lses, result, got_lses, slice(None))
        return result

    one, other = Header(0, 1, B, 0, D), Header(0, 2, B, 0, D)
    call([one] * n)
    merged = call([one, one, other])
    for rank, engine in enumerate(world.engines):
        assert bool(merged[rank].isnan().all()), "nothing of another call may be merged"
        failure = engine.failure(0)
        assert failure.mine.tag == (2 if rank == 2 else 1)
        assert failure.mine.ordinal == 1
        came = [Header.from_words(words) for words in failure.came]
        assert [header.tag for header in came] == [1, 1, 2]
        assert [header.ordinal for header in came] == [1] * n
    call([one] * n)
    assert all(engine.failure(0).mine.ordinal == 1 for engine in world.engines), "the first that failed is kept"
    for engine in world.engines:
        engine.settle(0)
    merged = call([one, Header(0, 0, 0, 0, 0, KIND_CANCELLED), one], off=(1,))
    assert all(bool(merged[rank].isnan().all()) for rank in (0, 2))
    assert [Header.from_words(words).kind for words in world.engines[0].failure(0).came] == [0, KIND_CANCELLED, 0]
    assert world.engines[1].failure(0) is None
    for engine in world.engines:
        engine.settle(0)
    call([one] * n)
    assert all(engine.failure(0) is None for engine in world.engines)


def test_without_nvrtc_torch_serves_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable(*_: Any) -> Any:
        raise KernelsUnavailable("CuPy can't be imported: no such module")

    monkeypatch.setattr(cuda_engine, "Kernels", unavailable)
    monkeypatch.setattr(cuda_engine, "_kernels_for", cuda_engine._kernels_for.__wrapped__)
    device = torch.device("cuda", 0)
    with caplog.at_level(logging.ERROR, logger="dcpcomm"):
        assert cuda_engine.kernels_for(device, torch.float32, 2) is None
    assert "many times slower" in caplog.text
    assert "CuPy can't be imported" in caplog.text
    assert "torch operations" in engine_in_words(device, torch.float32, 2)
