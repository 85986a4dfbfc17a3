"""What several commands do to keep a terminal, or a pipe, fit to read."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["bar_of_cells", "stdout_kept_clean"]


@contextlib.contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """Send what libraries write to standard output to standard error: some Gloos report connections there."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def bar_of_cells(words: str) -> Iterator[Callable[[int, tuple[str, Any]], None]]:
    """A bar on standard error while the block runs, if that is a terminal.

    Args:
        words: to be shown first.

    Yields:
        what takes the events of each rank, and shows rank 0's: ("total", cells), ("cell", words) as one begins, and
        ("text", words) for what is no cell.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    silent = not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0"  # torchrun's ranks share one terminal
    with Progress(*columns, console=console, transient=True, disable=silent) as bar:
        task = bar.add_task(words, total=None)

        def on_event(rank: int, event: tuple[str, Any]) -> None:
            kind, value = event
            if rank:
                return
            if kind == "total":
                bar.update(task, total=value, completed=-1)  # the first cell is begun, not done
            else:
                advance = 1 if kind == "cell" and bar.tasks[task].total is not None else 0
                bar.update(task, description=str(value), advance=advance)

        yield on_event
