"""Time whole merges over transports, side by side with rivals, against the limit of the machine.

    python -m dcpcomm.bench.merge --transport loopback_peer --rivals --json merges.json     # ranks: streams of one GPU
    torchrun --nproc-per-node 2 -m dcpcomm.bench.merge --rivals --json merges.json          # a process for each GPU

Times are those of CUDA-graph replays of 20 merges, the slowest rank's; table.py says what each column means. Nothing is
timed before its result was compared with the float64 oracle. Exit status: 0, or 1 where a result was wrong, or 2 for
wrong usage.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from dcpcomm.bench.machine import commit, machine, versions
from dcpcomm.bench.measure import Answer, Say, Settings, measure
from dcpcomm.bench.ours import named
from dcpcomm.bench.ranks import Meeting, ProcessRanks, ThreadRanks
from dcpcomm.bench.table import Row, size_of, table
from dcpcomm.bench.timing import slowest
from dcpcomm.launch import emit, run_on_ranks, under_torchrun
from dcpcomm.testing.loopback import LoopbackRank, LoopbackWorld, side_by_side

__all__ = ["document", "main", "measure_processes", "measure_threads", "numbers", "of_rank_0", "progress", "rows_of"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_LOOPBACK = ("loopback_peer",)
_PATIENCE_S = 3600.0


def measure_threads(size: int, settings: Settings, say: Say) -> list[Answer]:
    """On the current GPU alone: `size` virtual ranks, each a thread with a stream."""
    world, meeting = LoopbackWorld(size), Meeting(size)

    def body(group: LoopbackRank) -> Answer:
        ranks = ThreadRanks(meeting, group.rank)
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            return measure(ranks, group, device, settings, say if group.rank == 0 else lambda text: None)
        except BaseException:
            ranks.abort()
            raise

    return world.run(body, timeout_s=_PATIENCE_S)


def measure_processes(settings: Settings) -> Answer:
    """On one rank of torchrun's, with its own GPU; the default process group must stand."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local)
    ranks = ProcessRanks()
    return measure(ranks, ranks.nccl(), torch.device("cuda", local), settings, emit)


def rows_of(answers: list[Answer], settings: Settings, *, programmatic: bool = False) -> list[Row]:
    """One row for each size and contender, from what every rank found.

    Args:
        programmatic: the limit is that of programmatic launches.
    """
    n = len(answers)
    limits = answers[0].limits
    rows = []
    for same in zip(*(answer.cases for answer in answers), strict=True):
        case = same[0]
        wrong = sum(one.wrong for one in same)
        times = [one.times for one in same if one.times is not None]
        hosts = [one.host for one in same if one.host is not None]
        nbytes = size_of(case.rows, settings.heads, settings.dim, settings.dtype.itemsize, n)
        rows.append(Row(
            nbytes, case.rows, settings.heads, settings.dim, str(settings.dtype).removeprefix("torch."), n, case.name,
            slowest(times) if len(times) == n and not wrong else None, wrong,
            limits.limit_us(nbytes, programmatic=programmatic), slowest(hosts).p50 if len(hosts) == n else None,
        ))  # fmt: skip
    return rows


def document(
    answers: list[Answer], rows: list[Row], settings: Settings, command: list[str], of_commit: str | None = None
) -> dict[str, Any]:
    """For JSON."""
    return {
        "command": shlex.join(command),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": of_commit or commit(),
        "machine": machine([answer.gpu for answer in answers]),
        "versions": versions(),
        "ranks": {"count": len(answers), "are": "processes" if under_torchrun() else "threads on one GPU"},
        "timing": {"per_graph": settings.per_graph, "replays": settings.replays, "lse_base": settings.lse_base},
        "limits": answers[0].limits.as_dict(),
        "rows": [row.as_dict() for row in rows],
        "skipped": answers[0].skipped,
    }


