"""Who takes part in a benchmark: threads of one process over one GPU, or processes with a GPU each."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist

from dcpcomm.bench.peers import Peers
from dcpcomm.errors import TransportTimeout

__all__ = ["Meeting", "ProcessRanks", "Ranks", "ThreadRanks"]

_PATIENCE_S = 120.0


class Ranks(ABC):
    """This rank among the others.

    Attributes:
        rank, size: its place, and how many there are.
        on_this_gpu: how many of them share its GPU.
    """

    rank: int
    size: int
    on_this_gpu: int

    @abstractmethod
    def meet(self) -> None:
        """Return when all ranks have come. On the host only."""

    @abstractmethod
    def gather(self, what: Any) -> list[Any]:
        """What every rank brought, by rank."""

    @abstractmethod
    def share(self, nbytes: int, device: torch.device) -> Peers:
        """Zeroed device memory of this rank, and every rank's, as this one addresses it. Collective."""


class Meeting:
    """Where N threads of one process meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_PATIENCE_S)
        self.table: list[Any] = [None] * size


class ThreadRanks(Ranks):
    """A virtual rank: a thread with a stream of its own, all on one GPU (`dcpcomm.testing.LoopbackWorld`)."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size, self.on_this_gpu = meeting, rank, meeting.size, meeting.size

    def meet(self) -> None:
        try:
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError:
            others = tuple(rank for rank in range(self.size) if rank != self.rank)
            raise TransportTimeout("another rank has failed, or did not come in time", others) from None

    def abort(self) -> None:
        """Have the others raise instead of waiting for this rank, which has failed."""
        self._meeting.barrier.abort()

    def gather(self, what: Any) -> list[Any]:
        self._meeting.table[self.rank] = what
        self.meet()
        everybody = list(self._meeting.table)
        self.meet()
        return everybody

    def share(self, nbytes: int, device: torch.device) -> Peers:
        own = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        torch.cuda.current_stream(device).synchronize()
        everybody = self.gather(own)
        return Peers(self.rank, own, tuple(one.data_ptr() for one in everybody), self.meet, everybody)


class ProcessRanks(Ranks):
    """A process with a GPU of its own, in the default process group, which speaks Gloo."""

    def __init__(self) -> None:
        self.rank, self.size, self.on_this_gpu = dist.get_rank(), dist.get_world_size(), 1
        self._nccl: Any = None

    def meet(self) -> None:
        dist.barrier()

    def gather(self, what: Any) -> list[Any]:
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, what)
        return everybody

    def share(self, nbytes: int, device: torch.device) -> Peers:
        return Peers.over_ipc(self.rank, nbytes, device, self.gather, self.meet)

    def nccl(self) -> Any:
        """A group of the same processes that speaks NCCL, made once. Collective."""
        if self._nccl is None:
            self._nccl = dist.new_group(backend="nccl")
        return self._nccl
