"""`dcpcomm conformance NAME`: hold a transport, also a third party's, to the contract, case by case."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcpcomm.cli.terminal import check_file, stdout_kept_clean

if TYPE_CHECKING:
    from dcpcomm.testing.conformance import Report, Result

from dcpcomm.cli.shape import Device

__all__ = ["conformance"]

#: The fewest that show a wrong order of sources.
DEFAULT_RANKS = 3


def conformance(
    name: Annotated[str, typer.Argument(help="A name in `dcpcomm list`, or pkg.mod:Class.")],
    ranks: Annotated[int, typer.Option(help="Size of the group: local processes to start.")] = DEFAULT_RANKS,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML to this file.")] = None,
    case: Annotated[
        str | None, typer.Option(help="Only cases of this name: a part of one, or with wildcards (width-*).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the data, to repeat a report's; default: a fresh one.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="Configuration file: the transport's options, say. Its `transport` is left out.")
    ] = None,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")] = False,
) -> None:
    """Run the conformance suite on a transport: does it do what every transport must do?

    What it doesn't claim (its Capabilities) is reported as "not claimed". A transport that works between threads only
    is given threads.

    Exit status: 0 nothing failed, 1 a case failed or the transport can't work here, 2 wrong usage.
    """
    from dcpcomm.config import load_config
    from dcpcomm.errors import ConfigError
    from dcpcomm.launch import under_torchrun
    from dcpcomm.testing.conformance import CASES, cases_like, run_conformance

    if under_torchrun():
        raise ConfigError("`dcpcomm conformance` starts its own ranks; run it without torchrun, with --ranks")
    if ranks < 2:
        raise ConfigError(f"--ranks is {ranks}; expected 2 or more: one rank uses no transport")
    check_file("--junit", junit)
    given = {} if config is None else load_config(config).model_dump(mode="json", exclude_unset=True)
    cases = CASES if case is None else cases_like(case)
    if (":" in name or "." in name) and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as for `python -m`: a transport under development is no installed package
    with stdout_kept_clean(), _progress(len(cases)) as on_result:
        report = run_conformance(
            name, ranks=(ranks,), cases=cases, config=given, seed=seed, device=device, on_result=on_result
        )
    if junit is not None:
        junit.write_text(report.to_junit(), encoding="utf-8")
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        _show(report)
    if report.verdict == "FAIL":
        raise typer.Exit(1)


def _show(report: Report) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(report.table())
    for result in report.results:
        _, _, more = result.detail.partition("\n")
        if result.outcome == "failed" and more:
            console.print(Text(f"{result.case}: {result.detail}\n"))
    console.print(Text(f"{report.verdict}  ", "bold"), Text(report.summary()), sep="")


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[Result], None]]:
    """A bar on standard error while the block runs, or a line for each case where that is no terminal: of a run that is
    ended from outside they are all there is. Yields what takes results.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("starting the ranks", total=total)

        def on_result(result: Result) -> None:
            bar.update(task, advance=1, description=result.case)
            if bar.disable:
                print(f"{result.case}: {result.outcome}, {result.seconds:.1f} s", file=sys.stderr, flush=True)

        yield on_result
