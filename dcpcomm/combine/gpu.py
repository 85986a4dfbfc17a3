"""What the engines of a GPU share: calls counted there, and what does not fit noted where the host can read it."""

from __future__ import annotations

import numpy as np
import torch

from dcpcomm import topology
from dcpcomm.combine.engine import Engine, Failure
from dcpcomm.combine.params import record_words
from dcpcomm.combine.wire import HEADER_WORDS, Header
from dcpcomm.transport import MergeShape

__all__ = ["CallRecords", "GpuEngine"]


_PROGRESS_WORDS = 8  # a line of the host's cache for each channel


class CallRecords:
    """What the GPU notes of headers that don't fit, in pinned memory: read without asking the GPU.

    Per channel int64 words: 0, or 1 where there is something; this rank's header; every source's.

    Attributes:
        progress: int64 `[channels, ...]`, pinned: calls begun, and calls ended.
    """

    def __init__(self, channels: int, world_size: int) -> None:
        with torch.inference_mode(False):
            self.memory = torch.zeros((channels, record_words(world_size)), dtype=torch.int64).pin_memory()
            self.progress = torch.zeros((channels, _PROGRESS_WORDS), dtype=torch.int64).pin_memory()
        self._words = self.memory.numpy()
        self._states = [memoryview(words) for words in self._words]  # a read is half of numpy's

    def state(self, channel: int) -> memoryview:
        """Its first word is 0 as long as nothing is noted."""
        return self._states[channel]

    def failure(self, channel: int) -> Failure | None:
        """What is noted, or None."""
        if not self._states[channel][0]:
            return None
        words = self._words[channel]
        headers = words[1:].reshape(-1, HEADER_WORDS).copy()
        return Failure(Header.from_words(headers[0]), headers[1:])

    def settle(self, channel: int) -> None:
        """Make room for the next."""
        self._words[channel, 0] = 0


class GpuEngine(Engine):
    """An engine whose calls return before the GPU has made them.

    Attributes:
        device: the GPU.
        records: what it notes, by channel.
    """

    def __init__(self, shape: MergeShape, rank: int, world_size: int, device: torch.device) -> None:
        super().__init__(shape, rank, world_size)
        self.device = device
        self.records = CallRecords(shape.channels, world_size)
        if world_size > 1:
            with torch.inference_mode(False):
                self.ordinals = torch.zeros(shape.channels, dtype=torch.int64, device=device)
        self._streams: set[int] = set()

    def stream(self) -> int:
        """The current stream's handle."""
        handle = topology.current_stream(self.device)
        if handle not in self._streams:
            self._streams.add(handle)
        return handle

    @property
    def progress(self) -> np.ndarray | None:
        return self.records.progress.numpy()

    def state(self, channel: int) -> memoryview:
        """Of `records`."""
        return self.records.state(channel)

    def failure(self, channel: int) -> Failure | None:
        return self.records.failure(channel)

    def settle(self, channel: int) -> None:
        self.records.settle(channel)

    def finish(self) -> None:
        handles, self._streams = self._streams, set()
        for handle in handles:
            torch.cuda.ExternalStream(handle, self.device).synchronize()

    def reset(self) -> None:
        if self.ordinals is not None:
            self.ordinals.zero_()
        torch.cuda.current_stream(self.device).synchronize()  # calls may come on any stream
        self.records.progress.zero_()
        for channel in range(self.shape.channels):
            self.settle(channel)
