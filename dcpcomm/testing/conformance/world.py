"""Where a case's ranks live: threads of this process, or processes of this machine; the rank functions are the same."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from dcpcomm.launch import LocalRanks
from dcpcomm.registry import register_transport, registered_transports
from dcpcomm.testing.conformance.case import Case
from dcpcomm.testing.conformance.rank import Answer, Rank, answer
from dcpcomm.testing.conformance.scene import Scene
from dcpcomm.testing.loopback import LoopbackRank, LoopbackWorld

__all__ = ["CASE_LIMIT_S", "Processes", "Threads", "World"]

#: For one case on one group size; a rank that hasn't answered by then hangs.
CASE_LIMIT_S = 45.0
_MEET_LIMIT_S = 30.0


class World:
    """Runs cases; `run` gives the ranks' answers by group rank.

    Raises:
        dcpcomm.launch.RankFailed: a rank hung or died.
    """

    def run(self, case: Case, scene: Scene) -> list[Answer]:
        raise NotImplementedError

    def close(self) -> None:
        """End what was started. Safe twice."""


class Threads(World):
    """Ranks are threads; every case has a `LoopbackWorld` of its own."""

    def run(self, case: Case, scene: Scene) -> list[Answer]:
        barrier = threading.Barrier(scene.n)
        world = LoopbackWorld(scene.n, scene.device)
        order = _order(case, scene.n)

        def body(group: LoopbackRank) -> Answer:
            torch.set_num_threads(1)  # counts by thread; or torch's own threads fight the ranks for the cores
            mine = world.groups[order.index(group.rank)]
            return answer(case, Rank(scene, mine, mine.rank, lambda: _pass(barrier)))

        with _quiet():
            answers = world.run(body, timeout_s=CASE_LIMIT_S)
        return [answers[member] for member in order]


class Processes(World):
    """Ranks are processes, started when first needed, and anew after a case that hung.

    Args:
        size: of the largest group.
        target: (name, dotted path) of a transport that the processes must register themselves; None where an entry
            point does that.
    """

    def __init__(self, size: int, target: tuple[str, str] | None) -> None:
        self._size, self._target = size, target
        self._ranks: LocalRanks | None = None
        self._meetings = itertools.count()

    def run(self, case: Case, scene: Scene) -> list[Answer]:
        if self._ranks is None or not self._ranks.alive:
            self.close()
            self._ranks = LocalRanks(self._size)
        order = _order(case, scene.n)
        meeting = f"conformance/{next(self._meetings)}"
        answers = self._ranks.run(_on_rank, case, scene, order, meeting, self._target, timeout_s=CASE_LIMIT_S)
        return [answers[member] for member in order]

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


def _order(case: Case, n: int) -> list[int]:
    """Global ranks by group rank."""
    return [n - 1, *range(n - 1)] if case.reordered else list(range(n))


def _on_rank(case: Case, scene: Scene, order: list[int], meeting: str, target: tuple[str, str] | None) -> Any:
    if target is not None and target[0] not in registered_transports():
        register_transport(*target)
    # A group of its own for each case: one that failed may have left its bookkeeping uneven between ranks.
    more: dict[str, Any] = {}
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        more["sort_ranks"] = False
    group = dist.new_group(order, **more)
    if dist.get_rank() not in order:
        return None
    at = Rank(scene, group, order.index(dist.get_rank()), _StoreMeeting(meeting, scene.n))
    with _quiet():
        got = answer(case, at)
    with contextlib.suppress(RuntimeError):  # of a failed case's group
        dist.destroy_process_group(group)
    return got


class _StoreMeeting:
    """A barrier over the processes' store, so that it works whatever state groups are in."""

    def __init__(self, name: str, size: int) -> None:
        self._store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self._size, self._round = size, 0

    def __call__(self) -> None:
        key = f"{self._round}"
        self._round += 1
        self._store.add(key, 1)
        deadline = time.monotonic() + _MEET_LIMIT_S
        # Polled instead of `store.wait`, which holds the connection and with it the merger's own steps.
        while self._store.add(key, 0) < self._size:
            if time.monotonic() > deadline:
                raise TimeoutError("the other ranks of this case did not come to its meeting point")
            time.sleep(0.002)


def _pass(barrier: threading.Barrier) -> None:
    try:
        barrier.wait(_MEET_LIMIT_S)
    except threading.BrokenBarrierError:
        raise TimeoutError("the other ranks of this case did not come to its meeting point") from None


@contextlib.contextmanager
def _quiet() -> Any:
    """Keep the warnings that cases provoke on purpose (chunks) from standard error, unless somebody listens."""
    handler, logger = logging.NullHandler(), logging.getLogger("dcpcomm")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
