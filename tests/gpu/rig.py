"""What the tests with virtual ranks on one GPU share: their data, captures, streams, and how a rank waits.

Every rank is a thread with a stream. While a rank's kernels wait for another rank, nobody may wait for the whole
device, copy from or to pageable memory behind them, or make torch's allocator ask the driver for memory. So: data are
on the device before `together`, captures lie between two of them, results are fetched after `settle`.

DCPCOMM_TEST_RIG=cpu runs what can be run without a GPU: a capture is then the function itself, a stream nothing.
DCPCOMM_TEST_OVER=nccl_a2a runs the same between processes, over that transport and a GPU for each rank.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dcpcomm
from dcpcomm.graphs import captured
from dcpcomm.testing.loopback import provided_stream
from tests.oracle import NAN, Case
from tests.world import POOL_SIZE, THREADS, ProcessPool, World, config_for, meet, shape_of

OVER = os.environ.get("DCPCOMM_TEST_OVER", "loopback_peer")
DEVICE = torch.device(os.environ.get("DCPCOMM_TEST_RIG") or ("cuda:0" if OVER in THREADS else "cuda"))
ON_GPU = DEVICE.type == "cuda"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RUN_TIMEOUT_S = 120.0  # kernels may have to be compiled first

#: `pytestmark` of the files here.
ONE_GPU = [
    pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
    pytest.mark.timeout(240),
]
#: For what makes no sense on a CPU.
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="is about a GPU, and the rig is the CPU")


_pool = ProcessPool()
atexit.register(_pool.close)


def run(n: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`fn(group, *args)` on N ranks; the results by rank."""
    if OVER not in THREADS:
        if n > (most := min(POOL_SIZE, torch.cuda.device_count() if ON_GPU else POOL_SIZE)):
            pytest.skip(f"{n} ranks want {n} GPUs, and here are {most}")
        return World(OVER, n, _pool).run(_on_own_gpu, fn, *args, timeout_s=RUN_TIMEOUT_S)
    return World(OVER, n, _pool).run(fn, *args, timeout_s=RUN_TIMEOUT_S)


def _on_own_gpu(group: Any, fn: Callable[..., Any], *args: Any) -> Any:
    rank, size = group.rank(), group.size()
    if ON_GPU:
        torch.cuda.set_device(rank)
    # An engine's coordinator, with the attributes of a loopback rank.
    both = SimpleNamespace(rank=rank, size=size, rank_in_group=rank, world_size=size, device_group=group)
    return fn(both, *args)


def merger_for(group: Any, shape: dict[str, Any] | None = None, **config: Any) -> dcpcomm.DCPMerger:
    settings = config_for(group, **config)
    return dcpcomm.DCPMerger(group, shape_of(group.size, **(shape or {})), config=settings, device=DEVICE)


# ---------------------------------------------------------------- waiting


def settle() -> None:
    """Wait for this rank's current stream, and for nothing else."""
    if ON_GPU:
        torch.cuda.current_stream(DEVICE).synchronize()


def together() -> None:
    """All ranks are here, and their streams are at rest."""
    settle()
    meet()


def device_sleep(ms: float) -> None:
    """Keep the current stream busy."""
    if ON_GPU:
        torch.cuda._sleep(int(ms * 1.8e6))
    else:
        time.sleep(ms / 1e3)


# ---------------------------------------------------------------- streams


def side_streams(count: int) -> list[Any]:
    """Streams beside this rank's own, to be made before any rank is in a call."""
    return [provided_stream() if ON_GPU else None for _ in range(count)]


def on(stream: Any) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.stream(stream) if ON_GPU else contextlib.nullcontext()


def join(first: Any, then: Any) -> None:
    """By an event: what comes on stream `then` waits for what is on stream `first`."""
    if ON_GPU:
        event = torch.cuda.Event()
        event.record(first)
        then.wait_event(event)


def here() -> Any:
    """This rank's current stream."""
    return torch.cuda.current_stream(DEVICE) if ON_GPU else None


# ---------------------------------------------------------------- data


