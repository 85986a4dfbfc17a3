"""A decode step of many layers, each with other work, a merge and W_UV: what its merges take, over each transport.

    torchrun --nproc-per-node 2 -m dcpcomm.bench.decode_loop --json loop.json      # auto, and packed NCCL
    python -m dcpcomm.bench.decode_loop --transport loopback_peer                  # ranks: streams of one GPU
    torchrun --nproc-per-node 2 -m dcpcomm.bench.decode_loop --device cpu --transport auto --layers 8

Every layer has partials and weights of its own, and a result that is compared with the oracle, before the timing and
after. The same step without merges is timed in turns with those that have them; the difference is the time in merges.
Exit status: 0, or 1 where a result was wrong, or 2 for wrong usage.
"""

from __future__ import annotations

import json
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dcpcomm.bench.checked import count_wrong, poison
from dcpcomm.bench.console import Commit, need_gpu, of_rank_0, progress
from dcpcomm.bench.limits import Gate, Probe
from dcpcomm.bench.machine import facts
from dcpcomm.bench.ours import named
from dcpcomm.bench.ranks import Meeting, ProcessRanks, Ranks, ThreadRanks
from dcpcomm.bench.timing import mad, settle
from dcpcomm.graphs import captured
from dcpcomm.launch import emit, own_device, run_on_ranks, under_torchrun
from dcpcomm.merger import DCPMerger
from dcpcomm.projection import project
from dcpcomm.reference import merge_partials
from dcpcomm.testing.loopback import LoopbackRank, LoopbackWorld
from dcpcomm.transport import MergeShape

__all__ = ["Found", "Plan", "Row", "main", "rows_of", "run"]

_NOTHING = "no merges"
_WARM = 3
_PATIENCE_S = 1800.0


@dataclass(frozen=True)
class Plan:
    """What is timed; the same on all ranks.

    Attributes:
        transports: "auto", or registered names, perhaps with options (`ours.named`).
        latent: L, columns of the partials.
        value: V, columns of the result.
        work: of each layer besides, a product of `[B, work]` and a square of that side; 0 for none.
        rounds: timed steps of each transport, and without merges.
    """

    transports: tuple[str, ...]
    layers: int = 61
    rows: int = 32
    heads: int = 128
    latent: int = 512
    value: int = 128
    work: int = 4096
    dtype: str = "bfloat16"
    rounds: int = 50


@dataclass
class Found:
    """What one rank found.

    Attributes:
        us: of each step, by transport ("no merges" too); replays of a graph on GPUs, calls on CPU.
        eager_us: the same where the step is called anew each time, until its last result is there; on GPUs.
        chosen: by transport, what carries the merges, and the order of projection.
        wrong: elements, by transport.
    """

    gpu: str | None
    us: dict[str, list[float]] = field(default_factory=dict)
    eager_us: dict[str, list[float]] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)


