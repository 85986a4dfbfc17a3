"""What one eager merge costs the host, beside what anything costs it there: a torch operation, an empty kernel.

    python -m dcpcomm.bench.host_time --transport loopback_peer --json host.json      # ranks: streams of one GPU
    torchrun --nproc-per-node 2 -m dcpcomm.bench.host_time --transport cupy_ipc --json host.json

The ranks are timed in turn. Meanwhile the others replay their parts of the same merges from a graph, so that no thread
of this process competes with the timed one, and no rank waits for another's host. Exit status: 0, or 1 where a result
was wrong, or 2 for wrong usage.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dcpcomm.bench.checked import count_wrong
from dcpcomm.bench.console import Commit, Contender, need_gpu
from dcpcomm.bench.kernels import KernelFile
from dcpcomm.bench.limits import SpinParams, defines
from dcpcomm.bench.machine import facts
from dcpcomm.bench.ours import named
from dcpcomm.bench.ranks import Meeting, ProcessRanks, Ranks, ThreadRanks
from dcpcomm.bench.timing import percentile, settle
from dcpcomm.graphs import captured
from dcpcomm.launch import own_device, run_on_ranks, under_torchrun
from dcpcomm.merger import DCPMerger
from dcpcomm.reference import merge_partials
from dcpcomm.testing.loopback import LoopbackRank, LoopbackWorld
from dcpcomm.transport import MergeShape

__all__ = ["Found", "Plan", "main", "run"]

_DEPTH = 16  # calls in flight at the most: a full queue would make the host wait for the device
_PATIENCE_S = 600.0


@dataclass(frozen=True)
class Plan:
    """What is timed; the same on all ranks.

    Attributes:
        contender: a transport, perhaps with options (`ours.named`).
        rounds: of `_DEPTH` calls each.
    """

    contender: str
    rows: int = 32
    heads: int = 128
    dim: int = 128
    dtype: str = "bfloat16"
    rounds: int = 50


@dataclass(frozen=True)
class Found:
    """What one rank found.

    Attributes:
        us: by what was called: median, 90th percentile and least of microseconds until the call had returned.
        wrong: words of its results.
    """

    gpu: str
    us: dict[str, tuple[float, float, float]]
    wrong: int


def run(group: Any, ranks: Ranks, device: torch.device, plan: Plan, empty: Callable[[], Any] | None = None) -> Found:
    """On one rank, of a group that a `DCPMerger` takes. Collective.

    Args:
        empty: launches an empty kernel; None where there are none.
    """
    rank, size = ranks.rank, ranks.size
    dtype = getattr(torch, plan.dtype)
    shape = MergeShape(
        max_tokens=plan.rows, num_heads=plan.heads, head_dim=plan.dim, dtype=dtype, lse_base="e"
    )  # fmt: skip
    transport, options = named(plan.contender)
    config: dict[str, Any] = {"transport": transport, "verify": {"level": "quick"}}
    if options:
        config["options"] = {transport: options}
    generator = torch.Generator().manual_seed(ranks.gather(secrets.randbelow(2**31))[0])
    outs = torch.randn(size, plan.rows, plan.heads, plan.dim, generator=generator).to(dtype)
    lses = torch.randn(size, plan.rows, plan.heads, generator=generator)
    want = merge_partials(outs, lses, lse_base="e")[0][rank]
    out, lse = outs[rank].to(device), lses[rank].to(device)
    counts = torch.ones(plan.rows, dtype=torch.int32, device=device)
    into, number = torch.full(want.shape, torch.nan, dtype=dtype, device=device), torch.zeros(1, device=device)
    found: dict[str, tuple[float, float, float]] = {}
    with torch.inference_mode(), DCPMerger(group, shape, config, device) as merger:
        alone: dict[str, Callable[[], Any]] = {"torch: x.add_(1)": lambda: number.add_(1)}
        if empty is not None:
            alone["an empty kernel"] = empty
        merges: dict[str, Callable[[], Any]] = {
            "merge(out=)": lambda: merger.merge(out, lse, out=into),
            "merge": lambda: merger.merge(out, lse),
            "merge(return_lse=True)": lambda: merger.merge(out, lse, return_lse=True),
            "merge(valid_counts=, out=)": lambda: merger.merge(out, lse, valid_counts=counts, out=into),
        }
        for call in (*alone.values(), *merges.values()):
            call()
        settle(device)
        ranks.meet()

        def turn() -> None:
            for _ in range(_DEPTH):
                merger.merge(out, lse, out=into)

        graph = captured(turn, device)
        ranks.meet()
        for timed in range(size):
            for what, call in alone.items():
                if timed == rank:
                    found[what] = _summary([us for _ in range(plan.rounds) for us in _timed(call, device)])
                ranks.meet()
            for what, call in merges.items():
                us: list[float] = []
                for _ in range(plan.rounds + 1):  # the first warms
                    if timed == rank:
                        us += _timed(call, device)
                    else:
                        graph.replay()
                        settle(device)
                    ranks.meet()
                if timed == rank:
                    found[what] = _summary(us[_DEPTH:])
        into.fill_(torch.nan)
        settle(device)
        ranks.meet()
        merger.merge(out, lse, out=into)
        settle(device)
        merger.check()
        wrong = count_wrong(into.cpu(), want)
        ranks.meet()
        del graph
    return Found(torch.cuda.get_device_name(device) if device.type == "cuda" else "none", found, wrong)


def _timed(call: Callable[[], Any], device: torch.device) -> list[float]:
    us = []
    for _ in range(_DEPTH):
        began = time.perf_counter_ns()
        call()
        us.append((time.perf_counter_ns() - began) / 1e3)
    settle(device)
    return us


def _summary(us: list[float]) -> tuple[float, float, float]:
    return round(percentile(us, 0.5), 2), round(percentile(us, 0.9), 2), round(min(us), 2)


def _on_gpu(group: Any, ranks: Ranks, device: torch.device, plan: Plan) -> Found:
    file = KernelFile("limits.cu", defines(), device)
    nothing = file.bind("nothing", (1, 1, 32, 1), SpinParams())
    stream = torch.cuda.current_stream(device).cuda_stream
    try:
        return run(group, ranks, device, plan, lambda: nothing(stream))
    finally:
        settle(device)
        file.close()


def _on_rank(plan: Plan) -> Found:
    """On one rank of torchrun's."""
    ranks, device = ProcessRanks(), own_device("cuda")
    return _on_gpu(None, ranks, device, plan)


