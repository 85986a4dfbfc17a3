"""How the processes of `LocalRanks` begin and end: one imports torch, and forks all ranks from itself."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import NoReturn

import numpy as np

__all__ = ["CAN_FORK", "die_with", "exists", "forked", "interrupts_ignored", "leave", "no_main_reimport"]

#: Elsewhere a process that has imported torch isn't safe to fork, and can't be told to end with the one that forked it.
CAN_FORK = sys.platform == "linux"


def forked(pipes: dict[int, Connection]) -> dict[int, Connection]:
    """Fork a process for each rank, and tell the parent how each ended.

    Returns:
        in a rank: itself alone; in the starter: nobody, when all have ended.
    """
    importlib.import_module("dcpcomm.merger")  # once for all: nearly every rank will need it
    gc.freeze()  # a collection in a rank would copy the memory that all share
    starter = os.getpid()
    ranks: dict[int, int] = {}  # by process id

    def end_them(*_: object) -> None:
        for pid in list(ranks):
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end_them)
    for rank in pipes:
        pid = _fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with(starter)
            for other in pipes.keys() - {rank}:
                pipes[other].close()
            multiprocessing.current_process().name = f"rank {rank}"
            np.random.seed()  # or all ranks would draw the same
            return {rank: pipes[rank]}
        ranks[pid] = rank
    while ranks:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        rank = ranks.pop(ended.si_pid)  # before its number is free for another process, which `end_them` would end
        _, status = os.waitpid(ended.si_pid, 0)
        with contextlib.suppress(OSError):  # the parent has closed it, and is waiting for us
            pipes[rank].send_bytes(pickle.dumps(("ended", os.waitstatus_to_exitcode(status))))
        pipes[rank].close()
    return {}


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 and later warn of threads. There are those of numpy's BLAS, which sees to forks itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def leave() -> NoReturn:
    """End this process without taking torch apart, which costs a third of a second for nothing."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or none
            stream.flush()
    os._exit(0)


def die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, so that nothing is left behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Have a process that is started meanwhile ignore Ctrl-C from its first instruction: ending it is our business."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def no_main_reimport() -> Iterator[None]:
    """Keep `spawn` from importing the parent's __main__ again in every rank: it may be a console script, or pytest."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    main.__spec__ = None
    if file is not None:
        del main.__file__
    try:
        yield
    finally:
        main.__spec__ = spec
        if file is not None:
            main.__file__ = file
