"""`gloo_a2a`: rows over TCP by torch.distributed's Gloo. Any CPU, any number of hosts.

One all-to-all with split sizes per exchange. Each rank sends what it has and leaves room for the largest message that
may come, so ranks that disagree about B read each other's header and say so, where equal splits would end the process.
"""

from __future__ import annotations

import ctypes
import re
import secrets
import time
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from dcpcomm.errors import TransportTimeout
from dcpcomm.topology import Facts
from dcpcomm.transport import Capabilities, MergeTransport, Verdict
from dcpcomm.workspace import block_capacity

__all__ = ["GlooA2A"]

_NO_DEADLINE_S = 365 * 86400.0


class GlooA2A(MergeTransport):
    """All-to-all over Gloo process groups of its own, so that nothing of the caller's can get in between."""

    name: ClassVar[str] = "gloo_a2a"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cpu",), multi_host=True, ragged=True, proven_on=("cpu",)
    )

    _lines: tuple[_Line, ...] = ()
    #: Exchanges that an interrupt left under way: they may still write where rows arrive.
    _abandoned: ClassVar[list[Any]] = []

    @classmethod
    def check(cls, facts: Facts) -> Verdict:
        if not dist.is_available() or not dist.is_gloo_available():
            return Verdict(False, "this build of torch has no Gloo", "install a torch built with USE_GLOO=1")
        return Verdict(True)

    def prepare(self) -> bytes:
        return b""

    def connect(self, peers: list[bytes]) -> None:
        self._await_abandoned()
        rank, size = self.group.rank, self.group.size
        limit, capacity = timedelta(seconds=self.group.timeout_s), block_capacity(self.shape, size)
        # Gloo closes all connections of a process group when one exchange runs into its deadline: one group per
        # channel.
        stores = [self.group.store(f"gloo/{channel}") for channel in range(self.shape.channels)]
        self._lines = tuple(
            _Line(dist.ProcessGroupGloo(store, rank, size, limit), rank, size, capacity) for store in stores
        )

    def exchange(self, send: torch.Tensor, channel: int, recv: torch.Tensor | None = None) -> torch.Tensor:
        assert recv is not None
        line = self._lines[channel]
        line.finish()  # what the peers sent for a call that was called off here
        line.begin(send, recv, self.group.exchange_timeout_s)
        line.finish()
        return recv

    def cancel(self, send: torch.Tensor, channel: int) -> None:
        line = self._lines[channel]
        line.finish()
        dropped = torch.empty((self.group.size, line.capacity), dtype=torch.uint8)
        line.begin(send.clone(), dropped, self.group.exchange_timeout_s, dropped=True)

    def close(self) -> None:
        for line in self._lines:
            self._abandoned.extend(line.close())
        self._lines = ()

    def _await_abandoned(self) -> None:
        deadline = time.monotonic() + self.group.timeout_s
        while self._abandoned:
            if self._abandoned[-1].is_completed():
                self._abandoned.pop()
            elif time.monotonic() > deadline:
                raise TransportTimeout("an exchange that was interrupted hasn't ended: its rows may still arrive")
            else:
                time.sleep(0.001)


class _Exchange(NamedTuple):
    """One that is under way.

    Attributes:
        work: Gloo's.
        limit_s: how long it may take.
        heads: the first word of each block to receive.
        dropped: whether what comes is wanted by nobody.
    """

    work: Any
    limit_s: float
    heads: np.ndarray
    dropped: bool