def main(
    transport: Contender,
    ranks: Annotated[int, typer.Option(help="N, virtual ranks; under torchrun its ranks are used", min=2)] = 2,
    rows: Annotated[int, typer.Option(help="B", min=1)] = 32,
    heads: Annotated[int, typer.Option(help="H, heads of the group", min=1)] = 128,
    dim: Annotated[int, typer.Option(help="D, columns merged", min=1)] = 128,
    rounds: Annotated[int, typer.Option(help=f"of {_DEPTH} calls each", min=1)] = 50,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the results there")] = None,
    of_commit: Commit = None,
) -> None:
    """Time what an eager merge costs the host."""
    need_gpu(transport)
    plan = Plan(transport, rows, heads, dim, rounds=rounds)
    found: list[Found] | None
    if under_torchrun():
        found = run_on_ranks(_on_rank, ranks, plan)
    else:
        meeting, device = Meeting(ranks), torch.device("cuda", torch.cuda.current_device())

        def on_thread(group: LoopbackRank) -> Found:
            return _on_gpu(group, ThreadRanks(meeting, group.rank), device, plan)

        found = LoopbackWorld(ranks).run(on_thread, timeout_s=_PATIENCE_S)
    if found is None:  # another rank than 0 under torchrun
        return
    print(f"{transport}, B={rows}, H={heads}, D={dim}: us on the host, p50 p90 min, by rank")
    for what in found[0].us:
        print(f"{what:28}" + "   ".join("{:7.2f}{:7.2f}{:7.2f}".format(*one.us[what]) for one in found))
    wrong = sum(one.wrong for one in found)
    print(f"{wrong} wrong words")
    if json_file is not None:
        told = {
            **facts("dcpcomm.bench.host_time", [one.gpu for one in found], of_commit),
            "plan": asdict(plan),
            "columns": ["p50", "p90", "min"],
            "ranks": [asdict(one) for one in found],
        }
        json_file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
