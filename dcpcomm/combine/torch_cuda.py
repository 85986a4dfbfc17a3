"""Pack and combine on a GPU in torch's operations, where the kernels can't be compiled: right, and many launches."""

from __future__ import annotations

import torch

from dcpcomm.combine.engine import Failure, Layout, PackedCall, Partials
from dcpcomm.combine.torch_engine import TorchCall, TorchEngine, write_result
from dcpcomm.combine.wire import HEADER_WORDS, Header, WireViews
from dcpcomm.transport import MergeShape

__all__ = ["CallRecords", "TorchCudaEngine"]


class CallRecords:
    """What the GPU notes of headers that don't fit, where the host can read it without asking the GPU.

    Per channel int64 words: 0 or 1 where there is something, this rank's header, then every source's.
    """

    def __init__(self, channels: int, world_size: int) -> None:
        with torch.inference_mode(False):
            self.memory = torch.zeros((channels, 1 + HEADER_WORDS * (1 + world_size)), dtype=torch.int64).pin_memory()
        self._words = self.memory.numpy()

    def failure(self, channel: int) -> Failure | None:
        words = self._words[channel]
        if not words[0]:
            return None
        came = words[1:].reshape(-1, HEADER_WORDS).copy()
        return Failure(Header.from_words(came[0]), came[1:])

    def settle(self, channel: int) -> None:
        self._words[channel, 0] = 0


class TorchCudaEngine(TorchEngine):
    """`TorchEngine` where the host must not wait: the GPU counts the calls, and notes what doesn't fit."""

    def __init__(self, shape: MergeShape, rank: int, world_size: int, device: torch.device) -> None:
        super().__init__(shape, rank, world_size)
        self.records = CallRecords(shape.channels, world_size)
        self.noted = torch.zeros(self.records.memory.shape, dtype=torch.int64, device=device)

    def packed_call(self, channel: int, layout: Layout, send: WireViews, recv: WireViews) -> PackedCall:
        return _TorchCudaCall(self, channel, send, recv)

    def failure(self, channel: int) -> Failure | None:
        return self.records.failure(channel)

    def settle(self, channel: int) -> None:
        self.noted[channel].zero_()
        self.records.settle(channel)

    def finish(self) -> None:
        torch.cuda.synchronize(self.noted.device)

    def reset(self) -> None:
        if self.ordinals is not None:
            self.ordinals.zero_()
        self.noted.zero_()
        torch.cuda.current_stream(self.noted.device).synchronize()  # calls may come on any stream
        for channel in range(self.shape.channels):
            self.records.settle(channel)


class _TorchCudaCall(TorchCall):
    def __init__(self, engine: TorchCudaEngine, channel: int, send: WireViews, recv: WireViews) -> None:
        super().__init__(engine, send, recv)
        assert engine.ordinals is not None
        self._ordinal = engine.ordinals[channel]
        self._noted, self._record = engine.noted[channel], engine.records.memory[channel]

    def call_off(self, header: Header) -> None:
        headers = self._send.headers
        headers[:, 0] = self._ordinal
        for column, word in enumerate(header.words()[1:], 1):
            headers[:, column].fill_(word)
        self._ordinal.add_(1)

    def pack(self, partials: Partials, start: int, header: Header) -> None:
        self.call_off(header)
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
        self._record.copy_(self._noted, non_blocking=True)
        return True
