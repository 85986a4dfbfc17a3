"""A world of N virtual ranks in one process: threads that share a store and a post office. Public, for users' own
tests.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from dcpcomm.launch import RankFailed, failure_of

__all__ = ["LoopbackRank", "LoopbackWorld"]


class LoopbackRank:
    """What a virtual rank passes as `group`.

    Attributes:
        rank, size: its place, and how many there are.
        world: the world it belongs to.
        loopback_store: the store that the ranks meet at.
    """

    def __init__(self, world: LoopbackWorld, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self.loopback_store = world.store


class LoopbackWorld:
    """N virtual ranks.

    Example:
        def step(group):
            with dcpcomm.DCPMerger(group, shape) as merger:
                return merger.merge(partial_out[group.rank], partial_lse[group.rank])

        results = LoopbackWorld(4).run(step)      # by rank
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size={size}; expected at least 1 rank")
        self.size = size
        self.store = dist.HashStore()
        self.groups = [LoopbackRank(self, rank) for rank in range(size)]
        self._offices: dict[str, Office] = {}
        self._lock = threading.Lock()

    def mail(self, key: str) -> Office:
        """The queues of one merger, by (channel, source, destination)."""
        with self._lock:
            if key not in self._offices:
                self._offices[key] = Office()
            return self._offices[key]

    def leave(self, key: str, rank: int) -> None:
        """A rank has closed its merger; when all have, its queues go."""
        with self._lock:
            office = self._offices.get(key)
            if office is not None:
                office.left.add(rank)
                if len(office.left) == self.size:
                    del self._offices[key]

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """`fn(group, *args)` on every rank at once, each in a thread; the results by rank.

        Raises:
            dcpcomm.launch.RankFailed: a rank raised, or did not return within `timeout_s`; `cause` is the error.
        """
        results: list[Any] = [None] * self.size
        errors: dict[int, tuple[BaseException, str]] = {}

        def body(rank: int) -> None:
            try:
                results[rank] = fn(self.groups[rank], *args)
            except BaseException as error:
                errors[rank] = (error, traceback.format_exc())

        threads = [
            threading.Thread(target=body, args=(rank,), daemon=True, name=f"rank {rank}") for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = tuple(rank for rank, thread in enumerate(threads) if thread.is_alive())
        if late:
            raise RankFailed(f"rank {', '.join(map(str, late))} did not return within {timeout_s:g} s", late)
        if errors:
            raise failure_of(dict(errors), getattr(fn, "__qualname__", repr(fn)))
        return results


class Office(defaultdict[tuple[int, int, int], "queue.SimpleQueue[Any]"]):
    """Queues of one merger by (channel, source, destination), one per key also when two threads ask at once.

    Attributes:
        left: ranks that have closed their merger.
        memory: by rank, what it offers to its peers (the peer family).
        poison: channel -> the rank that ran into its deadline there first, and what it said.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self.memory: dict[int, Any] = {}
        self.left: set[int] = set()
        self.poison: dict[int, tuple[int, str]] = {}
        self._lock = threading.Lock()

    def __missing__(self, key: tuple[int, int, int]) -> queue.SimpleQueue[Any]:
        with self._lock:
            if key not in self:
                self[key] = queue.SimpleQueue()
            return self[key]
