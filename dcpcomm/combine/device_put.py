"""The peer family on GPUs by two kernels of `cuda/put.cu`: put the rows into the peers' memory, take what they put.

Slots, epochs and deadline as in `host_put.py`, all of it kept in device memory, so that replays of a captured graph and
eager calls mix. Right rather than fast: rows are copied once more than need be.
"""

from __future__ import annotations

import ctypes

import torch

from dcpcomm import topology
from dcpcomm.combine.driver import Launch
from dcpcomm.combine.kernels import Kernels
from dcpcomm.combine.structs import ChannelState, PutParams, TakeParams
from dcpcomm.errors import TransportTimeout
from dcpcomm.group import Group
from dcpcomm.transport import MergeShape, PeerBuffers
from dcpcomm.workspace import ALIGNMENT, aligned, block_capacity

__all__ = ["Absences", "DevicePut", "slots_bytes"]

_SLOTS = 2
_LAUNCHES_KEPT = 256


def slots_bytes(shape: MergeShape, world_size: int) -> int:
    """Bytes of one rank's memory: by channel, two slots of a block and a flag for each source, and what is private."""
    return shape.channels * (_channel_bytes(shape, world_size) + _private_bytes(world_size))


def _channel_bytes(shape: MergeShape, world_size: int) -> int:
    return _SLOTS * world_size * (block_capacity(shape, world_size) + ALIGNMENT) + ALIGNMENT


def _private_bytes(world_size: int) -> int:
    """A channel's state, and the peers' addresses."""
    return aligned(ctypes.sizeof(ChannelState)) + aligned(8 * world_size)


class Absences:
    """What kernels note of ranks that didn't come, in pinned memory: read without asking the GPU."""

    def __init__(self, group: Group, channels: int) -> None:
        self._group = group
        with torch.inference_mode(False):
            # int64 [channels, 2 + N]: state, epoch, 1 for each rank that is missing
            self._records = torch.zeros((channels, 2 + group.size), dtype=torch.int64).pin_memory()
        self._words = self._records.numpy()
        self._states = [memoryview(words) for words in self._words]  # a read is half of numpy's

    def address(self, channel: int) -> int:
        """For the kernels."""
        return int(self._records[channel].data_ptr())

    def check(self, channel: int) -> None:
        """Raise what was noted."""
        if not self._states[channel][0]:
            return
        missing = tuple(int(rank) for rank in self._words[channel, 2:].nonzero()[0])
        if not missing:
            peers = tuple(self._group.peers)
            raise TransportTimeout("a peer has given this channel up, having waited too long", peers)
        text = f"rank {', '.join(map(str, missing))} did not arrive in time in exchange {self._words[channel, 1]}"
        raise TransportTimeout(text, missing)

    @property
    def any(self) -> bool:
        """Whether there is something, on any channel."""
        return bool(self._words[:, 0].any())


class DevicePut:
    """The exchange of a peer-memory transport, by kernels."""

    def __init__(self, group: Group, shape: MergeShape, buffers: PeerBuffers, kernels: Kernels) -> None:
        self._group, self._kernels = group, kernels
        n, self._capacity = group.size, block_capacity(shape, group.size)
        self._channel_bytes = _channel_bytes(shape, n)
        private = shape.channels * self._channel_bytes
        with torch.inference_mode(False):
            step, state_bytes = _private_bytes(n), aligned(ctypes.sizeof(ChannelState))
            self._states = [buffers.own.data_ptr() + private + channel * step for channel in range(shape.channels)]
            for channel in range(shape.channels):
                at = private + channel * step + state_bytes
                addresses = [peer.data_ptr() + channel * self._channel_bytes for peer in buffers.peers]
                buffers.own[at : at + 8 * n].copy_(torch.tensor(addresses, dtype=torch.int64).view(torch.uint8))
        # Zeroes and addresses are there before a peer or a kernel looks.
        torch.cuda.current_stream(buffers.own.device).synchronize()
        self._absences = Absences(group, shape.channels)
        self._state_bytes, self._buffers = state_bytes, buffers
        self._launches: dict[tuple[int, ...], tuple[Launch, Launch, TakeParams]] = {}

    def exchange(self, send: torch.Tensor, channel: int, recv: torch.Tensor) -> torch.Tensor:
        """Put `send [N, 1 + R, W]` and take the peers' rows into `recv`, on the current stream.

        Raises:
            TransportTimeout: an earlier exchange of this channel did not end in time, or a peer gave the channel up.
        """
        self.check(channel)
        put, take, params = self._bound(send, channel, recv)
        limit = self._group.exchange_timeout_s
        params.deadline_ns = 0 if limit is None else int(limit * 1e9)
        stream = topology.current_stream(self._buffers.own.device)
        put(stream)
        take(stream)
        return recv

    def cancel(self, send: torch.Tensor, channel: int) -> None:
        """Never called: on a GPU a call is called off by blocks of the length that the peers await."""
        raise TypeError("DevicePut sends whole blocks alone")

    def check(self, channel: int) -> None:
        """Raise what the kernels have noted; no wait for the device."""
        self._absences.check(channel)

    @property
    def given_up(self) -> bool:
        """Whether an exchange did not end in time: a peer may still store to this rank's memory."""
        return self._absences.any

    def _bound(self, send: torch.Tensor, channel: int, recv: torch.Tensor) -> tuple[Launch, Launch, TakeParams]:
        n, rows, width = send.shape
        key = (channel, send.data_ptr(), rows, width, recv.data_ptr(), recv.stride(0))
        found = self._launches.get(key)
        if found is None:
            if len(self._launches) >= _LAUNCHES_KEPT:
                self._launches.clear()
            rank, nbytes = self._group.rank, rows * width
            slot_bytes = n * self._capacity
            flags, poison = _SLOTS * slot_bytes, _SLOTS * (slot_bytes + n * ALIGNMENT)
            state = self._states[channel]
            where = {"peers": state + self._state_bytes, "state": state, "record": self._absences.address(channel)}
            layout = {
                "slot_stride": slot_bytes, "block_capacity": self._capacity,
                "flags_offset": flags, "poison_offset": poison, "ranks": n, "rank": rank,
            }  # fmt: skip
            put = PutParams(send=send.data_ptr(), send_stride=send.stride(0), nbytes=nbytes, **where, **layout)
            take = TakeParams(
                send=send.data_ptr(), send_stride=send.stride(0), recv=recv.data_ptr(), recv_stride=recv.stride(0),
                nbytes=nbytes, header_bytes=width, **where, **layout,
            )  # fmt: skip
            bind = self._kernels
            found = self._launches[key] = bind.bind_put(put), bind.bind_take(take), take
        return found
