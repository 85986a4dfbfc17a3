"""`dcpcomm tune`: verify, measure this machine, and write the cost table that merges are then priced by."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcpcomm.cli.shape import Device, Dtype, DtypeOption, HeadDim, Heads, Ranks, VHeadDim, on_ranks, world_size
from dcpcomm.cli.terminal import bar_of_cells, check_cache_folder, check_file, stdout_kept_clean

if TYPE_CHECKING:
    from dcpcomm.bench.renewal import Renewal
    from dcpcomm.bench.tune import Measured, Plan

__all__ = ["tune"]

_PATIENCE_S = 24 * 3600.0


def tune(
    ranks: Ranks = 2,
    transport: Annotated[
        list[str] | None, typer.Option(help="Registered name; may be repeated. Default: all that could be chosen here.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration file: the transports' options, say.")] = None,
    num_heads: Heads = 128,
    head_dim: HeadDim = 512,
    v_head_dim: VHeadDim = 128,
    dtype: DtypeOption = Dtype.bfloat16,
    rows: Annotated[str, typer.Option(help="B of each size, with commas between.")] = "1,4,16,32,64,128,256",
    passes: Annotated[int, typer.Option(min=1, help="Over all sizes; prices' spread is that between passes.")] = 5,
    rounds: Annotated[int, typer.Option(min=3, help="Timings of each size in a pass.")] = 20,
    device: Device = None,
    output: Annotated[
        Path | None, typer.Option(help="The table's file; default: where `cost_table: auto` finds it.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget the old table, and what an interrupted run had measured.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")] = False,
) -> None:
    """Measure this machine, so that `auto` chooses by its own figures.

    Every transport is verified first; what is wrong is not timed. An interrupted run goes on where it was, if it is
    started again in the same way. A figure that comes out as before, within noise, stays as it is: tuning again
    changes no decision for nothing.

    Exit status: 0 the table is written, 1 nothing can be measured or a result was wrong, 2 wrong usage.
    """
    from dcpcomm.bench.tune import Plan, measure
    from dcpcomm.config import load_config
    from dcpcomm.errors import ConfigError
    from dcpcomm.registry import load_transport

    check_file("--output", output)
    check_cache_folder()  # it keeps what is measured, for a run that is interrupted
    for name in transport or []:
        load_transport(name)  # says what is wrong with the name before any process is started
    given = {} if config is None else load_config(config).model_dump(mode="json", exclude_unset=True)
    try:
        sizes = tuple(sorted({int(one) for one in rows.split(",")}))
    except ValueError:
        sizes = ()
    if not sizes or sizes[0] < 1:
        raise ConfigError(f"--rows is {rows!r}; expected numbers above 0 with commas between, such as 1,4,16")
    size = world_size(ranks)
    if size < 2:
        raise ConfigError(f"--ranks is {size}; expected 2 or more: one rank exchanges nothing")
    value = v_head_dim if v_head_dim != head_dim else None
    plan = Plan(
        tuple(transport or ()), given, num_heads, head_dim, value, dtype.value, sizes, passes, rounds, device, fresh
    )
    plan.shape(head_dim).check_world_size(size)
    with stdout_kept_clean(), bar_of_cells(f"starting {size} ranks") as on_event:
        answers = on_ranks(measure, ranks, plan, on_event=on_event, timeout_s=_PATIENCE_S)
    if answers is None:  # another rank than 0 under torchrun
        return
    path, renewal = _write(answers[0], plan, output)
    if as_json:
        print(json.dumps(_facts(answers[0], path, renewal), indent=2))
    else:
        _show(answers[0], path, renewal, output is not None)


def _write(measured: Measured, plan: Plan, output: Path | None) -> tuple[Path, Renewal]:
    """Write the table over what was there."""
    from dcpcomm import costtable
    from dcpcomm.bench.renewal import renew
    from dcpcomm.bench.tune import journal_of
    from dcpcomm.cachefolder import write_whole
    from dcpcomm.cost import tuned_path
    from dcpcomm.errors import ConfigError

    path, old = output or tuned_path(measured.key), None
    if path.exists() and not plan.fresh:
        with contextlib.suppress(ConfigError):  # a damaged one is written anew
            old = costtable.read(path)
    stamp = f"dcpcomm tune, {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}"
    renewal = renew(old, measured.table.model_copy(update={"sources": (stamp,)}))
    text = "# Written by `dcpcomm tune`, which renews it.\n" + costtable.dump(renewal.table)
    if output is None:
        write_whole(path, text)
    else:
        path.write_text(text, encoding="utf-8")  # with the rights that the user's files have: it may be to share
    journal_of(plan, measured.key).end()
    return path, renewal


def _facts(measured: Measured, path: Path, renewal: Renewal) -> dict[str, Any]:
    return {
        "file": str(path),
        "key": measured.key.model_dump(),
        "skipped": measured.skipped,
        "resumed": measured.resumed,
        "kept": renewal.kept,
        "added": renewal.added,
        "changed": list(renewal.changed),
        "dropped": renewal.dropped,
        "table": renewal.table.model_dump(mode="json", exclude_defaults=True),
    }


def _show(measured: Measured, path: Path, renewal: Renewal, elsewhere: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    key = measured.key
    table = Table(
        "", "dtype", "at", "us", "spread", title=f"{key.device}, {key.ranks} ranks, link {key.link}", box=None
    )
    for column in table.columns[2:]:
        column.justify = "right"
    for name, by in measured.table.merges.items():
        for dtype, rows in by.items():
            for row in rows:
                table.add_row(name, dtype, _bytes(row.wire_bytes), f"{row.median_us:.1f}", f"{row.mad_us:.1f}")
    for dtype, ones in measured.table.projections.items():
        for one in ones:
            for line in one.rows:
                what = f"W_UV, {one.heads} heads"
                table.add_row(what, dtype, f"{line.tokens} rows", f"{line.median_us:.1f}", f"{line.mad_us:.1f}")
    console = Console(highlight=False)
    console.print(table)
    for name, why in measured.skipped.items():
        print(f"not measured: {name}: {why}")
    if measured.resumed:
        print(f"{measured.resumed} timings were taken from a run that was interrupted")
    if renewal.dropped:
        print(f"the old table went: {renewal.dropped}")
    print(f"{renewal.added} new figures, {renewal.kept} as before within noise, {len(renewal.changed)} changed")
    for one_line in renewal.changed:
        print(f"  {one_line}")
    found = f"name it: `cost_table: {path}`" if elsewhere else "`cost_table: auto` finds it"
    print(f"written to {path}; {found}")


def _bytes(count: int) -> str:
    return f"{count >> 10} KiB" if count >= 1024 else f"{count} B"
