"""Run a function on N ranks: local processes started here, or the ranks that torchrun already started.

`LocalRanks` keeps its processes between calls, because starting one costs seconds (importing torch). For the same
reason one process, the starter, imports torch and forks the ranks from itself. The store that the ranks meet at lives
in the parent, so that any rank, rank 0 included, may die without taking the others' meeting place along.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import multiprocessing
import operator
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from dcpcomm.errors import CallMismatch, ConfigError, DCPCommError, SelectionMismatch, TransportTimeout
from dcpcomm.starter import CAN_FORK, die_with, exists, forked, interrupts_ignored, leave, no_main_reimport

__all__ = ["LocalRanks", "RankFailed", "emit", "failure_of", "own_device", "run_on_ranks", "under_torchrun"]

_END_S = 5.0  # for a starter to end its ranks, before it is ended itself

_event_sink: Callable[[Any], None] | None = None


class RankFailed(DCPCommError):
    """A function raised on a rank, the rank's process died, or it did not answer in time. `ranks` says which."""

    def __init__(self, message: str, ranks: tuple[int, ...], cause: BaseException | None = None) -> None:
        super().__init__(message, ranks, cause)  # all, so that it survives pickling
        self.ranks = ranks
        self.cause = cause

    def __str__(self) -> str:
        return str(self.args[0])


def emit(event: Any) -> None:
    """From inside a running function: hand `event` to the `on_event` callback of whoever started it."""
    if _event_sink is not None:
        _event_sink(event)


class LocalRanks:
    """N processes on this machine, each one rank of a torch.distributed Gloo group.

    Args:
        size: number of ranks.
        start_timeout_s: for all processes to have started and met.
    """

    def __init__(self, size: int, *, start_timeout_s: float = 120.0) -> None:
        if size < 1:
            raise ValueError(f"size={size}; expected at least 1 rank")
        self.size = size
        self._processes: list[Any] = []  # that started each rank, by rank: one for all, where it can fork them
        self._pipes: list[Connection] = []
        self._pids: list[int] = []
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=start_timeout_s)
        )
        try:
            self._start()
            self._pids = self._collect(time.monotonic() + start_timeout_s, None, "starting")
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        theirs: dict[int, Connection] = {}
        for rank in range(self.size):
            ours, theirs[rank] = context.Pipe()
            self._pipes.append(ours)
        for ranks in [range(self.size)] if CAN_FORK else [range(rank, rank + 1) for rank in range(self.size)]:
            pipes = {rank: theirs[rank] for rank in ranks}
            process = context.Process(
                target=_start_ranks,
                args=(pipes, self.size, self._store.port, os.getpid()),
                daemon=True,
                name=f"rank {_listed(ranks)}",
            )
            with no_main_reimport(), interrupts_ignored():
                process.start()
            self._processes += [process] * len(ranks)
            for pipe in pipes.values():
                pipe.close()

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        on_event: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """`fn(*args)` on every rank at once; the results by rank. `fn` must be importable by name.

        Raises:
            RankFailed: a rank raised, died, or did not answer within `timeout_s`. After the latter two the processes
                are gone.
        """
        if not self.alive:
            raise RankFailed("the processes have ended; make new LocalRanks", tuple(range(self.size)))
        call = pickle.dumps((_address(fn), args))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        return self._collect(time.monotonic() + timeout_s, on_event, getattr(fn, "__qualname__", repr(fn)))

    def _collect(self, deadline: float, on_event: Callable[[int, Any], None] | None, what: str) -> list[Any]:
        try:
            results, errors = self._answers(deadline, on_event, what)
        except BaseException:
            self.close(patience_s=0.0)  # answers are still to come: the next call must not take them for its own
            raise
        if errors:
            raise failure_of(errors, what)
        return [results[rank] for rank in range(self.size)]

    def _answers(
        self, deadline: float, on_event: Callable[[int, Any], None] | None, what: str
    ) -> tuple[dict[int, Any], dict[int, tuple[BaseException | None, str]]]:
        results: dict[int, Any] = {}
        errors: dict[int, tuple[BaseException | None, str]] = {}
        waiting = dict(enumerate(self._pipes))
        while waiting:
            ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close(patience_s=0.0)  # they had their time
                raise RankFailed(f"{what}: rank {_listed(waiting)} did not answer in time", tuple(waiting))
            for rank, pipe in [(r, p) for r, p in waiting.items() if p in ready]:
                try:
                    kind, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):  # nobody was left to say how it ended
                    self._processes[rank].join(5)
                    kind, value = "ended", self._processes[rank].exitcode
                if kind == "ended":
                    self.close()
                    raise RankFailed(f"{what}: the process of rank {rank} ended with status {value}", (rank,))
                if kind == "event":
                    if on_event is not None:
                        on_event(rank, value)
                    continue
                del waiting[rank]
                if kind == "result":
                    results[rank] = value
                else:
                    errors[rank] = value
        return results, errors

    def close(self, patience_s: float = 5.0) -> None:
        """End the processes, by force after `patience_s`. Safe twice."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        deadline = time.monotonic() + patience_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.terminate()  # a starter ends its ranks, and then itself: none is left when this returns
                process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes, self._pids = [], [], []

    @property
    def alive(self) -> bool:
        return bool(self._pids) and all(p.is_alive() for p in self._processes) and all(map(exists, self._pids))

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def failure_of(errors: dict[int, tuple[BaseException | None, str]], what: str) -> RankFailed:
    """What to raise for the errors of several ranks: mostly one rank's own, and the others' of having waited for it."""
    consequences = (TransportTimeout, CallMismatch, SelectionMismatch)
    first = min(errors, key=lambda rank: (isinstance(errors[rank][0], consequences), rank))
    cause, trace = errors[first]
    return RankFailed(f"{what}: rank {_listed(errors)} raised; rank {first}:\n{trace}", tuple(errors), cause)


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun (or another launcher with its variables) started.

    Raises:
        ConfigError: it can't be the rank that these variables say, and would wait for others that don't come.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return False
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise ConfigError(
            f"the environment has RANK={rank} and WORLD_SIZE={size}; expected whole numbers, the first from 0 to one "
            "less than the second, as torchrun sets them; unset RANK to start local ranks"
        )
    return True


def own_device(asked: str | None) -> torch.device:
    """Of a rank that is a process: where its merges run. A GPU becomes the current one; each rank of a host has its
    own, as far as there are.

    Args:
        asked: "cpu", "cuda", or None for a GPU where there is one.

    Raises:
        ConfigError: "cuda", and torch sees no GPU here.
    """
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda was asked for, and torch sees no GPU on this rank; leave it out, or install one"
        )
    if asked == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def run_on_ranks(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    timeout_s: float = 600.0,
    on_event: Callable[[int, Any], None] | None = None,
) -> list[Any] | None:
    """`fn(*args)` on every rank: those of torchrun where it started us (`size` is then theirs), else `size` new
    processes.

    Returns:
        the results by rank; under torchrun only on rank 0, and None on the others.
    """
    if not under_torchrun():
        with LocalRanks(size) as ranks:
            return ranks.run(fn, *args, timeout_s=timeout_s, on_event=on_event)
    global _event_sink
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    if on_event is not None:
        callback = on_event
        _event_sink = lambda event: callback(rank, event)  # noqa: E731
    try:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, fn(*args))
    finally:
        _event_sink = None
    dist.destroy_process_group()
    gc.collect()  # Gloo's threads end with the group: one that lets go of a tensor while Python ends aborts the process
    return gathered if rank == 0 else None


def _start_ranks(pipes: dict[int, Connection], size: int, port: int, parent: int) -> None:
    """What a process of `LocalRanks` runs: it is one rank, or the starter of several."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for rank, pipe in (forked(pipes) if len(pipes) > 1 else pipes).items():
        _serve(pipe, rank, size, port)
    leave()


