"""What the benchmarks that are no command of `dcpcomm` show, and how they read options."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
import typer

from dcpcomm.bench.ours import named
from dcpcomm.launch import under_torchrun
from dcpcomm.testing.loopback import side_by_side

__all__ = ["Commit", "Contender", "need_gpu", "numbers", "of_rank_0", "progress"]

Say = Callable[[str], object]
Contender = Annotated[str, typer.Option(help="registered name, perhaps with options: cupy_ipc:threads=128,strict=true")]
Commit = Annotated[
    str | None, typer.Option("--commit", help="which the results are of, where what runs is no checkout")
]


def need_gpu(contender: str) -> None:
    """Exit with status 2 where torch sees no GPU; a contender's options are looked at first."""
    try:
        named(contender)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not under_torchrun():
        side_by_side()  # to ask for a GPU starts CUDA
    if not torch.cuda.is_available():
        print("this needs a CUDA GPU, and torch sees none", file=sys.stderr)
        raise typer.Exit(2)


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
