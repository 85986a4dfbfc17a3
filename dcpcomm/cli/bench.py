"""`dcpcomm bench`: time whole merges over a sweep of shapes, checked, against the limit, rivals and an earlier run."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcpcomm.cli.shape import on_ranks
from dcpcomm.cli.terminal import bar_of_cells, check_file, stdout_kept_clean

if TYPE_CHECKING:
    from dcpcomm.bench.result import Result
    from dcpcomm.bench.sweep import Sweep

__all__ = ["bench"]

#: Field of a sweep -> its option.
_OPTIONS = {
    "rows": "--rows", "heads": "--heads", "dim": "--dim", "dtype": "--dtype", "ranks": "--ranks",
    "transport": "--transport", "projection": "--projection", "empty": "--empty", "skew_us": "--skew-us",
    "v_head_dim": "--v-head-dim", "rivals": "--rivals", "lse_base": "--lse-base", "device": "--device",
    "per_graph": "--per-graph", "replays": "--replays",
}  # fmt: skip


def bench(
    sweep: Annotated[Path | None, typer.Option(help="YAML file of what to measure; options win over it.")] = None,
    rows: Annotated[
        str | None, typer.Option(help="B of each size, with commas between; default: 1,4,16,32,64,128,256.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option("--heads", "--num-heads", help="H, of the whole group; default: 128.")
    ] = None,
    dim: Annotated[
        str | None,
        typer.Option("--dim", "--head-dim", help="D, width of a partial; L where W_UV projects; default: 128."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the partials: bfloat16, float16, float32; default: bfloat16.")
    ] = None,
    ranks: Annotated[str | None, typer.Option(help="N; default: 2, or those of torchrun.")] = None,
    transport: Annotated[
        list[str] | None,
        typer.Option(help="Name, perhaps with options (cupy_ipc:threads=256); may be repeated; default: all that fit."),
    ] = None,
    projection: Annotated[str | None, typer.Option(help="Of W_UV: none, before, after; default: none.")] = None,
    v_head_dim: Annotated[int | None, typer.Option(help="V, where W_UV projects; default: 128.")] = None,
    empty: Annotated[str | None, typer.Option(help="Share of the rows that are empty on a rank; default: 0.")] = None,
    skew_us: Annotated[
        str | None, typer.Option(help="Microseconds that one rank comes later to each merge; default: 0.")
    ] = None,
    rivals: Annotated[bool, typer.Option("--rivals", help="Measure bench/rivals/ as well.")] = False,
    lse_base: Annotated[str | None, typer.Option(help="Of the LSE: e or 2; default: e.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    per_graph: Annotated[
        int | None, typer.Option(help="Merges in a graph; default: 20. On CPU calls are timed one by one.")
    ] = None,
    replays: Annotated[int | None, typer.Option(help="Timed replays, on CPU calls; default: 30, on CPU 200.")] = None,
    programmatic_limit: Annotated[
        bool, typer.Option("--programmatic-limit", help="The limit's exchange is launched programmatically (PDL).")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result there.")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write the rows there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture there: .png, .svg or .pdf.")] = None,
    compare: Annotated[Path | None, typer.Option(help="Hold the result against this earlier one.")] = None,
    recorded: Annotated[
        Path | None, typer.Option("--from", help="Measure nothing: report this result of an earlier run.")
    ] = None,
    of_commit: Annotated[
        str | None, typer.Option("--commit", help="Which the result is of, where what runs is no checkout.")
    ] = None,
) -> None:
    """Time whole merges over a sweep: every combination of the values below.

    Each result is compared with the float64 oracle before it is timed, and after. What is wrong
    has no time. The limit is measured in the same run. docs/benchmark.md defines every column.

    Exit status: 0 fine, 1 a result was wrong, nothing or a named transport couldn't be measured at
    all, or (--compare) a cell regressed or was lost, 2 wrong usage.
    """
    from rich.console import Console

    from dcpcomm.bench.compare import compare as held_against
    from dcpcomm.bench.report import show, show_comparison
    from dcpcomm.bench.result import Result

    given = {
        "rows": rows, "heads": heads, "dim": dim, "dtype": dtype, "ranks": ranks, "transport": transport or None,
        "projection": projection, "v_head_dim": v_head_dim, "empty": empty, "skew_us": skew_us,
        "rivals": rivals or None, "lse_base": lse_base, "device": device, "per_graph": per_graph, "replays": replays,
    }  # fmt: skip
    options = {field: (_OPTIONS[field], value) for field, value in given.items() if value is not None}
    _check_files(json_file, csv_file, plot)
    old = Result.read(compare) if compare is not None else None
    asked: tuple[str, ...] = ()
    if recorded is not None:
        _alone(sweep, programmatic_limit, of_commit, options)
        result: Result | None = Result.read(recorded)
    else:
        from dcpcomm.bench.sweep import read_sweep

        plan = read_sweep(sweep, options)
        asked = plan.transport
        result = _measured(plan, programmatic_limit, of_commit)
    if result is None:  # another rank than 0 under torchrun
        return
    console = Console()
    console = console if console.is_terminal else Console(width=120)
    show(result, console)
    _write(result, json_file, csv_file, plot)
    missing = [name for name in asked if not any(row.transport == name for row in result.rows)]
    for name in missing:
        console.print(f"{name} was asked for, and could not be measured in any cell", style="bold red", markup=False)
    if not result.rows:
        console.print("nothing was measured", style="bold red")
    failed = bool(missing) or not result.rows or any(row.wrong for row in result.rows)
    if old is not None:
        comparison = held_against(old, result)
        show_comparison(comparison, old, console)
        failed = failed or comparison.failed
    if failed:
        raise typer.Exit(1)


def _check_files(json_file: Path | None, csv_file: Path | None, plot: Path | None) -> None:
    """What can't be written is said before anything is measured."""
    from dcpcomm.bench.plots import check_plot

    for option, file in (("--json", json_file), ("--csv", csv_file), ("--plot", plot)):
        check_file(option, file)
    if plot is not None:
        check_plot(plot)


def _alone(sweep: Path | None, programmatic: bool, of_commit: str | None, options: dict[str, Any]) -> None:
    """No setting is silently ignored."""
    from dcpcomm.errors import ConfigError

    others = [option for option, _ in options.values()]
    others += ["--sweep"] * (sweep is not None) + ["--programmatic-limit"] * programmatic
    others += ["--commit"] * (of_commit is not None)
    if others:
        raise ConfigError(
            f"--from measures nothing, so {', '.join(others)} would change nothing; leave one of them out"
        )


def _measured(plan: Sweep, programmatic: bool, of_commit: str | None) -> Result | None:
    from dcpcomm.bench.run import place_of, run

    place = place_of(plan.device)
    starter = ["dcpcomm"]
    if place.world is not None:
        starter = ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", str(place.world))]
        starter += ["--no-python", "dcpcomm"]
    command = shlex.join([*starter, *sys.argv[1:]])
    with stdout_kept_clean(), bar_of_cells("starting") as on_event:
        return run(
            plan, place, command, lambda event: on_event(0, event), on_ranks, programmatic=programmatic,
            of_commit=of_commit,
        )  # fmt: skip


def _write(result: Result, json_file: Path | None, csv_file: Path | None, plot: Path | None) -> None:
    from dcpcomm.bench.table import as_csv

    if json_file is not None:
        json_file.write_text(json.dumps(result.as_dict(), indent=1) + "\n", encoding="utf-8")
    if csv_file is not None:
        csv_file.write_text(as_csv(result.rows), encoding="utf-8")
    if plot is not None:
        from dcpcomm.bench.plots import save

        save(result, plot)
