"""N ranks of `PutSignal` over a pretended NVSHMEM: a thread each, kernels of the project's own source on the CPU."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dcpcomm.combine.put_signal import PutSignal, put_bytes, put_places
from dcpcomm.combine.wire import Header, wire_views
from dcpcomm.transport import MergeShape
from dcpcomm.workspace import block_capacity
from tests.emulated import EmulatedKernels
from tests.pretend_nvshmem import Job, tensor_at

SHAPE = MergeShape(max_tokens=4, num_heads=12, head_dim=40, dtype=torch.bfloat16, lse_base="e")
DEADLINE_S = 10.0


class Tape:
    """Between a rank and what it launches: what was asked for while it records is kept as it was, and asked for again
    by `replay`, whatever the host has done since. A graph, as far as captured arguments go.
    """

    def __init__(self, library: Any, kernels: EmulatedKernels) -> None:
        self._library, self._kernels = library, kernels
        self.recording = False
        self.steps: list[Callable[[], Any]] = []

    def do(self, step: Callable[[], Any]) -> None:
        """Now, or by a replay."""
        if self.recording:
            self.steps.append(step)
        else:
            step()

    def _launch(self, bound: Callable[[Any], Any], params: ctypes.Structure) -> Callable[[int], None]:
        def launch(stream: int) -> None:
            frozen = type(params).from_buffer_copy(params)
            one = bound(frozen)
            self.do(lambda: one(stream))

        return launch

    def load_signals(self) -> None:
        self._kernels.load_signals()

    def bind_await(self, params: Any) -> Any:
        return self._launch(self._kernels.bind_await, params)

    def bind_move(self, params: Any) -> Any:
        return self._launch(self._kernels.bind_move, params)

    def put(self, *given: int) -> None:
        self.do(lambda: self._library.put(*given))

    def settle(self, *given: int) -> None:
        self.do(lambda: self._library.settle(*given))


class PutRank:
    """One rank: its library, its buffers, and calls whose rows anybody can compute."""

    def __init__(self, job: Job, rank: int, shape: MergeShape, kernels: EmulatedKernels, uid: bytes) -> None:
        self.job, n, self.rank, self.shape = job, job.n, rank, shape
        library = job.libraries[rank]
        library.initialise(uid, rank, n)
        self.own = tensor_at(library.allocate(put_bytes(shape, n)), put_bytes(shape, n), torch.device("cpu"))
        self.own.zero_()
        self.group: Any = SimpleNamespace(
            rank=rank, size=n, peers=[(rank + step) % n for step in range(1, n)], exchange_timeout_s=DEADLINE_S
        )
        self.tape = Tape(library, kernels)
        tape: Any = self.tape
        self.over = PutSignal(self.group, shape, self.own, tape, tape, list(range(n)), settles=True)
        room = n * block_capacity(shape, n)
        self.buffers = [torch.zeros(2, room, dtype=torch.uint8) for _ in range(shape.channels)]
        self.calls = [0] * shape.channels
        #: By call of channel 0: what came, by rank; None where the header was of another call.
        self.got: list[Any] = []
        job.meet("ready", n, rank)

    def call(self, tokens: int, channel: int = 0) -> None:
        """Pack, exchange, and look at what came, as a merge does: all three may be recorded."""
        n, (send, recv) = self.group.size, self.buffers[channel]
        t, h = self.shape.result_rows(tokens, n)
        sent, came = wire_views(send, recv, n, t, h, self.shape.head_dim, self.shape.dtype, True)
        self.tape.do(lambda: self._pack(sent.blocks, tokens, channel))
        self.over.exchange(sent.blocks, channel, came.blocks)
        self.tape.do(lambda: self._look(came.blocks, tokens, channel))

    def release(self) -> None:
        """Whatever still waits for a peer waits no more."""
        places = put_places(self.shape, self.group.size)
        for channel in range(self.shape.channels):
            self.own[channel * places.total :][places.rows : places.counts] = 0x7F

    def _pack(self, blocks: torch.Tensor, tokens: int, channel: int) -> None:
        for to in range(self.group.size):
            blocks[to] = block_of(blocks, self.rank, to, self.calls[channel], tokens)

    def _look(self, blocks: torch.Tensor, tokens: int, channel: int) -> None:
        number, self.calls[channel] = self.calls[channel], self.calls[channel] + 1
        came: dict[int, bool | None] = {}
        for source in self.group.peers:
            want = block_of(blocks, source, self.rank, number, tokens)
            same = torch.equal(blocks[source], want)
            came[source] = same if torch.equal(blocks[source][0, :32], want[0, :32]) else None
        self.got.append(came)
        blocks.fill_(0xA5)


def block_of(like: torch.Tensor, source: int, to: int, call: int, tokens: int) -> torch.Tensor:
    """`[1 + R, W]`: the block of that call, every byte of it its own."""
    words = np.arange(like[0].numel() // 8, dtype=np.uint64)
    words = (words + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(call * 64 + source * 8 + to)
    words[:4] = Header(call, 0, tokens, 0, like.shape[2]).words()
    return torch.from_numpy(words.view(np.uint8)).view(like.shape[1:])


def ranks_of(job: Job, kernels: EmulatedKernels, shape: MergeShape = SHAPE) -> list[PutRank]:
    from tests.world import in_threads

    uid = job.libraries[0].unique_id()
    return in_threads(*(lambda rank=rank: PutRank(job, rank, shape, kernels, uid) for rank in range(job.n)))


def together(ranks: list[PutRank], body: Callable[[PutRank], Any]) -> list[Any]:
    from tests.world import in_threads

    return in_threads(*(lambda one=one: body(one) for one in ranks))


def assert_all_right(ranks: list[PutRank], calls: int) -> None:
    for one in ranks:
        for channel in range(one.shape.channels):
            one.over.poll(channel)
        assert len(one.got) == calls
        wrong = [(number, came) for number, came in enumerate(one.got) if not all(came.values())]
        assert not wrong, f"rank {one.rank}: call, and whether its peers' rows are right: {wrong[:3]}"


def counts_of(one: PutRank, channel: int = 0) -> list[int]:
    """Calls awaited, credits awaited, and the channel's state, as device memory has them."""
    places = put_places(one.shape, one.group.size)
    begin = channel * places.total + places.counts
    return one.own[begin : begin + 24].view(torch.int64).tolist()  # type: ignore[no-any-return]


def late(one: PutRank, seconds: float) -> None:
    time.sleep(seconds if one.rank == 0 else 0)
