"""The whole measurement on one rank: limits, then in each cell every transport and rival, proven before it is timed.

Every rank does all of it, in the same order. Between two timings nothing is in flight on any rank, so whatever waits
for the device (allocations, first loads of kernels) is done there.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import torch

from dcpcomm.bench.checked import Checked
from dcpcomm.bench.clocks import Clock
from dcpcomm.bench.limits import Limits
from dcpcomm.bench.ours import Ours
from dcpcomm.bench.ranks import Ranks
from dcpcomm.bench.rivals import RIVALS, Rival
from dcpcomm.bench.sweep import Cell, Sweep, cells_of, why_not
from dcpcomm.bench.timing import Times, settle
from dcpcomm.errors import DCPCommError, ShapeError, TransportUnavailable
from dcpcomm.transport import MergeShape

__all__ = ["Answer", "Case", "Inputs", "Say", "Settings", "Skip", "measure"]

#: Told what comes next: ("total", cells), ("cell", words) as one begins, ("text", words) for what is no cell.
Say = Callable[[tuple[str, Any]], object]


@dataclass(frozen=True)
class Settings:
    """What all merges of one merger have in common; the same on all ranks.

    Attributes:
        transports: registered names, perhaps with options (`ours.named`).
        rivals: measure them as well.
        rows: B of each size.
        v_head_dim: V, where W_UV projects.
    """

    transports: tuple[str, ...]
    rivals: bool = False
    dtype: torch.dtype = torch.bfloat16
    heads: int = 128
    dim: int = 128
    rows: tuple[int, ...] = (1, 4, 16, 32, 64, 128, 256)
    lse_base: Literal["e", "2"] = "e"
    projection: str = "none"
    v_head_dim: int | None = None
    require_graph: bool = True

    @classmethod
    def of(cls, sweep: Sweep, cell: Cell, device: torch.device) -> Settings:
        """Of the cells that share a merger with `cell`."""
        return cls(
            sweep.transport, sweep.rivals, getattr(torch, cell.dtype), cell.heads, cell.dim, sweep.rows,
            sweep.lse_base, cell.projection, cell.v_head_dim, device.type == "cuda",
        )  # fmt: skip

    def shape(self, width: int | None = None) -> MergeShape:
        """Of all merges; with a `width`, of plain merges of so many columns."""
        return MergeShape(
            max_tokens=max(self.rows), num_heads=self.heads, head_dim=width or self.dim, dtype=self.dtype,
            lse_base=self.lse_base, require_graph=self.require_graph, v_head_dim=None if width else self.v_head_dim,
        )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One transport or rival in one cell, on one rank.

    Attributes:
        times: None where some rank's result was wrong before the timing.
        wrong: elements of this rank's results, all comparisons together.
        host: eager host times, where the ranks are processes with a GPU each.
        limit: times of what is the limit in this cell; None where `Answer.limits` tells it.
    """

    name: str
    cell: Cell
    times: Times | None
    wrong: int
    host: Times | None = None
    limit: Times | None = None


@dataclass(frozen=True)
class Skip:
    """What was not measured, and why. `transport` is None where it holds for all."""

    transport: str | None
    cell: Cell
    why: str


@dataclass
class Answer:
    """What one rank found.

    Attributes:
        gpu: its name; None on CPU.
    """

    gpu: str | None
    limits: Limits | None
    cases: list[Case] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)


def measure(ranks: Ranks, group: Any, device: torch.device, sweep: Sweep, clock: Clock, say: Say) -> Answer:
    """All of it. Collective.

    Args:
        group: what a `DCPMerger` takes.
        sweep: with its transports; only what it asks of this many ranks is measured.
        say: told what comes next.

    Raises:
        DCPCommError: a limit's words were wrong, or a peer did not come.
    """
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    answer = Answer(gpu, clock.limits)
    cells = list(cells_of(sweep, ranks.size))
    say(("total", len(cells)))
    for _, together in groupby(cells, lambda cell: (cell.heads, cell.dim, cell.dtype, cell.projection)):
        _scene(ranks, group, device, sweep, list(together), clock, answer, say)
    return answer


def _scene(
    ranks: Ranks, group: Any, device: torch.device, sweep: Sweep, cells: list[Cell], clock: Clock, answer: Answer,
    say: Say,
) -> None:  # fmt: skip
    """The cells that share a merger."""
    can = [cell for cell in cells if not why_not(cell)]
    answer.skipped += [Skip(None, cell, why_not(cell)) for cell in cells if cell not in can]
    for cell in cells:
        if cell not in can:
            say(("cell", str(cell)))
    if not can:
        return
    settings = Settings.of(sweep, can[0], device)
    limit = clock.limit_step(ranks, settings.shape(can[0].width), device)
    contenders = _prepared(ranks, group, device, settings, can, answer.skipped, say)
    if limit is not None:
        limit.prepare()
    for cell in can:
        say(("cell", str(cell)))
        fit = [one for one in contenders if isinstance(one, Ours) or not cell.empty]
        answer.skipped += [Skip(one.name, cell, "takes no counts") for one in contenders if one not in fit]
        data = Inputs(ranks, settings, cell.rows, device, cell.empty)
        answer.cases += _cases(fit, limit, data, cell, clock, settings.rivals)
    # Closing is collective, so only where all ranks have come through.
    settle(device)
    ranks.meet()
    for contender in contenders:
        contender.close()


