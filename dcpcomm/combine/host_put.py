"""The peer family on CPU: put rows into the peers' memory, raise their flag, wait for one's own.

The order of things is that of the fused CUDA kernel's protocol, with a flag in the place of its sentinels: two slots
used in turn, and an epoch per channel. A rank can write a slot again only after its peer's rows of the call between
have come, which that peer sent after it had finished with the slot. So no call may be one-way: also a rank that called
its call off writes a header to every peer.

For ranks in one process, whose threads see each other's stores in order.
"""

from __future__ import annotations

import ctypes
import time

import numpy as np
import torch

from dcpcomm.errors import TransportTimeout
from dcpcomm.group import Group
from dcpcomm.transport import MergeShape, PeerBuffers
from dcpcomm.workspace import ALIGNMENT, block_capacity

__all__ = ["HostPut", "slots_bytes"]

_SLOTS = 2


def slots_bytes(shape: MergeShape, world_size: int) -> int:
    """Bytes of one rank's memory: by channel, two slots of a block and a flag for each source."""
    return shape.channels * _SLOTS * world_size * (block_capacity(shape, world_size) + ALIGNMENT)


class HostPut:
    """The exchange of a peer-memory transport, by the host's own stores."""

    def __init__(self, group: Group, shape: MergeShape, buffers: PeerBuffers) -> None:
        self._group = group
        self._buffers = buffers  # kept: a peer may have closed, and its memory must be there for what is under way
        n, capacity = group.size, block_capacity(shape, group.size)
        layout = (shape.channels, _SLOTS, n)
        blocks_bytes = shape.channels * _SLOTS * n * capacity
        with torch.inference_mode(False):
            size = slots_bytes(shape, n)
            memory = [
                buffers.own
                if rank == group.rank
                else torch.frombuffer((ctypes.c_uint8 * size).from_address(begin), dtype=torch.uint8)
                for rank, begin in enumerate(buffers.addresses)
            ]
            self._blocks = [one[:blocks_bytes].view(*layout, capacity) for one in memory]
            flags = [one[blocks_bytes:size] for one in memory]  # memory may be rounded up
        words = [flag.view(torch.int64).view(*layout, -1).numpy() for flag in flags]
        self._flags: list[np.ndarray] = [word[..., 0] for word in words]
        self._given_up: list[np.ndarray] = [word[..., 1] for word in words]
        self._epoch = [0] * shape.channels
        self._unread = [False] * shape.channels  # whether the peers' rows of the last call were waited for
        self._peers = group.peers

    def exchange(self, send: torch.Tensor, channel: int, recv: torch.Tensor | None = None) -> torch.Tensor:
        """Put `send [N, 1 + R, W]`; what came, the same shape, in place until the next call but one."""
        started = time.monotonic()
        slot, epoch = self._put(send, channel, started)
        self._wait(channel, slot, epoch, started)
        self._unread[channel] = False
        n, rows, width = send.shape
        return self._blocks[self._group.rank][channel, slot].as_strided(
            (n, rows, width), (self._blocks[0].shape[-1], width, 1)
        )

    def cancel(self, send: torch.Tensor, channel: int) -> None:
        """Put headers alone. Waits only where the call before was called off as well."""
        self._put(send, channel, time.monotonic())
        self._unread[channel] = True

    @property
    def given_up(self) -> bool:
        """Whether a peer may still store to this rank's memory: here, what it stores to is kept by itself."""
        return False

    def poll(self, channel: int) -> None:
        """Nothing is left to tell: `exchange` waits."""

    def _put(self, send: torch.Tensor, channel: int, started: float) -> tuple[int, int]:
        for peer in self._peers:
            # Keep a rank that comes too late from merging what the others sent before they gave up.
            if self._given_up[self._group.rank][channel, 0, peer]:
                raise TransportTimeout(f"rank {peer} has given this channel up, having waited too long", (peer,))
        if self._unread[channel]:
            self._wait(channel, self._epoch[channel] % _SLOTS, self._epoch[channel], started)
        self._epoch[channel] += 1
        epoch = self._epoch[channel]
        slot, rank, nbytes = epoch % _SLOTS, self._group.rank, send[0].numel()
        self._blocks[rank][channel, slot, rank, :nbytes].copy_(send[rank].view(-1))
        for peer in self._peers:
            self._blocks[peer][channel, slot, rank, :nbytes].copy_(send[peer].view(-1))
            self._flags[peer][channel, slot, rank] = epoch  # after the rows: it says that they are there
        return slot, epoch

    def _wait(self, channel: int, slot: int, epoch: int, started: float) -> None:
        limit = self._group.exchange_timeout_s
        mine = self._flags[self._group.rank][channel, slot]
        spins = 0
        while True:
            late = [peer for peer in self._peers if mine[peer] < epoch]
            if not late:
                return
            if limit is not None and time.monotonic() - started > limit:
                missing = tuple(sorted(late))
                for peer in self._peers:
                    self._given_up[peer][channel, 0, self._group.rank] = 1
                names = ", ".join(map(str, missing))
                raise TransportTimeout(f"rank {names} did not arrive within {limit:g} s", missing)
            spins += 1
            time.sleep(0 if spins < 200 else 0.0002)
