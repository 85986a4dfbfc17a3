"""Ranks for tests: the same rank function on N processes (Gloo) or on N threads (loopback).

A rank function is `fn(group, *args)`, at module level so that a process can find it by name. The processes
live for the whole session; a test that may leave a group's bookkeeping uneven between ranks asks for a fresh
subgroup (`fresh=True`), and a run that fails unexpectedly costs the pool, so that one failure stays one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import dcpcomm
from dcpcomm.launch import LocalRanks

POOL_SIZE = 4
RUN_TIMEOUT_S = 90.0
MEET_TIMEOUT_S = 45.0
#: "At once", on a machine that has other things to do as well. Who waits for a rank waits longer: see `config_for`.
AT_ONCE_S = 10.0
THREADS = ("loopback", "loopback_peer")
ABSENT = "not a member of this group"

_groups: dict[int, Any] = {}
_here = threading.local()
_meetings = itertools.count()


# ---------------------------------------------------------------- what a rank function may call


def rank_of(group: Any) -> int:
    return group.rank() if isinstance(group, dist.ProcessGroup) else group.rank


def size_of(group: Any) -> int:
    return group.size() if isinstance(group, dist.ProcessGroup) else group.size


def config_for(group: Any, **changes: Any) -> dict[str, Any]:
    """A configuration that names the transport under test. 15 s: far above what a right call takes."""
    backend = getattr(_here, "backend", "gloo_a2a" if isinstance(group, dist.ProcessGroup) else "loopback")
    return {"transport": backend, "verify": {"level": "quick"}, "watchdog": {"timeout_s": 15}, **changes}


def shape_of(n: int, **changes: Any) -> dcpcomm.MergeShape:
    """A small shape; every test states what matters to it."""
    given = {"max_tokens": 32, "num_heads": 4 * n, "head_dim": 32, "dtype": torch.bfloat16, "lse_base": "e"}
    return dcpcomm.MergeShape(**{**given, **changes})


def merger_for(group: Any, shape: dict[str, Any] | None = None, **config: Any) -> dcpcomm.DCPMerger:
    return dcpcomm.DCPMerger(
        group, shape_of(size_of(group), **(shape or {})), config=config_for(group, **config), device="cpu"
    )


def meet() -> None:
    """Wait for every rank of this run, over neither the group nor the transport under test."""
    _here.meet()


def dawdle(rng: random.Random, most_s: float = 0.002) -> None:
    """A short random delay, to shake the order in which ranks arrive."""
    time.sleep(rng.random() * most_s)


@dataclass(frozen=True)
class Raised:
    """What a call raised, in a form that any process can read."""

    kinds: tuple[str, ...]
    text: str
    ranks: tuple[int, ...]
    seconds: float
    trace: str

    def names(self, *words: object) -> bool:
        """Whether each word stands in the message as a word of its own, so that "1" is not found in "15"."""
        import re

        return all(re.search(rf"(?<![\w.]){re.escape(str(w))}(?!\w|\.\d)", self.text) for w in words)


def outcome(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `call` returned, or `Raised`."""
    start = time.monotonic()
    try:
        return call(*args, **kwargs)
    except Exception as error:
        kinds = tuple(c.__name__ for c in type(error).__mro__)
        ranks = tuple(getattr(error, "ranks", ()))
        return Raised(kinds, str(error), ranks, time.monotonic() - start, traceback.format_exc())


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Run the calls in one thread each; their results in order. What one raises, this raises."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def body(i: int) -> None:
        try:
            results[i] = calls[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + RUN_TIMEOUT_S - 5
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    stuck = [i for i, thread in enumerate(threads) if thread.is_alive()]
    assert not stuck, f"threads {stuck} of a rank are stuck: the calls wait for each other"
    return results


# ---------------------------------------------------------------- who runs it


class ProcessPool:
    """Four processes for the session, a subgroup for each size made in them. Started when first needed."""

    def __init__(self) -> None:
        self._ranks: LocalRanks | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = RUN_TIMEOUT_S) -> list[Any]:
        if self._ranks is None or not self._ranks.alive:
            self.close()
            self._ranks = LocalRanks(POOL_SIZE)
            self._ranks.run(_make_groups)
        try:
            return self._ranks.run(fn, *args, timeout_s=timeout_s)
        except BaseException:
            self.close()  # ranks may now disagree about anything: the next test gets new ones
            raise

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


class World:
    """N ranks of one backend."""

    def __init__(self, backend: str, n: int, pool: ProcessPool) -> None:
        self.backend, self.n, self.pool = backend, n, pool

    def __repr__(self) -> str:
        return f"{self.backend} x {self.n}"

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float = RUN_TIMEOUT_S, fresh: bool = False
    ) -> list[Any]:
        """`fn(group, *args)` on each of the N ranks at once; the results by group rank."""
        if self.backend in THREADS:
            return _run_in_threads(self.backend, self.n, fn, args, timeout_s)
        place = next(_meetings), self.backend, self.n, fresh
        results = self.pool.run(_in_process, *place, fn, args, timeout_s=timeout_s)
        return results[: self.n]

    def run_counting_warnings(self, fn: Callable[..., Any], *args: Any) -> tuple[list[Any], list[str]]:
        """As `run`; and every warning, by `warnings` or by a dcpcomm logger, that any rank gave meanwhile."""
        if self.backend in THREADS:
            with listening() as heard:
                return self.run(fn, *args), heard
        pairs = self.run(_listening_rank, fn, *args)
        return [result for result, _ in pairs], [text for _, heard in pairs for text in heard]


def _run_in_threads(backend: str, n: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
    from dcpcomm.testing import LoopbackWorld

    barrier = threading.Barrier(n)

    def body(group: Any, *given: Any) -> Any:
        _here.meet = lambda: barrier.wait(MEET_TIMEOUT_S)
        _here.backend = backend
        return fn(group, *given)

    return LoopbackWorld(n).run(body, *args, timeout_s=timeout_s)


def _make_groups() -> None:
    for n in range(1, POOL_SIZE + 1):
        _groups[n] = dist.new_group(list(range(n)))


def _in_process(meeting: int, backend: str, n: int, fresh: bool, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    group = dist.new_group(list(range(n))) if fresh else _groups[n]
    if dist.get_rank() >= n:
        return ABSENT
    _here.meet, _here.backend = StoreMeeting(f"test/{meeting}", n), backend
    return fn(group, *args)


class StoreMeeting:
    """A barrier over the ranks' store: it works whatever state the process groups are in."""

    def __init__(self, name: str, size: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        self.store, self.name, self.size, self.round = store, name, size, 0

    def __call__(self) -> None:
        key = f"{self.name}/{self.round}"
        self.round += 1
        if self.store.add(key, 1) == self.size:
            self.store.set(key + "/all", b"1")
        self.store.wait([key + "/all"], timedelta(seconds=MEET_TIMEOUT_S))


def _listening_rank(group: Any, fn: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    with listening() as heard:
        return fn(group, *args), heard


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """Collect what comes by `warnings` and WARNING records of the "dcpcomm" loggers, from all threads."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dcpcomm")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield heard
        heard += [str(w.message) for w in caught]
    finally:
        logger.removeHandler(handler)