class _Layers:
    """Partials of every layer, and the oracle's results; the same for all transports."""

    def __init__(self, plan: Plan, ranks: Ranks, device: torch.device) -> None:
        self.device, self._dtype = device, getattr(torch, plan.dtype)
        own = slice(ranks.rank * plan.heads // ranks.size, (ranks.rank + 1) * plan.heads // ranks.size)
        generator = torch.Generator().manual_seed(ranks.gather(secrets.randbelow(2**40))[0])
        self.partials: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.weights, self.wants = [], []
        for _ in range(plan.layers):
            outs = torch.randn(ranks.size, plan.rows, plan.heads, plan.latent, generator=generator).to(self._dtype)
            lses = 3 * torch.randn(ranks.size, plan.rows, plan.heads, generator=generator)
            weights = torch.randn(plan.heads, plan.latent, plan.value, generator=generator) / plan.latent**0.5
            mine = weights[own].to(self._dtype)
            merged = merge_partials(outs[:, :, own], lses[:, :, own], lse_base="e", scatter="none")[0][0]
            self.wants.append(torch.einsum("bhl,hlv->bhv", merged, mine.double()))
            self.partials.append((outs[ranks.rank].to(device), lses[ranks.rank].to(device)))
            self.weights.append(mine.to(device))
        self.results = [torch.empty(want.shape, dtype=self._dtype, device=device) for want in self.wants]
        side = plan.work
        self._square = torch.randn(side, side, generator=generator).to(device, self._dtype) / max(side, 1) ** 0.5
        self._hidden = [torch.randn(plan.rows, side, generator=generator).to(device, self._dtype) for _ in range(2)]

    def work(self, layer: int) -> None:
        """What a layer does besides."""
        if self._square.numel():
            torch.mm(self._hidden[layer % 2], self._square, out=self._hidden[1 - layer % 2])

    def poison(self) -> None:
        for result in self.results:
            poison(result)

    def count_wrong(self) -> int:
        settle(self.device)
        return sum(
            count_wrong(got.cpu(), want, sums_rounded=True) for got, want in zip(self.results, self.wants, strict=True)
        )


def _step(layers: _Layers, merger: DCPMerger | None) -> Callable[[], None]:
    """All layers, with merges or without."""
    gathered = [] if merger is None else [merger.gather_w_uv(one) for one in layers.weights]

    def step() -> None:
        for layer, (out, lse) in enumerate(layers.partials):
            layers.work(layer)
            if merger is not None:
                merger.merge_and_project(out, lse, gathered[layer], out=layers.results[layer], tag=layer)

    if gathered:
        # cuBLAS takes memory when a thread first comes to it: later another rank may be waiting on this GPU.
        whole = gathered[0].full
        project(layers.partials[0][0][:, : len(gathered[0].local)], gathered[0].local)
        if whole is not None:
            project(layers.partials[0][0], whole)
    layers.work(0)
    settle(layers.device)
    return step


def run(group: Any, ranks: Ranks, device: torch.device, plan: Plan, say: Callable[[str], Any]) -> Found:
    """On one rank, of a group that a `DCPMerger` takes. Collective."""
    on_gpu = device.type == "cuda"
    shape = MergeShape(
        max_tokens=plan.rows, num_heads=plan.heads, head_dim=plan.latent, v_head_dim=plan.value,
        dtype=getattr(torch, plan.dtype), lse_base="e", require_graph=on_gpu,
    )  # fmt: skip
    found = Found(torch.cuda.get_device_name(device) if on_gpu else None)
    say("making partials, weights and the oracle's results")
    layers = _Layers(plan, ranks, device)
    # Begun together on the device, or the first merge would take the lateness of a host.
    probe = Probe(ranks, device) if on_gpu else None
    begin = Gate(probe) if probe is not None else ranks.meet
    mergers: dict[str, DCPMerger | None] = {_NOTHING: None}
    steps: dict[str, Callable[[], Any]] = {}
    eager: dict[str, Callable[[], Any]] = {}

    def arrive() -> None:
        settle(device)
        ranks.meet()

    def compared(name: str) -> None:
        """One step onto poison; its results are counted against those of the oracle."""
        layers.poison()
        arrive()
        steps[name]()
        arrive()
        found.wrong[name] = found.wrong.get(name, 0) + layers.count_wrong()
        arrive()

    with torch.inference_mode():
        for contender in plan.transports:
            transport, options = named(contender)
            config = {"transport": transport, "verify": {"level": "quick"}}
            say(f"{contender}: constructing")
            ranks.meet()
            mergers[contender] = DCPMerger(
                group, shape, {**config, "options": {transport: options}} if options else config, device
            )
        for name, merger in mergers.items():
            ranks.meet()
            steps[name] = eager[name] = _step(layers, merger)
            if merger is not None:
                carrier, order = merger.transport_for(plan.rows), merger.projection_order(plan.rows)
                found.chosen[name] = f"{carrier}, W_UV {order} the merge"
                compared(name)
            if on_gpu:
                arrive()
                steps[name] = captured(eager[name], device).replay
                ranks.meet()
                if merger is not None:
                    compared(name)
        for turn in range(-_WARM, plan.rounds):
            for name in steps:
                say(f"{name}: step {max(turn, 0) + 1} of {plan.rounds}")
                for kind, call in (("us", steps[name]), *((("eager_us", eager[name]),) if on_gpu else ())):
                    settle(device)
                    eagerly = kind == "eager_us" or not on_gpu
                    (ranks.meet if eagerly else begin)()
                    us = _timed(call, device, eagerly=eagerly)
                    if turn >= 0:
                        getattr(found, kind).setdefault(name, []).append(us)
        for name, merger in mergers.items():
            if merger is not None:
                compared(name)
                merger.check()
        if isinstance(begin, Gate):
            begin.check()
        arrive()
        steps.clear()  # graphs go before what they use
        if probe is not None:
            probe.close()
        for merger in mergers.values():
            ranks.meet()
            if merger is not None:
                merger.close()
    return found


def _timed(call: Callable[[], Any], device: torch.device, *, eagerly: bool) -> float:
    """Microseconds until its last result is there: on the host's clock, or of a replay on the device's."""
    if eagerly:
        began = time.perf_counter_ns()
        call()
        settle(device)
        return (time.perf_counter_ns() - began) / 1e3
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3


@dataclass(frozen=True)
class Row:
    """Of all ranks, each step as slow as its slowest: medians of microseconds.

    Attributes:
        merges_us: what the step takes beyond the one without merges.
        spread_us: of that, by the median absolute deviations of both.
    """

    transport: str
    chosen: str
    step_us: float
    merges_us: float
    spread_us: float
    eager_step_us: float | None
    wrong: int


def rows_of(found: list[Found]) -> list[Row]:
    """For each transport."""

    def worst(kind: str, name: str) -> list[float]:
        return [max(us) for us in zip(*(getattr(one, kind)[name] for one in found), strict=True)]

    base = worst("us", _NOTHING)
    rows = []
    for name, chosen in found[0].chosen.items():
        us = worst("us", name)
        rows.append(
            Row(
                name, chosen, statistics.median(us), statistics.median(us) - statistics.median(base),
                mad(us) + mad(base), statistics.median(worst("eager_us", name)) if found[0].eager_us else None,
                sum(one.wrong[name] for one in found),
            )
        )  # fmt: skip
    return rows


def _show(plan: Plan, rows: list[Row]) -> None:
    print(
        f"{plan.layers} layers, B={plan.rows}, H={plan.heads}, L={plan.latent}, V={plan.value}, {plan.dtype}; us of a "
        "step, medians over the slowest rank"
    )
    print(f"{'':<24}{'step':>10}{'in merges':>12}{'+-':>8}{'a merge':>10}{'eager step':>12}{'#wrong':>8}")
    for row in rows:
        eager = "-" if row.eager_step_us is None else f"{row.eager_step_us:,.0f}"
        print(
            f"{row.transport:<24}{row.step_us:>10,.0f}{row.merges_us:>12,.0f}{row.spread_us:>8,.0f}"
            f"{row.merges_us / plan.layers:>10,.1f}{eager:>12}{row.wrong:>8}\n    {row.chosen}"
        )
    first, *others = rows
    for other in others:
        if first.merges_us > 0:
            print(f"{other.transport} spends {other.merges_us / first.merges_us:.2f} times as much in merges")


def _on_rank(plan: Plan, kind: str) -> Found:
    """On one rank of torchrun's."""
    ranks, device = ProcessRanks(), own_device(kind)
    return run(ranks.nccl() if kind == "cuda" else None, ranks, device, plan, emit)


def main(
    transport: Annotated[
        list[str] | None,
        typer.Option(help="auto, or a registered name, perhaps with options; repeatable; default: auto, nccl_a2a"),
    ] = None,
    ranks: Annotated[int, typer.Option(help="N, virtual ranks; under torchrun its ranks are used", min=2)] = 2,
    layers: Annotated[int, typer.Option(help="of a step", min=1)] = 61,
    rows: Annotated[int, typer.Option(help="B", min=1)] = 32,
    heads: Annotated[int, typer.Option(help="H, heads of the group", min=1)] = 128,
    latent: Annotated[int, typer.Option(help="L, columns of the partials", min=1)] = 512,
    value: Annotated[int, typer.Option(help="V, columns behind W_UV", min=1)] = 128,
    work: Annotated[int, typer.Option(help="side of each layer's other product; 0: none", min=0)] = 4096,
    rounds: Annotated[int, typer.Option(help="timed steps", min=1)] = 50,
    device: Annotated[str, typer.Option(help="cuda, or cpu under torchrun")] = "cuda",
    json_file: Annotated[Path | None, typer.Option("--json", help="write the results there")] = None,
    of_commit: Commit = None,
) -> None:
    """Time what merges take of a decode step, over each transport."""
    names = tuple(transport) if transport else ("auto", "nccl_a2a") if under_torchrun() else ("loopback_peer",)
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device {device}; expected cpu or cuda")
    if device == "cpu" and not under_torchrun():
        raise typer.BadParameter("--device cpu without torchrun; expected a process for each rank there")
    if device == "cuda":
        for one in names:
            need_gpu(one)
    plan = Plan(names, layers, rows, heads, latent, value, work, rounds=rounds)
    found: list[Found] | None
    with progress() as say:
        if under_torchrun():
            found = run_on_ranks(_on_rank, ranks, plan, device, on_event=of_rank_0(say))
        else:
            meeting, gpu = Meeting(ranks), torch.device("cuda", torch.cuda.current_device())

            def on_thread(group: LoopbackRank) -> Found:
                mine = ThreadRanks(meeting, group.rank)
                return run(group, mine, gpu, plan, say if group.rank == 0 else lambda text: None)

            found = LoopbackWorld(ranks).run(on_thread, timeout_s=_PATIENCE_S)
    if found is None:  # another rank than 0 under torchrun
        return
    made = rows_of(found)
    _show(plan, made)
    if json_file is not None:
        told = {
            **facts("dcpcomm.bench.decode_loop", [one.gpu or "" for one in found], of_commit),
            "plan": asdict(plan),
            "rows": [asdict(row) for row in made],
            "ranks": [asdict(one) for one in found],
        }
        json_file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if any(row.wrong for row in made):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
