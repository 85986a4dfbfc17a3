"""A whole merge over Gloo against a bare packed all_to_all_single of the same bytes.

    python -m dcpcomm.bench.gloo_merge --json bench/results/gloo_merge_cpu.json

Both are timed in turns in the same processes, so that what else the machine does hits both, and both into memory that
is there already; a round's time is the slowest rank's. Before any timing the merge is compared with the float64 oracle,
on fresh random data.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import dcpcomm
from dcpcomm.bench.machine import processor
from dcpcomm.combine.wire import row_bytes
from dcpcomm.launch import emit, run_on_ranks

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
LIMIT = 1.5  # times the bare exchange that a whole merge may take
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def measure(rows: int, heads: int, dim: int, dtype_name: str, rounds: int) -> dict[str, list[float]]:
    """On one rank: seconds of each round, "bare" and "merge"."""
    dtype = _DTYPES[dtype_name]
    rank, n = dist.get_rank(), dist.get_world_size()
    shape = dcpcomm.MergeShape(max_tokens=rows, num_heads=heads, head_dim=dim, dtype=dtype, lse_base="e")
    block = (1 + rows * heads // n) * row_bytes(dim, dtype.itemsize)
    send = torch.randint(0, 256, (n * block,), dtype=torch.uint8)
    recv = torch.empty_like(send)
    seconds: dict[str, list[float]] = {"bare": [], "merge": []}
    with dcpcomm.DCPMerger(None, shape, {"transport": "gloo_a2a"}, device="cpu") as merger:
        _check(merger, rows, heads, dim, dtype)
        partial_out, partial_lse = torch.randn(rows, heads, dim).to(dtype), torch.randn(rows, heads)
        out = torch.empty(rows, heads // n, dim, dtype=dtype)
        for turn in range(rounds + rounds // 5):
            for what in ("bare", "merge"):
                # Arrive together: what is timed is the exchange, not how late the other rank was.
                dist.barrier()
                start = time.perf_counter()
                if what == "bare":
                    dist.all_to_all_single(recv, send)
                else:
                    merger.merge(partial_out, partial_lse, out=out)
                if turn >= rounds // 5:
                    seconds[what].append(time.perf_counter() - start)
            if rank == 0 and turn % 50 == 0:
                emit(turn)
    return seconds


def _check(merger: dcpcomm.DCPMerger, rows: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(time.time_ns() & 0xFFFF if rank == 0 else 0)
    outs = torch.randn(n, rows, heads, dim, generator=generator).to(dtype)
    lses = torch.randn(n, rows, heads, generator=generator)
    dist.broadcast(outs, 0)
    dist.broadcast(lses, 0)
    got = merger.merge(outs[rank], lses[rank]).double()
    want = dcpcomm.reference.merge_partials(outs, lses, lse_base="e")[0][rank]
    error = float((got - want).abs().max() / want.abs().max())
    if not error < _TOLERANCE[dtype]:
        raise dcpcomm.DCPCommError(
            f"rank {rank}: the merge is off by {error:.2e} of the largest value: nothing was timed"
        )


def _together(launches: tuple[dict[str, list[float]], ...]) -> dict[str, list[float]]:
    """One rank's rounds of all launches."""
    return {what: [time for launch in launches for time in launch[what]] for what in launches[0]}


def summary(per_rank: list[dict[str, list[float]]]) -> dict[str, float]:
    """Microseconds over the rounds, each round being as slow as its slowest rank."""
    result: dict[str, float] = {}
    for what in ("bare", "merge"):
        slowest = [max(times) * 1e6 for times in zip(*(rank[what] for rank in per_rank), strict=True)]
        middle = statistics.median(slowest)
        result[f"{what}_p50_us"] = round(middle, 1)
        result[f"{what}_p99_us"] = round(statistics.quantiles(slowest, n=100)[98], 1)
        result[f"{what}_mad_us"] = round(statistics.median(abs(t - middle) for t in slowest), 1)
    result["ratio"] = round(result["merge_p50_us"] / result["bare_p50_us"], 3)
    return result


def main(
    rows: Annotated[int, typer.Option(help="B, rows of a step")] = 32,
    heads: Annotated[int, typer.Option(help="H, heads of the group")] = 64,
    dim: Annotated[int, typer.Option(help="D, columns merged")] = 128,
    ranks: Annotated[int, typer.Option(min=2, help="N, local processes")] = 2,
    rounds: Annotated[int, typer.Option(min=10, help="timed rounds of each, in each launch")] = 400,
    launches: Annotated[int, typer.Option(min=1, help="times to start new processes; their rounds count together")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
) -> None:
    """Time both, for every dtype, print a table, and exit 1 where a merge takes over 1.5 times the bare exchange."""
    from rich.console import Console
    from rich.table import Table

    if heads % ranks:
        raise typer.BadParameter(f"--heads {heads} don't divide over --ranks {ranks}")
    results: dict[str, Any] = {
        "command": f"python -m dcpcomm.bench.gloo_merge --rows {rows} --heads {heads} --dim {dim} --ranks {ranks} "
        f"--rounds {rounds} --launches {launches}",
        "machine": {
            "cpu": processor(),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "load": os.getloadavg()[0],
        },
        "versions": {
            "dcpcomm": dcpcomm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "shape": {"rows": rows, "heads": heads, "dim": dim, "ranks": ranks, "rounds": rounds, "launches": launches},
        "dtypes": {},
    }
    table = Table(
        "dtype",
        "bare p50 us",
        "mad",
        "merge p50 us",
        "mad",
        "merge / bare",
        title="whole merge over Gloo against the bare exchange",
    )
    # Where a process's memory happens to lie is worth a tenth: dtypes in turns, each in new processes every time.
    timed: dict[str, list[list[dict[str, list[float]]]]] = {dtype: [] for dtype in _DTYPES}
    for _ in range(launches):
        for dtype, of_launches in timed.items():
            per_rank = run_on_ranks(measure, ranks, rows, heads, dim, dtype, rounds)
            assert per_rank is not None
            of_launches.append(per_rank)
    for dtype, per_launch in timed.items():
        found_by_rank = [_together(of_rank) for of_rank in zip(*per_launch, strict=True)]
        found = summary(found_by_rank)
        results["dtypes"][dtype] = found
        table.add_row(
            dtype,
            *(str(found[key]) for key in ("bare_p50_us", "bare_mad_us", "merge_p50_us", "merge_mad_us", "ratio")),
        )
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if any(found["ratio"] > LIMIT for found in results["dtypes"].values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
