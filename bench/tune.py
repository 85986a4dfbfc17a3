"""`dcpcomm tune` on one rank: verify, then measure what prices are made of, cell by cell, and write the table.

A cell is one transport at one size, or one product with W_UV, in one of several passes over all of them: what else the
machine does then hits all alike, and shows as a spread between passes. Rank 0 notes each cell in a journal, so that
what was measured before an interruption need not be measured again.
"""

from __future__ import annotations

import importlib.util
import secrets
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from dcpcomm.bench.checked import Checked, count_wrong
from dcpcomm.bench.journal import Journal
from dcpcomm.bench.limits import Gate, Probe
from dcpcomm.bench.measure import Inputs, Settings
from dcpcomm.bench.ours import Ours
from dcpcomm.bench.ranks import ProcessRanks
from dcpcomm.bench.timing import Summary, Times, settle, slowest, time_calls, time_graph
from dcpcomm.config import MergeConfig
from dcpcomm.cost import tuned_path, wire_bytes
from dcpcomm.costkey import CostKey, key_of, machine_id
from dcpcomm.costtable import CostTable, MergeRow, Projection, ProjectionRow
from dcpcomm.errors import TransportUnavailable
from dcpcomm.launch import emit, own_device
from dcpcomm.libraries import versions_that_matter
from dcpcomm.machine import Card
from dcpcomm.projection import project
from dcpcomm.screen import candidate_names, screen
from dcpcomm.topology import Facts, local_facts
from dcpcomm.transport import MergeShape

__all__ = ["Cell", "Measured", "Plan", "cells_of", "journal_of", "measure", "table_of"]

_LONGEST_ROUND_US = 20_000.0
_OF_CHOOSING = ("transport", "prefer", "forbid", "on_unavailable", "cost_table")


@dataclass(frozen=True)
class Plan:
    """What is measured; the same on all ranks.

    Attributes:
        transports: named ones; none: all that would be candidates.
        config: of a merger; what it says of choosing is left out.
        latent, value: L and V, or D and None where nothing is projected.
        rows: B of each size.
        passes: over all cells.
        rounds: timings of each cell in a pass.
        fresh: begin anew, whatever was measured before.
    """

    transports: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    heads: int = 128
    latent: int = 512
    value: int | None = 128
    dtype: str = "bfloat16"
    rows: tuple[int, ...] = (1, 4, 16, 32, 64, 128, 256)
    passes: int = 5
    rounds: int = 20
    device: str | None = None
    fresh: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        """Narrow ones first."""
        return (self.latent,) if self.value is None else tuple(sorted({self.value, self.latent}))

    def shape(self, width: int) -> MergeShape:
        """Of merges that are `width` wide."""
        return MergeShape(
            max_tokens=max(self.rows), num_heads=self.heads, head_dim=width, dtype=getattr(torch, self.dtype),
            lse_base="e",
        )  # fmt: skip


@dataclass(frozen=True, order=True)
class Cell:
    """What one timing is of: `name` is a transport, or "W_UV"; `heads` and `width` are 0 where they don't matter."""

    name: str
    rows: int
    width: int = 0
    heads: int = 0

    def __str__(self) -> str:
        return f"{self.name}, B={self.rows}, " + (f"width {self.width}" if self.width else f"{self.heads} heads")


@dataclass(frozen=True)
class Measured:
    """What rank 0 returns.

    Attributes:
        table: all that was measured in this run, and in those that it goes on with.
        skipped: transport -> why it was not measured.
        resumed: cells that an interrupted run had measured before.
    """

    key: CostKey
    table: CostTable
    skipped: dict[str, str]
    resumed: int