def _serve(pipe: Connection, rank: int, size: int, port: int) -> None:
    """The life of one rank's process: meet the others, then run what comes through the pipe until it closes."""
    global _event_sink
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=size)

    def send(kind: str, value: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody waits for the answer any more
            pipe.send_bytes(pickle.dumps((kind, value)))

    _event_sink = lambda event: send("event", event)  # noqa: E731
    send("result", os.getpid())
    while True:
        try:
            call = pipe.recv_bytes()
        except (EOFError, OSError):
            break
        try:
            (module, name), args = pickle.loads(call)
            send("result", _found(module, name)(*args))
        except BaseException as error:
            send("error", (_picklable(error), traceback.format_exc()))
    if dist.is_initialized():
        dist.destroy_process_group()


def _address(fn: Callable[..., Any]) -> tuple[str, str]:
    """Module and name by which a rank's process finds `fn`: a module run by `python -m` has its real name there."""
    module, name = fn.__module__, fn.__qualname__
    if module == "__main__":
        main = sys.modules["__main__"]
        module = (
            main.__spec__.name if main.__spec__ is not None else os.path.abspath(getattr(main, "__file__", "<stdin>"))
        )
    if "<" in module + name:
        raise ValueError(f"{module}:{name} can't be imported by a rank's process; define it at the top level of a file")
    return module, name


def _found(module: str, name: str) -> Callable[..., Any]:
    """The function that `_address` named; a script is loaded from its path, with another __name__ than __main__."""
    if os.path.isabs(module):
        known = sys.modules.get(f"script {module}")
        if known is None:
            spec = importlib.util.spec_from_file_location(f"script {module}", module)
            assert spec is not None
            assert spec.loader is not None
            known = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(known)
    else:
        known = importlib.import_module(module)
    return operator.attrgetter(name)(known)  # type: ignore[no-any-return]


def _picklable(error: BaseException) -> BaseException | None:
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        return None


def _listed(ranks: Any) -> str:
    return ", ".join(str(r) for r in sorted(ranks))
