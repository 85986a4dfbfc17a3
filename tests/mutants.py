"""Transports that are wrong in one way each: what the conformance suite must catch.

All but one are `loopback` with one mistake; `Pull` is a second right transport, which merges by itself, for mistakes
that only such a one can make.
"""

from __future__ import annotations

import copy
import itertools
import math
import queue
import time
from collections import defaultdict, deque
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from dcpcomm.backends.gloo_a2a import GlooA2A
from dcpcomm.backends.loopback import Loopback
from dcpcomm.combine.engine import by_destination, engine_for
from dcpcomm.transport import Capabilities

INF = math.inf


class Altered(Loopback):
    """Alters each peer's block after it has arrived."""

    def exchange(self, send: torch.Tensor, channel: int, recv: Any = None) -> torch.Tensor:
        super().exchange(send, channel, recv)
        for source in self._peers:
            self.alter(recv[source], channel, source)
        return recv

    def alter(self, block: torch.Tensor, channel: int, source: int) -> None:
        """`block [1 + R, W]` uint8, the header in row 0."""
        raise NotImplementedError

    def lse_of(self, block: torch.Tensor) -> torch.Tensor:
        """`[R]` float32, a view."""
        return block[1:, -16:-12].view(torch.float32).squeeze(-1)


class PermutedHeads(Altered):
    name: ClassVar[str] = "permuted_heads"

    def alter(self, block: torch.Tensor, channel: int, source: int) -> None:
        heads = self.shape.num_heads // (self.group.size if self.shape.scatter == "heads" else 1)
        rows = block[1:].view(-1, heads, block.shape[1])
        rows.copy_(rows.flip(1))


class DroppedLastRow(Loopback):
    """Off by one in the number of rows, where there is more than one."""

    name: ClassVar[str] = "dropped_last_row"

    def exchange(self, send: torch.Tensor, channel: int, recv: Any = None) -> torch.Tensor:
        before = recv[:, -1].clone()
        super().exchange(send, channel, recv)
        if recv.shape[1] > 2:
            recv[self._peers, -1] = before[self._peers]
        return recv


class StaleSlot(Altered):
    """A ring of 16 slots of which the first comes round before a row of it was written."""

    name: ClassVar[str] = "stale_slot"

    def prepare(self) -> bytes:
        self.ring: dict[Any, deque[torch.Tensor]] = defaultdict(lambda: deque(maxlen=16))
        self.calls: dict[Any, int] = defaultdict(int)
        return super().prepare()

    def alter(self, block: torch.Tensor, channel: int, source: int) -> None:
        key = channel, source
        row, self.calls[key] = block[1].clone(), self.calls[key] + 1
        if self.calls[key] > 16 and self.calls[key] % 16 == 1:
            block[1] = self.ring[key][0]
        self.ring[key].append(row)


class LSEBaseLost(Altered):
    """Converts to base e once more than it is converted back."""

    name: ClassVar[str] = "lse_base_lost"

    def alter(self, block: torch.Tensor, channel: int, source: int) -> None:
        if self.shape.lse_base == "2":
            self.lse_of(block).mul_(math.log(2.0))


class LSERounded(Altered):
    name: ClassVar[str] = "lse_rounded"

    def alter(self, block: torch.Tensor, channel: int, source: int) -> None:
        lse = self.lse_of(block)
        lse.copy_(lse.bfloat16().float())


class NaNLeaked(Loopback):
    """Keeps -inf out of its arithmetic by the lowest finite number: rows that are empty everywhere then count."""

    name: ClassVar[str] = "nan_leaked"

    def exchange(self, send: torch.Tensor, channel: int, recv: Any = None) -> torch.Tensor:
        super().exchange(send, channel, recv)
        lse = recv[:, 1:, -16:-12].view(torch.float32)
        lse.clamp_(min=torch.finfo(torch.float32).min)
        return recv


class WrongStride(Altered):
    """Takes the pitch of rows for the next power of two."""

    name: ClassVar[str] = "wrong_stride"

    def alter(self, block: torch.Tensor, channel: int, source: int) -> None:
        width = block.shape[1]
        pitch = (1 << (width - 16 - 1).bit_length()) + 16
        flat = block[1:].flatten().clone()
        for i in range(block.shape[0] - 1):
            if (i + 1) * pitch <= flat.numel():
                block[1 + i] = flat[i * pitch : i * pitch + width]


class TornHalfLine(Altered):
    """Every 20th message, the second half of one 128-byte line is still that of the message before."""

    name: ClassVar[str] = "torn_half_line"

    def prepare(self) -> bytes:
        self.last: dict[Any, torch.Tensor] = {}
        self.calls: dict[Any, int] = defaultdict(int)
        return super().prepare()

    def alter(self, block: torch.Tensor, channel: int, source: int) -> None:
        key = channel, source
        flat, old = block.view(-1), self.last.get(key)
        self.last[key], self.calls[key] = flat.clone(), self.calls[key] + 1
        middle = flat.numel() // 256 * 128
        half = slice(middle + 64, middle + 128)
        if self.calls[key] % 20 == 0 and old is not None and old.numel() >= half.stop <= flat.numel():
            flat[half] = old[half]


