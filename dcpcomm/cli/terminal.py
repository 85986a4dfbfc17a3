"""What several commands do to keep a terminal, or a pipe, fit to read."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["bar_of_cells", "check_cache_folder", "check_file", "stdout_kept_clean"]


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


def check_file(option: str, path: Path | None) -> None:
    """Say before anything is done that a result can't be written where `option` wants it.

    Raises:
        ConfigError: there is no such folder, `path` is one itself, or it can't be written to.
    """
    from dcpcomm.errors import ConfigError

    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {folder}")
    if path.is_dir():
        raise ConfigError(f"{option} {path}: that is a folder; expected a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{option} {path}: it can't be written")


def check_cache_folder() -> None:
    """Say before anything is done that what is to be kept can't be.

    Raises:
        ConfigError: the cache folder can't be made, or can't be written to.
    """
    from dcpcomm.cachefolder import cache_dir
    from dcpcomm.errors import ConfigError

    folder = cache_dir()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"the cache folder {folder} can't be written: {error.strerror or error}; expected one that can: set "
            "DCPCOMM_CACHE_DIR"
        ) from error
