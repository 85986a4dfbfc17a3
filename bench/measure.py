"""The whole measurement on one rank: limits, then at each size every transport and rival, proven before it is timed.

Every rank does all of it, in the same order. Between two timings nothing is in flight on any rank, so whatever waits
for the device (allocations, first loads of kernels) is done there.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from dcpcomm.bench.checked import Checked
from dcpcomm.bench.limits import Gate, Limits, Probe, measure_limits
from dcpcomm.bench.ours import Ours
from dcpcomm.bench.ranks import Ranks
from dcpcomm.bench.rivals import RIVALS, Rival
from dcpcomm.bench.timing import Times, settle, time_eager_host, time_graph
from dcpcomm.errors import ShapeError, TransportUnavailable
from dcpcomm.transport import MergeShape

__all__ = ["Answer", "Case", "Inputs", "Settings", "measure"]

Say = Callable[[str], object]


@dataclass(frozen=True)
class Settings:
    """What is measured; the same on all ranks.

    Attributes:
        transports: registered names, perhaps with options (`ours.named`). One that can't be used raises if `named`, and
            is left out otherwise.
        rows: B of each size.
    """

    transports: tuple[str, ...]
    named: bool = False
    rivals: bool = False
    dtype: torch.dtype = torch.bfloat16
    heads: int = 128
    dim: int = 128
    rows: tuple[int, ...] = (1, 4, 16, 32, 64, 128, 256)
    lse_base: Literal["e", "2"] = "e"
    per_graph: int = 20
    replays: int = 30

    def shape(self) -> MergeShape:
        """Of all merges."""
        return MergeShape(
            max_tokens=max(self.rows), num_heads=self.heads, head_dim=self.dim, dtype=self.dtype,
            lse_base=self.lse_base, require_graph=True,
        )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One transport or rival at one size, on one rank.

    Attributes:
        times: None where some rank's result was wrong before the timing.
        wrong: elements of this rank's results, all comparisons together.
        host: eager host times, where the ranks are processes.
    """

    name: str
    rows: int
    times: Times | None
    wrong: int
    host: Times | None = None


@dataclass
class Answer:
    """What one rank found."""

    gpu: str
    limits: Limits
    cases: list[Case] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


def measure(ranks: Ranks, group: Any, device: torch.device, settings: Settings, say: Say) -> Answer:
    """All of it. Collective.

    Args:
        group: what a `DCPMerger` takes.
        say: told what comes next.

    Raises:
        TransportUnavailable: a named transport can't be used.
        DCPCommError: a limit's words were wrong, or a peer did not come.
    """
    probe = Probe(ranks, device)
    gate = Gate(probe)
    limits = measure_limits(probe, gate, per_graph=settings.per_graph, replays=settings.replays, say=say)
    answer = Answer(torch.cuda.get_device_name(device), limits)
    contenders = _prepared(ranks, group, device, settings, answer.skipped, say)
    for rows in settings.rows:
        data = Inputs(ranks, settings, rows, device)
        for contender in contenders:
            say(f"{rows} rows, {contender.name}")
            answer.cases.append(_case(contender, data, gate, settings))
    # Closing is collective, so only where all ranks have come through.
    settle(device)
    ranks.meet()
    for contender in contenders:
        contender.close()
    probe.close()
    return answer


def _prepared(
    ranks: Ranks, group: Any, device: torch.device, settings: Settings, skipped: dict[str, str], say: Say
) -> list[Rival]:
    shape = settings.shape()
    made: list[Rival] = [Ours(ranks, shape, device, group, name) for name in settings.transports]
    for kind in RIVALS if settings.rivals else ():
        if kind.needs_processes and ranks.on_this_gpu > 1:
            skipped[kind.name] = "needs a process and a GPU for each rank"
            continue
        try:
            made.append(kind(ranks, shape, device))
        except ShapeError as error:
            skipped[kind.name] = str(error)
    ready = []
    for contender in made:
        say(f"preparing {contender.name}")
        ranks.meet()
        try:
            contender.prepare()
        except TransportUnavailable as error:  # on all ranks alike: it is their common decision
            if settings.named and isinstance(contender, Ours):
                raise
            skipped[contender.name] = str(error)
            continue
        settle(device)
        ranks.meet()
        ready.append(contender)
    return ready


class Inputs:
    """Random partials of every rank, known to all: what this one brings is on its GPU."""

    def __init__(self, ranks: Ranks, settings: Settings, rows: int, device: torch.device) -> None:
        seed: int = ranks.gather(secrets.randbelow(2**40))[0]
        generators = [torch.Generator().manual_seed(seed + rank) for rank in range(ranks.size)]
        shape = rows, settings.heads, settings.dim
        self.rows = rows
        self.outs = torch.stack([torch.randn(shape, generator=one).to(settings.dtype) for one in generators])
        self.lses = torch.stack([3 * torch.randn(shape[:2], generator=one) for one in generators])
        settle(device)
        ranks.meet()
        self.out, self.lse = self.outs[ranks.rank].to(device), self.lses[ranks.rank].to(device)
        settle(device)
        ranks.meet()


def _case(contender: Rival, data: Inputs, gate: Gate, settings: Settings) -> Case:
    ranks, device = contender.ranks, contender.device
    contender.bring(data.out, data.lse)
    want = contender.want(data.outs, data.lses)
    checked = Checked(contender.call(data.out, data.lse), lambda got: contender.count_wrong(got, want), contender.name)
    checked.check(ranks.meet, lambda: settle(device))
    contender.check()
    if any(ranks.gather(checked.wrong)):
        return Case(contender.name, data.rows, None, checked.wrong)
    host = None
    if ranks.on_this_gpu == 1:  # threads of one process would time how they share the interpreter
        host = time_eager_host(checked, device, ranks.meet)
        if any(ranks.gather(checked.wrong)):
            return Case(contender.name, data.rows, None, checked.wrong)
    times = time_graph(checked, device, gate, per_graph=settings.per_graph, replays=settings.replays)
    gate.check()
    contender.check()
    ranks.meet()
    return Case(contender.name, data.rows, times, checked.wrong, host)
