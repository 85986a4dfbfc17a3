"""Pack and combine on a GPU in torch's operations, where the kernels can't be compiled: right, and many launches."""

from __future__ import annotations

import torch

from dcpcomm.combine.engine import Layout, PackedCall, Partials
from dcpcomm.combine.gpu import GpuEngine
from dcpcomm.combine.torch_engine import TorchCall, TorchEngine, write_result
from dcpcomm.combine.wire import Header, WireViews
from dcpcomm.transport import MergeShape

__all__ = ["TorchCudaEngine"]


class TorchCudaEngine(GpuEngine, TorchEngine):
    """`TorchEngine` where the host must not wait."""

    def __init__(self, shape: MergeShape, rank: int, world_size: int, device: torch.device) -> None:
        super().__init__(shape, rank, world_size, device)
        self.noted = torch.zeros(self.records.memory.shape, dtype=torch.int64, device=device)

    def packed_call(self, channel: int, layout: Layout, send: WireViews, recv: WireViews) -> PackedCall:
        return _TorchCudaCall(self, channel, send, recv)

    def settle(self, channel: int) -> None:
        self.noted[channel].zero_()
        super().settle(channel)


class _TorchCudaCall(TorchCall):
    """`TorchCall` whose headers are written, compared and noted on the GPU."""

    def __init__(self, engine: TorchCudaEngine, channel: int, send: WireViews, recv: WireViews) -> None:
        super().__init__(engine, send, recv)
        assert engine.ordinals is not None
        self._gpu = engine
        self._ordinal = engine.ordinals[channel]
        self._progress = engine.records.progress[channel]
        self._noted, self._record = engine.noted[channel], engine.records.memory[channel]

    def call_off(self, header: Header) -> None:
        self._gpu.stream()
        headers = self._send.headers
        headers[:, 0] = self._ordinal
        for column, word in enumerate(header.words()[1:], 1):
            headers[:, column].fill_(word)
        self._ordinal.add_(1)

    def pack(self, partials: Partials, start: int, header: Header) -> None:
        self.call_off(header)
        self._progress[0].copy_(self._ordinal, non_blocking=True)
        self._pack_rows(partials, start)

    def combine(
        self, partials: Partials, start: int, header: Header, out: torch.Tensor, out_lse: torch.Tensor | None
    ) -> bool:
        mine = self._send.headers[self._engine.rank]
        came = self._recv.headers.clone()
        came[self._engine.rank] = mine
        differs = (came != mine).any()
        merged, lse = self._merged(partials, start, out_lse is not None)
        merged = torch.where(differs, torch.nan, merged)
        write_result((merged, None if lse is None else torch.where(differs, torch.nan, lse)), out, out_lse)
        note = torch.cat([differs.view(1).long(), mine, came.view(-1)])
        self._noted.copy_(torch.where(self._noted[0] == 0, note, self._noted))
        # The state last: the host must not find it before what it speaks of.
        self._record[1:].copy_(self._noted[1:], non_blocking=True)
        self._record[:1].copy_(self._noted[:1], non_blocking=True)
        self._progress[1].copy_(self._ordinal, non_blocking=True)
        return True
