"""Run a sweep: start the ranks that it asks for, or use those of torchrun, and put together what they found.

On GPUs a rank is a process with one of its own, where there are enough of them; else ranks are virtual, streams of one
GPU. On CPU ranks are processes, which meet over Gloo.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcpcomm.bench.clocks import GRAPH_REPLAYS, TIMED_CALLS, Clock, GraphClock, WallClock
from dcpcomm.bench.machine import commit, machine, versions
from dcpcomm.bench.measure import Answer, Case, Say, measure
from dcpcomm.bench.ours import named
from dcpcomm.bench.ranks import Meeting, ProcessRanks, Ranks, ThreadRanks
from dcpcomm.bench.result import BARE_GLOO, Group, Result, Skipped
from dcpcomm.bench.sweep import Sweep, cells_of, why_not
from dcpcomm.bench.table import Row, size_of
from dcpcomm.bench.timing import slowest
from dcpcomm.errors import ConfigError
from dcpcomm.launch import emit, own_device, run_on_ranks, under_torchrun
from dcpcomm.registry import registered_transports, try_load
from dcpcomm.testing.loopback import LoopbackRank, LoopbackWorld, side_by_side

__all__ = ["PATIENCE_S", "Place", "measure_processes", "measure_threads", "place_of", "rows_of", "run"]

PATIENCE_S = 24 * 3600.0
_BETWEEN_THREADS = ("loopback", "loopback_peer")

OnRanks = Callable[..., "list[Any] | None"]


@dataclass(frozen=True)
class Place:
    """Where a sweep runs.

    Attributes:
        device: "cpu" or "cuda".
        gpus: of this host.
        world: ranks that torchrun started; None where this process starts them.
        settings: variables that were set here for virtual ranks.
    """

    device: str
    gpus: int = 0
    world: int | None = None
    settings: tuple[str, ...] = ()

    def virtual(self, ranks: int, transports: Iterable[str] = ()) -> bool:
        """Whether so many ranks are threads with streams of one GPU."""
        if self.world is not None or self.device == "cpu":
            return False
        names = [named(one)[0] for one in transports]
        return self.gpus < ranks or bool(names and all(name in _BETWEEN_THREADS for name in names))

    def transports(self, ranks: int) -> tuple[str, ...]:
        """All that could be measured here."""
        if self.virtual(ranks):
            return ("loopback_peer",)
        names = []
        for name in registered_transports():
            cls, _ = try_load(name)
            if cls is None or name in _BETWEEN_THREADS or self.device not in cls.capabilities.devices:
                continue
            if self.device == "cpu" or cls.capabilities.graph_capturable:
                names.append(name)
        return tuple(names)


def place_of(asked: str | None) -> Place:
    """Where a sweep for device `asked` ("cpu", "cuda", None for a GPU where there is one) runs.

    Raises:
        ConfigError: a GPU was asked for, and there is none.
    """
    world = int(os.environ["WORLD_SIZE"]) if under_torchrun() else None
    if asked == "cpu":
        return Place("cpu", world=world)
    before = set(os.environ)
    if world is None:
        side_by_side()  # to ask for a GPU starts CUDA
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cuda" and not gpus:
        raise ConfigError("a GPU was asked for, and torch sees none; leave `device` out, or install one")
    return Place("cuda" if gpus else "cpu", gpus, world, tuple(sorted(set(os.environ) - before)))


def run(
    sweep: Sweep,
    place: Place,
    command: str,
    say: Say,
    on_ranks: OnRanks = run_on_ranks,
    *,
    programmatic: bool = False,
    of_commit: str | None = None,
) -> Result | None:
    """Measure a sweep. Collective where torchrun started the ranks.

    Args:
        command: that asked for it, to be told with the result.
        say: told what comes next.
        on_ranks: as `run_on_ranks`.
        programmatic: the limit of GPUs is that of programmatic launches.
        of_commit: which the result is of, where what runs is no checkout.

    Returns:
        what was found; None on ranks of torchrun but 0.
    """
    sizes = sweep.ranks
    if place.world is not None and "ranks" not in sweep.model_fields_set:
        sizes = (place.world,)
    groups: list[Group] = []
    rows: list[Row] = []
    skipped: list[Skipped] = []
    gpus: list[str] = []
    for size in sizes:
        unfit = _unfit(sweep, place, size)
        skipped += unfit
        if len(unfit) == len(list(cells_of(sweep, size))):
            continue
        answers = _answers(sweep, place, size, say, on_ranks)
        if answers is None:
            return None
        rows += rows_of(answers, programmatic=programmatic)
        skipped += [Skipped(one.transport, one.cell, one.why) for one in answers[0].skipped]
        groups.append(_group(answers, place.virtual(size, sweep.transport), programmatic))
        gpus = [answer.gpu for answer in answers if answer.gpu] or gpus
    if place.world is not None and int(os.environ["RANK"]):
        return None
    return Result(
        "this run",
        command,
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        of_commit or commit(),
        machine(gpus),
        versions(),
        _timing(sweep, place),
        tuple(groups),
        tuple(rows),
        tuple(skipped),
    )


def _unfit(sweep: Sweep, place: Place, size: int) -> list[Skipped]:
    """The cells of `size` ranks, and why, if none of them can be measured here; else none."""
    cells = list(cells_of(sweep, size))
    if place.world is not None and size != place.world:
        return [Skipped(None, cell, f"torchrun started {place.world} ranks") for cell in cells]
    if all(why_not(cell) for cell in cells):
        return [Skipped(None, cell, why_not(cell)) for cell in cells]
    return []


def _timing(sweep: Sweep, place: Place) -> dict[str, Any]:
    if place.device == "cpu":
        return {"calls": sweep.replays or TIMED_CALLS, "lse_base": sweep.lse_base}
    replays = sweep.replays or GRAPH_REPLAYS
    return {"per_graph": sweep.per_graph, "replays": replays, "lse_base": sweep.lse_base}


def _answers(sweep: Sweep, place: Place, size: int, say: Say, on_ranks: OnRanks) -> list[Answer] | None:
    if not sweep.transport:
        sweep = sweep.model_copy(update={"transport": place.transports(size)})
    if place.virtual(size, sweep.transport):
        return measure_threads(size, sweep, say)
    for name in place.settings:  # processes have a GPU each, as under torchrun, which sets none of them
        os.environ.pop(name, None)
    return on_ranks(
        measure_processes, size, sweep, place.device, timeout_s=PATIENCE_S,
        on_event=lambda rank, event: say(event) if rank == 0 else None,
    )  # fmt: skip


def measure_threads(size: int, sweep: Sweep, say: Say) -> list[Answer]:
    """On the current GPU alone: `size` virtual ranks, each a thread with a stream."""
    world, meeting = LoopbackWorld(size), Meeting(size)

    def body(group: LoopbackRank) -> Answer:
        ranks = ThreadRanks(meeting, group.rank)
        device = torch.device("cuda", torch.cuda.current_device())
        told: Say = say if group.rank == 0 else lambda event: None
        try:
            return _measure(ranks, group, device, sweep, told)
        except BaseException:
            ranks.abort()
            raise

    return world.run(body, timeout_s=PATIENCE_S)


def measure_processes(sweep: Sweep, device: str) -> Answer:
    """On one rank that is a process, with its own GPU where there are any; the default process group must stand."""
    ranks, own = ProcessRanks(), own_device(device)
    return _measure(ranks, None if own.type == "cpu" else ranks.nccl(), own, sweep, emit)


def _measure(ranks: Ranks, group: Any, device: torch.device, sweep: Sweep, say: Say) -> Answer:
    clock: Clock
    if device.type == "cpu":
        clock = WallClock(ranks, sweep.replays or TIMED_CALLS)
    else:
        replays = sweep.replays or GRAPH_REPLAYS
        clock = GraphClock(ranks, device, sweep.per_graph, replays, lambda text: say(("text", text)))
    answer = measure(ranks, group, device, sweep, clock, say)
    clock.close()  # collective, so only where all ranks have come through
    return answer


def rows_of(answers: Sequence[Answer], *, programmatic: bool = False) -> list[Row]:
    """One row for each contender in each cell, from what every rank found.

    Args:
        programmatic: the limit of GPUs is that of programmatic launches.
    """
    return [_row(same, answers, programmatic) for same in zip(*(answer.cases for answer in answers), strict=True)]


def _row(same: Sequence[Case], answers: Sequence[Answer], programmatic: bool) -> Row:
    case, n, limits = same[0], len(same), answers[0].limits
    cell = case.cell
    wrong = sum(one.wrong for one in same)
    times = [one.times for one in same if one.times is not None]
    hosts = [one.host for one in same if one.host is not None]
    itemsize = getattr(torch, cell.dtype).itemsize
    nbytes = size_of(cell.rows, cell.heads, cell.width, itemsize, n)
    bare = [one.limit for one in same if one.limit is not None]
    if len(bare) == n:
        limit_us = slowest(bare).p50
    else:
        assert limits is not None, "a clock either has limits or times one with each cell"
        limit_us = limits.limit_us(nbytes, programmatic=programmatic)
    return Row(
        nbytes, cell.rows, cell.heads, cell.dim, cell.dtype, n, case.name,
        slowest(times) if len(times) == n and not wrong else None, wrong, limit_us,
        slowest(hosts).p50 if len(hosts) == n else None,
        cell.projection, cell.v_head_dim, cell.empty, cell.skew_us,
    )  # fmt: skip


def _group(answers: Sequence[Answer], virtual: bool, programmatic: bool) -> Group:
    limits, are = answers[0].limits, "threads on one GPU" if virtual else "processes"
    if limits is None:
        return Group(len(answers), are, BARE_GLOO)
    smallest = limits.limit_us(0, programmatic=programmatic)
    return Group(len(answers), are, f"{smallest:.2f} us + bytes / {limits.bandwidth:.0f} GB/s", limits.as_dict())