def cells_of(plan: Plan, transports: list[str], size: int) -> list[Cell]:
    """All cells of one pass. A size in bytes that two widths come to is measured once, with the narrow one."""
    sizes: dict[int, tuple[int, int]] = {}
    for width in plan.widths:
        for rows in plan.rows:
            sizes.setdefault(wire_bytes(plan.shape(width), size, rows, width), (rows, width))
    cells = [Cell(name, *sizes[nbytes]) for nbytes in sorted(sizes) for name in transports]
    if plan.value is not None:
        for heads in sorted({plan.heads, plan.heads // size}):
            cells += [Cell("W_UV", rows, 0, heads) for rows in plan.rows]
    return cells


def measure(plan: Plan) -> Measured | None:
    """Verify and measure. Collective over the default process group, which speaks Gloo.

    Returns:
        on rank 0 what was measured, else None.

    Raises:
        TransportUnavailable: a named transport can't be used, or none can.
        Unverified: something was wrong while it was timed.
    """
    ranks, device = ProcessRanks(), own_device(plan.device)
    facts = local_facts(ranks.rank, ranks.size, device, False)
    cards: list[Card] = ranks.gather(facts.ranks[0])
    assert facts.machine is not None
    key: CostKey = ranks.gather(key_of(facts.machine, cards, versions_that_matter()))[0]
    here = machine_id(facts.machine, cards)
    names = ranks.gather(_names(plan, facts, cards))[0]
    journal = journal_of(plan, key)
    done: dict[str, list[float]] = ranks.gather(journal.read() if ranks.rank == 0 else {})[0]
    skipped: dict[str, str] = {}
    found: dict[Cell, list[Summary]] = {}
    resumed = 0
    one_host = len({card.host for card in cards}) == 1
    with _Bench(plan, ranks, device, one_host) as bench:
        standing = bench.prepare(names, skipped)
        cells = cells_of(plan, standing, ranks.size)
        emit(("total", plan.passes * len(cells)))
        for turn in range(plan.passes):
            for cell in cells:
                label = f"{cell} (pass {turn + 1})"
                emit(("cell", label))
                if label in done:
                    resumed += 1
                    p50, mad, count = done[label]
                    found.setdefault(cell, []).append(Summary(p50, p50, mad, int(count)))
                    continue
                one = bench.time(cell)
                found.setdefault(cell, []).append(one)
                if ranks.rank == 0:
                    journal.note(label, [one.p50, one.mad, one.count])
    if ranks.rank:
        return None
    options = {name: given for name, given in plan.config.get("options", {}).items() if name in standing}
    table = table_of(plan, key, ranks.size, found).model_copy(update={"machine": here, "options": options})
    return Measured(key, table, skipped, resumed)


def journal_of(plan: Plan, key: CostKey) -> Journal:
    """What an interrupted run of this plan, for this group, has left."""
    of = {**asdict(plan), "fresh": False}
    return Journal(tuned_path(key).with_suffix(".journal"), {"key": key.model_dump(), "plan": of}, plan.fresh)


def table_of(plan: Plan, key: CostKey, size: int, found: dict[Cell, list[Summary]]) -> CostTable:
    """The cost table of all passes: of each cell the median, and the larger of the spreads within a pass and between
    passes.
    """
    merges: dict[str, dict[str, tuple[MergeRow, ...]]] = {}
    products: dict[int, list[ProjectionRow]] = {}
    for cell in sorted(found):
        passes = found[cell]
        p50s = [one.p50 for one in passes]
        spread = max(statistics.median(one.mad for one in passes), (max(p50s) - min(p50s)) / 2)
        us, count = round(statistics.median(p50s), 3), sum(one.count for one in passes)
        mad = round(spread, 3)
        if cell.name == "W_UV":
            line = ProjectionRow(tokens=cell.rows, median_us=us, mad_us=mad, n=count)
            products.setdefault(cell.heads, []).append(line)
        else:
            nbytes = wire_bytes(plan.shape(cell.width), size, cell.rows, cell.width)
            row = MergeRow(wire_bytes=nbytes, median_us=us, mad_us=mad, n=count)
            known = merges.setdefault(cell.name, {}).get(plan.dtype, ())
            merges[cell.name][plan.dtype] = tuple(sorted((*known, row), key=lambda one: one.wire_bytes))
    projections = {}
    if products and plan.value is not None:
        projections[plan.dtype] = tuple(
            Projection(heads=heads, latent=plan.latent, value=plan.value, rows=tuple(rows))
            for heads, rows in sorted(products.items())
        )
    return CostTable(key=key, merges=merges, projections=projections)


class _Bench:
    """What is timed, on one rank: mergers that stay connected for all passes. Entering and leaving is collective."""

    def __init__(self, plan: Plan, ranks: ProcessRanks, device: torch.device, one_host: bool) -> None:
        self.plan, self.ranks, self.device, self._one_host = plan, ranks, device, one_host
        self.mergers: dict[tuple[str, int], Ours] = {}
        self._probe: Probe | None = None
        self._per_round: dict[Cell, int] = {}
        self.meet: Callable[[], object] = ranks.meet

    def __enter__(self) -> _Bench:
        # The gate's kernels come by CuPy, and its memory by CUDA IPC: without them ranks begin together on the host.
        has_cupy = all(self.ranks.gather(importlib.util.find_spec("cupy") is not None))
        if self.device.type == "cuda" and self._one_host and has_cupy:
            self._probe = Probe(self.ranks, self.device, 1 << 20)
            self.meet = Gate(self._probe)
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:  # else some rank has not come this far, and closing waits for it
            settle(self.device)
            self.ranks.meet()
            for merger in self.mergers.values():
                merger.close()
            if self._probe is not None:
                self._probe.close()

    def prepare(self, names: list[str], skipped: dict[str, str]) -> list[str]:
        """Connect and verify; those that can be timed."""
        standing = []
        for name in names:
            try:
                for width in self.plan.widths:
                    emit(("cell", f"verifying {name}, width {width}"))
                    config = {k: v for k, v in self.plan.config.items() if k not in _OF_CHOOSING}
                    one = Ours(self.ranks, self.plan.shape(width), self.device, None, name, config)
                    one.prepare()
                    self.mergers[name, width] = one
            except TransportUnavailable as error:  # on all ranks alike: it is their common decision
                if self.plan.transports:
                    raise
                skipped[name] = str(error).splitlines()[-1].strip()
                continue
            standing.append(name)
        if not standing:
            reasons = "".join(f"\n  {name}: {why}" for name, why in skipped.items())
            raise TransportUnavailable(f"nothing can be measured: no transport can be used here{reasons}")
        return standing

    def time(self, cell: Cell) -> Summary:
        """One cell, checked by the oracle before and after. Collective."""
        step = self._product(cell) if cell.name == "W_UV" else self._merge(cell)
        step.check(self.ranks.meet, lambda: settle(self.device))
        if any(self.ranks.gather(step.wrong)):
            step.wrong = step.wrong or 1  # on another rank: all of them raise
            step.require_verified()
        mine = self._times(cell, step)
        if isinstance(self.meet, Gate):
            self.meet.check()
        if cell.name != "W_UV":
            self.mergers[cell.name, cell.width].check()
        times: list[Times] = self.ranks.gather(mine)
        summary = slowest(times)
        if summary.wrong:
            step.wrong = summary.wrong
            step.require_verified()
        return summary

    def _times(self, cell: Cell, step: Checked) -> Times:
        captures = self.device.type == "cuda"
        if cell.name != "W_UV":
            captures = captures and self.mergers[cell.name, cell.width].graph_capturable
        if captures:
            return time_graph(step, self.device, self.meet, replays=self.plan.rounds)
        if cell not in self._per_round:
            first = time_calls(step, self.device, self.meet, per_round=1, rounds=3)
            longest = max(self.ranks.gather(statistics.median(first.us)))
            self._per_round[cell] = max(1, min(20, int(_LONGEST_ROUND_US / longest)))
        return time_calls(step, self.device, self.meet, per_round=self._per_round[cell], rounds=self.plan.rounds)

    def _merge(self, cell: Cell) -> Checked:
        merger, plan = self.mergers[cell.name, cell.width], self.plan
        settings = Settings((), dtype=getattr(torch, plan.dtype), heads=plan.heads, dim=cell.width)
        data = Inputs(self.ranks, settings, cell.rows, self.device)
        merger.bring(data.out, data.lse)
        want = merger.want(data.outs, data.lses)
        return Checked(merger.call(data.out, data.lse), lambda got: merger.count_wrong(got, want), str(cell))

    def _product(self, cell: Cell) -> Checked:
        plan, dtype = self.plan, getattr(torch, self.plan.dtype)
        assert plan.value is not None
        generator = torch.Generator().manual_seed(secrets.randbelow(2**40))
        latent = torch.randn(cell.rows, cell.heads, plan.latent, generator=generator).to(dtype)
        weights = torch.randn(cell.heads, plan.latent, plan.value, generator=generator).to(dtype)
        want = torch.einsum("bhl,hlv->bhv", latent.double(), weights.double())
        out = torch.empty(cell.rows, cell.heads, plan.value, dtype=dtype, device=self.device)
        here, there = latent.to(self.device), weights.to(self.device)
        settle(self.device)
        return Checked(
            lambda: project(here, there, out), lambda got: count_wrong(got, want, sums_rounded=True), str(cell)
        )


def _names(plan: Plan, facts: Facts, cards: list[Card]) -> list[str]:
    """The transports to try: those named, else all that could be chosen."""
    if plan.transports:
        return list(plan.transports)
    config = MergeConfig(**{**plan.config, "transport": "auto"})
    met = replace(facts, ranks=tuple(cards))
    return [n for n in candidate_names(config) if not screen(n, plan.shape(plan.latent), config, met).stage]
