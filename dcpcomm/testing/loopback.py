"""A world of N virtual ranks in one process: threads that share a store and a post office. Public, for users' own
tests.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dcpcomm.launch import RankFailed, failure_of

__all__ = ["LoopbackRank", "LoopbackWorld", "provided_stream", "side_by_side"]


def side_by_side() -> None:
    """Let kernels of one rank wait for another's on one GPU, if CUDA hasn't started yet (`torch.cuda.is_available`
    starts it).

    Each stream gets a queue of the GPU of its own, as what is waited for must not stand behind who waits. And kernels
    are loaded when CUDA starts: one that is loaded at its first launch waits, on the device, for all that run there.
    """
    if torch.version.cuda and not torch.cuda.is_initialized():
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def provided_stream() -> torch.cuda.Stream:
    """A stream of the current device for which torch's allocator holds some memory.

    To get more from the driver waits for the device, and so for kernels of other ranks that wait for this one's.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.inference_mode(False):
        held = [torch.empty(1 << 26, dtype=torch.uint8, device=stream.device)]
        held += [torch.empty(1 << 19, dtype=torch.uint8, device=stream.device) for _ in range(32)]
        del held
    return stream


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
    """N virtual ranks. Where there is a GPU, each has a stream of its own on the device that is current when the world
    is made, and some of that device's memory held for it.

    Args:
        size: N.
        device: "cpu" where the ranks merge on CPU and the GPU is to be left alone.

    Example:
        def step(group):
            with dcpcomm.DCPMerger(group, shape) as merger:
                return merger.merge(partial_out[group.rank], partial_lse[group.rank])

        results = LoopbackWorld(4).run(step)      # by rank
    """

    def __init__(self, size: int, device: str | None = None) -> None:
        if size < 1:
            raise ValueError(f"size={size}; expected at least 1 rank")
        self.size = size
        self._streams: list[torch.cuda.Stream] = []
        if device != "cpu":
            side_by_side()
            if torch.cuda.is_available():
                self._streams = [provided_stream() for _ in range(size)]
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
                with self._on_stream(rank):
                    results[rank] = fn(self.groups[rank], *args)
            except BaseException as error:
                errors[rank] = (error, traceback.format_exc())

        self._join_streams(before=True)
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
        self._join_streams(before=False)
        if errors:
            raise failure_of(dict(errors), getattr(fn, "__qualname__", repr(fn)))
        return results

    def _on_stream(self, rank: int) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[rank]) if self._streams else contextlib.nullcontext()

    def _join_streams(self, before: bool) -> None:
        """What the caller did comes before what the ranks do, and what they did before what the caller does."""
        for stream in self._streams:
            outer = torch.cuda.current_stream(stream.device)
            first, then = (outer, stream) if before else (stream, outer)
            then.wait_stream(first)


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