class EpochInHostMemory(Loopback):
    """Two slots, chosen by a counter of the object's: right while all ranks take their channels in the same order."""

    name: ClassVar[str] = "epoch_in_host_memory"

    def prepare(self) -> bytes:
        self.turns = itertools.count()
        ready = super().prepare()
        self._unread = defaultdict(int)
        return ready

    def exchange(self, send: torch.Tensor, channel: int, recv: Any = None) -> torch.Tensor:
        return super().exchange(send, next(self.turns) % 2, recv)

    def cancel(self, send: torch.Tensor, channel: int) -> None:
        super().cancel(send, next(self.turns) % 2)


class SourcesByArrival(Loopback):
    """Puts the blocks of peers one after the other as they come. Their sum is right, but for its rounding."""

    name: ClassVar[str] = "sources_by_arrival"
    capabilities: ClassVar[Capabilities] = Capabilities(devices=("cpu",))

    def exchange(self, send: torch.Tensor, channel: int, recv: Any = None) -> torch.Tensor:
        started, limit = time.monotonic(), self.group.exchange_timeout_s or math.inf
        self._check_poison(channel)
        self._post(send, channel)
        recv[self.group.rank].copy_(send[self.group.rank])
        places, missing = iter(sorted(self._peers)), list(self._peers)
        while missing:
            for source in tuple(missing):
                try:
                    message = self._mail[channel, source, self.group.rank].get_nowait()
                except queue.Empty:
                    continue
                recv[next(places)].view(-1)[: message.numel()].copy_(message)
                missing.remove(source)
            if time.monotonic() - started > limit:
                self._take(missing[0], channel, started)
            time.sleep(0.0001)
        return recv


class GroupOrderIgnored(GlooA2A):
    """Goes by the process's global rank."""

    name: ClassVar[str] = "group_order_ignored"

    def __init__(self, group: Any, shape: Any, options: Any) -> None:
        group = copy.copy(group)
        group.rank = dist.get_rank()
        super().__init__(group, shape, options)

    def exchange(self, send: torch.Tensor, channel: int, recv: Any = None) -> torch.Tensor:
        super().exchange(send, channel, recv)
        recv[self.group.rank].copy_(send[self.group.rank])
        return recv


class HeaderForged(Altered):
    """Writes its own header over those that came, so that nobody finds out with whom it merged."""

    name: ClassVar[str] = "header_forged"

    def exchange(self, send: torch.Tensor, channel: int, recv: Any = None) -> torch.Tensor:
        super().exchange(send, channel, recv)
        recv[:, 0] = send[0, 0]
        return recv

    def alter(self, block: torch.Tensor, channel: int, source: int) -> None:
        pass


class CancelLost(Loopback):
    """Claims to tell its peers when a call raised, and doesn't."""

    name: ClassVar[str] = "cancel_lost"

    def cancel(self, send: torch.Tensor, channel: int) -> None:
        self._unread[channel] += 1


class ClosesOnce(Loopback):
    name: ClassVar[str] = "closes_once"

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed twice")
        self.closed = True
        super().close()

    closed = False


class ConnectsOnce(Loopback):
    """All mergers of a world share one post office."""

    name: ClassVar[str] = "connects_once"

    def connect(self, peers: list[bytes]) -> None:
        self._mail = self.group.loopback.world.mail("the one and only")


class Pull(Loopback):
    """Right, and merges by itself: each rank takes its slice out of what the others lend it."""

    name: ClassVar[str] = "pull"
    capabilities: ClassVar[Capabilities] = Capabilities(devices=("cpu",))

    def fused_merge(self, out: torch.Tensor, lse: torch.Tensor, channel: int) -> Any:
        started = time.monotonic()
        self._check_poison(channel)
        mine = self.lend(out), self.lend(lse)
        for peer in self._peers:
            self._mail[channel, self.group.rank, peer].put(mine)
        lent: list[Any] = [mine] * self.group.size
        for source in self._peers:
            lent[source] = self._take(source, channel, started)
        rank, n, scatter = self.group.rank, self.group.size, self.shape.scatter
        rows = torch.stack([by_destination(theirs, scatter, n)[rank] for theirs, _ in lent])
        lses = torch.stack([by_destination(theirs, scatter, n)[rank] for _, theirs in lent])
        merged, merged_lse = torch.empty_like(rows[0]), torch.empty_like(lses[0])
        engine_for(self.shape, rank, n, out.device).combine(rows, lses, merged, merged_lse)
        return self.result(merged), merged_lse

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def result(self, merged: torch.Tensor) -> torch.Tensor:
        return merged


class InputAliased(Pull):
    """Lends the caller's own memory, and returns before the others have read it."""

    name: ClassVar[str] = "input_aliased"

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class InputChanged(Pull):
    """Cleans empty rows where they are."""

    name: ClassVar[str] = "input_changed"

    def fused_merge(self, out: torch.Tensor, lse: torch.Tensor, channel: int) -> Any:
        out[lse == -INF] = 0
        return super().fused_merge(out, lse, channel)


class ResultReused(Pull):
    """One buffer for all results of one shape."""

    name: ClassVar[str] = "result_reused"

    def prepare(self) -> bytes:
        self.results: dict[Any, torch.Tensor] = {}
        return super().prepare()

    def result(self, merged: torch.Tensor) -> torch.Tensor:
        return self.results.setdefault(tuple(merged.shape), torch.empty_like(merged)).copy_(merged)