@contextmanager
def progress() -> Iterator[Say]:
    """Says on standard error what is measured, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    silent = not console.is_terminal or os.environ.get("RANK", "0") != "0"
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=silent) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda text: bar.update(task, description=text)


def of_rank_0(say: Say) -> Callable[[int, str], None]:
    """What `run_on_ranks` calls: only rank 0 is shown."""

    def on_event(rank: int, text: str) -> None:
        if rank == 0:
            say(text)

    return on_event


def numbers(text: str) -> tuple[int, ...]:
    """`1,4,16`, as an option has it."""
    try:
        found = tuple(int(one) for one in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r}; expected numbers with commas between, such as 1,4,16") from None
    if min(found) < 1:
        raise typer.BadParameter(f"{text!r}; expected numbers above 0")
    return found


def _all_for_processes() -> tuple[str, ...]:
    """Registered transports that say they can be captured on a GPU, between processes."""
    from dcpcomm.registry import registered_transports, try_load

    names = []
    for name in registered_transports():
        cls, _ = try_load(name)
        if cls is not None and "cuda" in cls.capabilities.devices and cls.capabilities.graph_capturable:
            names.append(name)
    return tuple(name for name in names if name not in _LOOPBACK)


def main(
    transport: Annotated[
        list[str] | None,
        typer.Option(
            help="registered name, perhaps with options (cupy_ipc:threads=256); may be repeated. Default: "
            "loopback_peer, or all that fit"
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(help="N, virtual ranks; under torchrun its ranks are used")] = 2,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    heads: Annotated[int, typer.Option(help="H, heads of the group")] = 128,
    dim: Annotated[int, typer.Option(help="D, columns merged")] = 128,
    rows: Annotated[str, typer.Option(help="B of each size")] = "1,4,16,32,64,128,256",
    lse_base: Annotated[str, typer.Option(help="e or 2")] = "e",
    rivals: Annotated[bool, typer.Option("--rivals", help="measure bench/rivals/ as well")] = False,
    programmatic_limit: Annotated[
        bool, typer.Option("--programmatic-limit", help="the limit's exchange is launched programmatically (PDL)")
    ] = False,
    per_graph: Annotated[int, typer.Option(help="merges in a graph")] = 20,
    replays: Annotated[int, typer.Option(help="timed replays")] = 30,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the results there")] = None,
    of_commit: Annotated[
        str | None, typer.Option("--commit", help="which the results are of, where what runs is no checkout")
    ] = None,
) -> None:
    """Time whole merges, side by side, against the limit of the machine."""
    from rich.console import Console

    from dcpcomm.registry import load_transport

    if dtype not in _DTYPES or lse_base not in ("e", "2"):
        raise typer.BadParameter(f"--dtype {dtype} --lse-base {lse_base}; expected one of {[*_DTYPES]} and of e, 2")
    if not under_torchrun():
        side_by_side()  # to ask for a GPU starts CUDA
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU, and torch sees none", file=sys.stderr)
        raise typer.Exit(2)
    for contender in transport or []:
        try:
            load_transport(named(contender)[0])  # says what is wrong with the name
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    names = tuple(transport or ()) or (_all_for_processes() if under_torchrun() else _LOOPBACK)
    base: Literal["e", "2"] = "e" if lse_base == "e" else "2"
    settings = Settings(
        names,
        bool(transport) or not under_torchrun(),
        rivals,
        _DTYPES[dtype],
        heads,
        dim,
        numbers(rows),
        base,
        per_graph,
        replays,
    )
    if not under_torchrun() and (ranks < 2 or heads % ranks):
        raise typer.BadParameter(f"--ranks {ranks} --heads {heads}; expected 2 ranks or more, and heads for all alike")
    answers: list[Answer] | None
    with progress() as say:
        if under_torchrun():
            answers = run_on_ranks(measure_processes, ranks, settings, on_event=of_rank_0(say))
        else:
            answers = measure_threads(ranks, settings, say)
    if answers is None:  # another rank than 0 under torchrun
        return
    found = rows_of(answers, settings, programmatic=programmatic_limit)
    where = "processes" if under_torchrun() else "virtual ranks on one GPU"
    limits = answers[0].limits
    smallest = limits.limit_us(0, programmatic=programmatic_limit)
    title = f"{len(answers)} {where}; limit: {smallest:.2f} us + bytes / {limits.bandwidth:.0f} GB/s"
    console = Console()
    # Where nobody looks, in a pipe or a log, lines are as long as they need to be.
    (console if console.is_terminal else Console(width=200)).print(table(found, title))
    for name, why in answers[0].skipped.items():
        print(f"not measured: {name}: {why}", file=sys.stderr)
    if json_file is not None:
        starter = ["python"]
        if under_torchrun():
            starter = ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", str(len(answers)))]
        command = [*starter, "-m", "dcpcomm.bench.merge", *sys.argv[1:]]
        json_file.write_text(
            json.dumps(document(answers, found, settings, command, of_commit), indent=1) + "\n", encoding="utf-8"
        )
    if any(row.wrong for row in found):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
