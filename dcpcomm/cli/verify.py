"""`dcpcomm verify`: prove transports on this machine, by sending patterns and comparing every bit."""

from __future__ import annotations

import json
import time
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcpcomm.cli.shape import (
    Base,
    Channels,
    Device,
    Dtype,
    DtypeOption,
    HeadDim,
    Heads,
    LseBase,
    Ranks,
    Scatter,
    ScatterOption,
    Tokens,
    VHeadDim,
    make_shape,
    on_ranks,
    world_size,
)

if TYPE_CHECKING:
    from dcpcomm.transport import MergeShape

__all__ = ["prove", "verify"]

_UNUSABLE, _WRONG, _PROVEN = "unusable", "WRONG", "proven"


class Level(str, Enum):
    """how much is sent"""

    quick = "quick"
    standard = "standard"
    soak = "soak"


def verify(
    names: Annotated[list[str] | None, typer.Argument(help="Registered transports; default: all of them.")] = None,
    ranks: Ranks = 2,
    level: Annotated[
        Level, typer.Option(help="How much is sent; soak: what it declares, else a GiB or 1000 exchanges.")
    ] = Level.soak,
    deadline_s: Annotated[float, typer.Option(help="Seconds for each transport.")] = 120.0,
    max_tokens: Tokens = 256,
    num_heads: Heads = 128,
    head_dim: HeadDim = 512,
    v_head_dim: VHeadDim = None,
    dtype: DtypeOption = Dtype.bfloat16,
    lse_base: LseBase = Base.e,
    scatter: ScatterOption = Scatter.heads,
    channels: Channels = 1,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")] = False,
) -> None:
    """Prove one or all transports on this machine.

    Every bit of known patterns is compared after it has travelled through the calls that merges use. A soak's verdict
    is remembered, so that constructions need not repeat it.

    Exit status: 0 all that can be used is proven, 1 wrong bits or a named transport that can't be used, 2 wrong usage.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from rich.text import Text

    from dcpcomm.errors import ConfigError
    from dcpcomm.registry import load_transport, registered_transports

    shape = make_shape(max_tokens, num_heads, head_dim, v_head_dim, dtype, lse_base, scatter, channels, ranks)
    if world_size(ranks) < 2:
        raise ConfigError(f"--ranks is {ranks}; expected 2 or more: one rank uses no transport")
    for name in names or []:
        load_transport(name)  # says what is wrong with the name before any process is started
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"starting {ranks} ranks", total=None)
        answers = on_ranks(
            prove,
            ranks,
            shape,
            list(names or registered_transports()),
            level.value,
            deadline_s,
            device,
            on_event=lambda rank, event: bar.update(task, description=str(event)),
        )
    if answers is None:  # another rank than 0 under torchrun
        return
    rows = answers[0]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        table = Table("transport", "verdict", "seconds", "why")
        for row in rows:
            style = {_PROVEN: "green", _WRONG: "bold red"}.get(row["verdict"], "yellow")
            table.add_row(row["name"], Text(row["verdict"], style), f"{row['seconds']:.1f}", Text(row["why"]))
        Console().print(table)
    if any(row["verdict"] == _WRONG or (names and row["verdict"] == _UNUSABLE) for row in rows):
        raise typer.Exit(1)


def prove(
    shape: MergeShape, names: list[str], level: str, deadline_s: float, device: str | None
) -> list[dict[str, Any]]:
    """On one rank: a row for each transport."""
    from dcpcomm.errors import TransportUnavailable, VerificationFailed
    from dcpcomm.launch import emit, own_device
    from dcpcomm.merger import DCPMerger

    rows, own = [], own_device(device)
    for name in names:
        emit(f"verifying {name}")
        started = time.monotonic()
        config = {"transport": name, "verify": {"level": level, "deadline_s": deadline_s}}
        verdict, why = _PROVEN, ""
        try:
            DCPMerger(None, shape, config, own).close()
        except VerificationFailed as error:
            verdict, why = _WRONG, _reason(error)
        except TransportUnavailable as error:
            verdict, why = _UNUSABLE, _reason(error)
        rows.append({"name": name, "verdict": verdict, "seconds": round(time.monotonic() - started, 3), "why": why})
    return rows


def _reason(error: Exception) -> str:
    """The line of the error that names the stage, without the lead-in that says a named transport was asked for."""
    return str(error).splitlines()[-1].strip()