class _Line:
    """One channel's process group, with at most one exchange under way.

    Args:
        capacity: bytes from one block to receive to the next, room for the largest.
    """

    def __init__(self, gloo: Any, rank: int, size: int, capacity: int) -> None:
        self.capacity = capacity
        self._gloo, self._rank, self._size = gloo, rank, size
        self._under_way: _Exchange | None = None
        self._room: tuple[int, torch.Tensor, np.ndarray] | None = None
        # Marks the begin of a block that hasn't come: Gloo doesn't say who is missing.
        self._absent = secrets.randbits(63)

    def begin(self, send: torch.Tensor, recv: torch.Tensor, limit_s: float | None, dropped: bool = False) -> None:
        """Post `send [N, 1 + R, W]`, and room in `recv` for `capacity` bytes of each rank."""
        rank, size, room, mine = self._rank, self._size, self.capacity, send[0].numel()
        _, whole, heads = self._room_of(recv)
        heads[:] = self._absent
        # A rank's own block isn't wanted. At either end it is left out; in the middle Gloo copies it, to the end of its
        # place, so that the blocks behind it arrive at multiples of the capacity like the others.
        first, last = int(rank == 0), size - int(rank == size - 1)
        own = mine if last - first == size else 0
        sizes, rooms = [mine] * size, [room] * size
        sizes[rank] = rooms[rank] = own
        if own:
            rooms[rank - 1] += room - own
        outgoing, incoming = send.view(-1)[first * mine : last * mine], whole[first * room : last * room]
        limit = _NO_DEADLINE_S if limit_s is None else limit_s
        try:
            work = self._gloo.alltoall_base(incoming, outgoing, rooms, sizes, timeout=timedelta(seconds=limit))
        except RuntimeError as error:
            raise self._gone(error, heads) from error
        self._under_way = _Exchange(work, limit, heads, dropped)
        if dropped:
            self._immortal(True)  # perhaps nobody will come for it before this process ends

    def finish(self) -> None:
        """Wait for the exchange under way, if there is one."""
        if self._under_way is None:
            return
        work, limit, heads, dropped = self._under_way
        try:
            work.wait()
        except RuntimeError as error:
            if "imed out" not in str(error):
                raise self._gone(error, heads) from error
            missing = self._missing(heads)
            text = f"rank {', '.join(map(str, missing))} did not arrive within {limit:g} s"
            raise TransportTimeout(text, missing) from error
        finally:
            if work.is_completed():
                self._under_way = None
                if dropped:
                    self._immortal(False)

    def close(self) -> list[Any]:
        """Let go of the group.

        Returns:
            what is under way and may still write to the caller's memory.
        """
        exchange, self._under_way, self._room = self._under_way, None, None
        interrupted = exchange is not None and not exchange.dropped and not exchange.work.is_completed()
        if interrupted:
            self._immortal(True)
        self._gloo = None
        return [exchange.work] if exchange is not None and interrupted else []

    def _immortal(self, yes: bool) -> None:
        """Keep the group's destructor from ever running, or not any more: it would wait for what is under way."""
        count = ctypes.pythonapi.Py_IncRef if yes else ctypes.pythonapi.Py_DecRef
        count(ctypes.py_object(self._gloo))

    def _room_of(self, recv: torch.Tensor) -> tuple[int, torch.Tensor, np.ndarray]:
        """Where `recv` begins, all the memory of its blocks, flat, and its blocks' first words. Those of the last call
        are kept: as a rule it is always the same.
        """
        if self._room is None or self._room[0] != recv.data_ptr():
            with torch.inference_mode(False):
                whole = recv.as_strided((self._size * self.capacity,), (1,))
                heads = whole.view(self._size, self.capacity)[:, :8].view(torch.int64).numpy()[:, 0]
            self._room = recv.data_ptr(), whole, heads
        return self._room

    def _missing(self, heads: np.ndarray) -> tuple[int, ...]:
        peers = [rank for rank in range(self._size) if rank != self._rank]
        missing = tuple(rank for rank in peers if heads[rank] == self._absent)
        return missing or tuple(peers)  # all began to send, and at least one of them stopped

    def _gone(self, error: Exception, heads: np.ndarray) -> TransportTimeout:
        missing = self._missing(heads)
        said = re.sub(r"^\[.*?\] *", "", str(error).splitlines()[0])  # without the place in Gloo's source
        return TransportTimeout(f"the connection to rank {', '.join(map(str, missing))} is gone ({said})", missing)
