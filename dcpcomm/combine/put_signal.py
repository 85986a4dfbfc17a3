"""The exchange of a transport whose library puts one-sidedly: a put with a signal for each peer, all on the stream.

A captured put goes to the same address and adds the same number at every replay. So:

* signals are *counts*, which peers add 1 to, and what they must have reached is counted in device memory;
* there is one slot for each source, and nobody puts to it again before its owner has given a *credit* for the last
  call: it has copied the rows out.

docs/transports/nvshmem_put.md has the protocol, and why a slot isn't overwritten.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from dcpcomm import topology
from dcpcomm.combine.absences import Absences, deadline_of
from dcpcomm.combine.driver import Launch
from dcpcomm.combine.kernels import Kernels
from dcpcomm.combine.structs import AwaitParams, MoveParams
from dcpcomm.group import Group
from dcpcomm.transport import MergeShape
from dcpcomm.workspace import aligned, block_capacity

__all__ = ["PutLibrary", "PutPlaces", "PutSignal", "put_bytes", "put_places"]

_EXCHANGES_KEPT = 1024
_WORD = 8


class PutLibrary(Protocol):
    """What puts. Addresses are of this rank's symmetric memory, and mean the same place in the other's."""

    def put(self, to: int, source: int, nbytes: int, signal: int, pe: int, stream: int) -> None:
        """`nbytes` from `source` here to `to` there; when they are there, 1 is added to the word `signal` there."""

    def settle(self, signal: int, stream: int) -> None:
        """What came with signals that were seen is seen from here on, whatever way it came."""


class PutPlaces(NamedTuple):
    """Where things lie in one channel's memory on one rank, in bytes.

    Attributes:
        capacity: of a block. Those received begin at 0, by source; those to send at `staging`, by destination.
        rows, credits: words by rank, which peers add to.
        status: words by rank, which peers put behind each call: 0, or that one has given the channel up, and why.
        counts: two words of this rank alone: calls awaited, and credits; behind them its state.
        total: bytes of the channel.
    """

    capacity: int
    staging: int
    rows: int
    credits: int
    status: int
    counts: int
    total: int


def put_places(shape: MergeShape, world_size: int) -> PutPlaces:
    """The layout of every channel of `shape`."""
    capacity, words = block_capacity(shape, world_size), aligned(_WORD * world_size)
    staging = world_size * capacity
    rows = 2 * staging
    counts = rows + 3 * words
    return PutPlaces(capacity, staging, rows, rows + words, rows + 2 * words, counts, counts + aligned(3 * _WORD))


def put_bytes(shape: MergeShape, world_size: int) -> int:
    """Bytes of symmetric memory on each rank."""
    return shape.channels * put_places(shape, world_size).total


class PutSignal:
    """Exchanges packed blocks by puts.

    Args:
        own: uint8 `[put_bytes]`, this rank's symmetric memory. All of it is 0 on every rank before anybody puts.
        pes: by rank of the group, what the library calls it.
        settles: whether what comes may come by another way than a GPU's own stores.

    Raises:
        KernelsUnavailable, DCPCommError: the kernels can't be compiled here.
    """

    def __init__(
        self, group: Group, shape: MergeShape, own: torch.Tensor, library: PutLibrary, kernels: Kernels,
        pes: list[int], *, settles: bool,
    ) -> None:  # fmt: skip
        self.group, self.shape, self.device = group, shape, own.device
        self.library, self.kernels, self.pes, self.settles = library, kernels, pes, settles
        self.places = put_places(shape, group.size)
        self._own = own  # kept: nobody else may
        self._absences = Absences(group, shape.channels)
        #: Raise what the kernels have noted on a channel of ranks that did not come; no wait for the device.
        self.poll = self._absences.check
        self._exchanges: dict[tuple[Any, ...], _Exchange] = {}
        kernels.load_signals()

    def exchange(self, send: torch.Tensor, channel: int, recv: torch.Tensor) -> torch.Tensor:
        """As `MergeTransport.exchange` of layout "packed", on the current stream. Of a rank that doesn't come in time
        the header in `recv` is of no call.
        """
        key = channel, send.data_ptr(), recv.data_ptr(), send.shape, send.stride(), recv.stride()
        found = self._exchanges.get(key)
        if found is None:
            if len(self._exchanges) >= _EXCHANGES_KEPT:
                self._exchanges.clear()
            found = self._exchanges[key] = _Exchange(self, send, channel, recv)
        found.make()
        return recv

    def base(self, channel: int) -> int:
        """The address of the channel's memory."""
        return self._own.data_ptr() + channel * self.places.total

    def absence_record(self, channel: int) -> int:
        """The address of what the kernels write where a rank doesn't come."""
        return self._absences.address(channel)

    @property
    def given_up(self) -> bool:
        """Whether a call did not end in time: a peer may still put to this rank's memory."""
        return self._absences.any


class _Exchange:
    """One pair of buffers' exchanges: launches and puts with all they take, made once."""

    def __init__(self, over: PutSignal, send: torch.Tensor, channel: int, recv: torch.Tensor) -> None:
        self._over, self._library = over, over.library
        places, rank, base = over.places, over.group.rank, over.base(channel)
        nbytes = send.shape[1] * send.shape[2]
        counts, state = base + places.counts, base + places.counts + 2 * _WORD
        record = over.absence_record(channel)

        def waiting(words: int, index: int, first: int) -> AwaitParams:
            return AwaitParams(
                words=base + words, count=counts + index * _WORD, state=state, record=record,
                status=base + places.status, first=first, ranks=over.group.size, rank=rank,
            )  # fmt: skip

        def moving(source: int, source_stride: int, to: int, to_stride: int) -> Launch:
            params = MoveParams(
                from_=source, to=to, from_stride=source_stride, to_stride=to_stride, count=counts, state=state,
                record=record, vectors=nbytes // 16, rank=rank,
            )  # fmt: skip
            return over.kernels.bind_move(params)

        staging = base + places.staging
        self._awaited = waiting(places.credits, 1, 0), waiting(places.rows, 0, 1)
        self._await_credits, self._await_rows = (over.kernels.bind_await(one) for one in self._awaited)
        self._stage = moving(send.data_ptr(), send.stride(0), staging, places.capacity)
        self._take = moving(base, places.capacity, recv.data_ptr(), recv.stride(0))
        self._credit, self._mine = base + places.credits + rank * _WORD, base + places.rows + rank * _WORD
        self._status = base + places.status + rank * _WORD
        self._slot = base + rank * places.capacity
        self._puts = [(staging + peer * places.capacity, nbytes, over.pes[peer]) for peer in over.group.peers]

    def make(self) -> None:
        """On the current stream; the host waits for nothing."""
        over, library = self._over, self._library
        stream, deadline = topology.current_stream(over.device), deadline_of(over.group.exchange_timeout_s)
        for params in self._awaited:
            params.deadline = deadline
        self._await_credits(stream)
        self._stage(stream)
        for source, nbytes, pe in self._puts:
            library.put(self._slot, source, nbytes, self._mine, pe, stream)
        self._await_rows(stream)
        if over.settles:
            library.settle(self._mine, stream)
        self._take(stream)
        for _, _, pe in self._puts:
            library.put(self._status, self._status, _WORD, self._credit, pe, stream)