def on_device(x: torch.Tensor) -> torch.Tensor:
    """A copy with storage of its own. Not while calls are under way."""
    return x.contiguous().to(DEVICE, copy=True)


def mine(cases: list[Case], rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's (partial, lse) of each case, on the device."""
    for dtype in {cases[0].outs.dtype, F32}:  # filling's first use loads a kernel, which may wait for the device
        poisoned((2, 2), dtype)
    return [(on_device(case.outs[rank]), on_device(case.lses[rank])) for case in cases]


def poisoned(shape: Any, dtype: torch.dtype, value: float = NAN) -> torch.Tensor:
    return torch.full(tuple(shape), value, dtype=dtype, device=DEVICE)


def poison_heap(like: torch.Tensor) -> None:
    """Leave NaN in memory of the current stream that the allocator is about to hand out again."""
    blocks = [poisoned((max(1, like.numel() // k),), like.dtype) for k in (1, 2, 4)]
    del blocks


def room_for(merger: dcpcomm.DCPMerger, b: int, width: int | None = None, value: float = NAN) -> Any:
    """(out, lse) that a merge of `b` rows may fill, poisoned."""
    rows = merger.shape.result_rows(b, merger.group.size)
    out = poisoned((*rows, width or merger.shape.head_dim), merger.shape.dtype, value)
    return out, poisoned(rows, torch.float32, value)


def fetched(results: list[Any]) -> list[Any]:
    """The same tensors, or tuples of them, on CPU."""
    settle()
    return [tuple(t.cpu().clone() for t in one) if isinstance(one, tuple) else one.cpu().clone() for one in results]


def finished(merger: dcpcomm.DCPMerger, results: list[Any]) -> list[Any]:
    """`results` on CPU, once all is done and nothing was reported."""
    settle()
    merger.check()
    return fetched(results)


# ---------------------------------------------------------------- graphs


def capture(step: Callable[[], Any], here: bool = True) -> Any:
    """A graph of `step`, for all ranks at once: a capture takes memory from the driver.

    Args:
        here: False: this rank captures nothing, while others do, and gets None.
    """
    together()
    graph: Any = None
    if here:
        graph = captured(step, DEVICE) if ON_GPU else SimpleNamespace(replay=step)
    together()
    return graph


class Replay:
    """One captured merge, whose inputs and results keep their places. Made by all ranks at once."""

    def __init__(self, merger: dcpcomm.DCPMerger, like: Case, rank: int, *, here: bool = True, **keywords: Any) -> None:
        self._merger, self._keywords = merger, keywords
        self.partial, self.lse = poisoned(like.outs[rank].shape, like.outs.dtype), on_device(like.lses[rank])
        self.out, self.out_lse = room_for(merger, like.outs.shape[1])
        self.graph = capture(self._step, here)

    def _step(self) -> None:
        _, lse = self._merger.merge(self.partial, self.lse, out=self.out, return_lse=True, **self._keywords)
        self.out_lse.copy_(lse)

    def __call__(self, partial: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of these inputs, by a replay, into poisoned memory; copies."""
        self.partial.copy_(partial)
        self.lse.copy_(lse)
        self.out.fill_(NAN)
        self.out_lse.fill_(NAN)
        self.graph.replay()
        return self.out.clone(), self.out_lse.clone()


def by_call(by_rank: list[list[Any]]) -> list[list[Any]]:
    """[rank][call] -> [call][rank]."""
    return [list(call) for call in zip(*by_rank, strict=True)]


def row_counts(seq_lens: torch.Tensor, starts: torch.Tensor, b: int) -> torch.Tensor:
    """`[B]`: what `seq_lens` and `query_start_loc` say of each row; 0 for padding."""
    counts = torch.zeros(b, dtype=torch.int64)
    for length, begin, end in zip(seq_lens.tolist(), starts.tolist()[:-1], starts.tolist()[1:], strict=True):
        counts[begin:end] = length
    return counts


def blank_empty_rows(case: Case) -> Case:
    """Rows that `case.counts` calls empty hold NaN, under an LSE that looks alive."""
    case.outs[case.counts == 0], case.lses[case.counts == 0] = NAN, 0.0
    return case