def _prepared(
    ranks: Ranks, group: Any, device: torch.device, settings: Settings, cells: list[Cell], skipped: list[Skip], say: Say
) -> list[Rival]:
    def skip(name: str, why: object) -> None:
        # Of an error over several lines the last one names the stage and the reason.
        skipped.extend(Skip(name, cell, str(why).splitlines()[-1].strip()) for cell in cells)

    shape = settings.shape()
    order = {"projection": settings.projection} if settings.projection != "none" else {}
    config = {"verify": {"level": "quick"}, **order}
    made: list[Rival] = [Ours(ranks, shape, device, group, name, config) for name in settings.transports]
    for kind in RIVALS if settings.rivals else ():
        if device.type != "cuda":
            skip(kind.name, "merges on GPUs alone")
        elif settings.projection != "none":
            skip(kind.name, "doesn't project")
        elif kind.needs_processes and ranks.on_this_gpu > 1:
            skip(kind.name, "needs a process and a GPU for each rank")
        else:
            try:
                made.append(kind(ranks, shape, device))
            except ShapeError as error:
                skip(kind.name, error)
    ready = []
    for contender in made:
        say(("text", f"preparing {contender.name}"))
        ranks.meet()
        try:
            contender.prepare()
        except TransportUnavailable as error:  # on all ranks alike: it is their common decision
            skip(contender.name, error)
            continue
        settle(device)
        ranks.meet()
        ready.append(contender)
    return ready


class Inputs:
    """Random partials of every rank, known to all: what this one brings is on its GPU.

    Attributes:
        counts: int32 `[N, B]`, 0 where a row is empty and holds NaN; None where none is.
    """

    def __init__(self, ranks: Ranks, settings: Settings, rows: int, device: torch.device, empty: float = 0.0) -> None:
        seed: int = ranks.gather(secrets.randbelow(2**40))[0]
        generators = [torch.Generator().manual_seed(seed + rank) for rank in range(ranks.size)]
        shape = rows, settings.heads, settings.dim
        self.rows = rows
        self.outs = torch.stack([torch.randn(shape, generator=one).to(settings.dtype) for one in generators])
        self.lses = torch.stack([3 * torch.randn(shape[:2], generator=one) for one in generators])
        self.counts: torch.Tensor | None = None
        if empty:
            nobody = round(rows * empty)
            order = torch.stack([torch.randperm(rows, generator=one) for one in generators])
            self.counts = (order >= nobody).to(torch.int32)
            self.outs[self.counts == 0] = float("nan")
        settle(device)
        ranks.meet()
        self.out, self.lse = self.outs[ranks.rank].to(device), self.lses[ranks.rank].to(device)
        settle(device)
        ranks.meet()


def _cases(
    contenders: Sequence[Rival], limit: Rival | None, data: Inputs, cell: Cell, clock: Clock, rivals: bool
) -> list[Case]:
    """Every contender in one cell: compared first, then timed."""
    steps: list[tuple[Rival, Checked]] = []
    if clock.in_turns:
        everybody = [limit, *contenders] if limit is not None else contenders
        steps = [(one, _compared(one, data)) for one in everybody]
        return _timed(steps, limit, cell, clock, rivals)
    cases = []
    for one in contenders:
        cases += _timed([(one, _compared(one, data))], None, cell, clock, rivals)
    return cases


def _compared(contender: Rival, data: Inputs) -> Checked:
    """A step that was compared with the oracle, twice, onto poison. Collective."""
    ranks, device = contender.ranks, contender.device
    if isinstance(contender, Ours):
        contender.counts = data.counts
    contender.bring(data.out, data.lse)
    want = contender.want(data.outs, data.lses)
    checked = Checked(contender.call(data.out, data.lse), lambda got: contender.count_wrong(got, want), contender.name)
    checked.check(ranks.meet, lambda: settle(device))
    contender.check()
    return checked


def _timed(
    steps: list[tuple[Rival, Checked]], limit: Rival | None, cell: Cell, clock: Clock, rivals: bool
) -> list[Case]:
    """What is right on all ranks is timed; the rest is only counted."""
    ranks = steps[0][0].ranks
    right = [(one, step) for one, step in steps if not any(ranks.gather(step.wrong))]
    found = dict(zip([one for one, _ in right], clock.time([step for _, step in right], cell.skew_us), strict=True))
    limits = found[limit].times if limit in found else None
    if limit is not None and (limits is None or any(ranks.gather(limits.wrong))):
        raise DCPCommError(f"{limit.name}: what arrived is not what was sent: it is no limit to hold anything against")
    cases = []
    for one, step in steps:
        one.check()
        timing = found.get(one)
        if one is not limit or rivals:
            times, host = (timing.times, timing.host) if timing else (None, None)
            cases.append(Case(one.name, cell, times, step.wrong, host, limits))
    ranks.meet()
    return cases
