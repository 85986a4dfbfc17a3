"""`dcpcomm probe`: what this machine offers, and what each transport makes of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from dcpcomm.cli.shape import Device

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dcpcomm.machine import Machine
    from dcpcomm.probe import Probed

__all__ = ["print_probed", "probe"]


def probe(
    ranks: Annotated[
        int | None,
        typer.Option(min=2, help="N, group to judge for; default: one rank for each visible GPU, 2 at least."),
    ] = None,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")] = False,
) -> None:
    """What this machine offers: GPUs, links, libraries, rights, and each transport's verdict.

    Nothing is connected or sent; `dcpcomm verify` proves what could be used. Works without a GPU. The configuration is
    that of DCPCOMM_CONFIG, if it is set.
    """
    import torch

    from dcpcomm import probe as probing
    from dcpcomm.config import load_config
    from dcpcomm.errors import ConfigError

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda was asked for, and torch sees no GPU here; leave it out to probe all the same")
    found = probing.probe(ranks, device, load_config())
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
        return
    from rich.console import Console

    print_probed(found, Console(highlight=False))


def print_probed(found: Probed, console: Console) -> None:
    """For people."""
    from rich.text import Text

    machine = found.machine
    driver = f"driver {machine.driver}, for CUDA {machine.driver_cuda}" if machine.driver else "no driver seen"
    console.print(Text(f"{machine.device}; {len(machine.gpus)} GPU(s), {driver}"))
    for gap in machine.gaps:
        console.print(Text(f"not known: {gap}"))
    if machine.gpus:
        console.print(_gpus(found))
        if len(machine.gpus) > 1:
            console.print(_links(machine))
            for pair in machine.pairs:
                if pair.access is False:
                    a, b = machine.gpu(pair.a), machine.gpu(pair.b)
                    assert a is not None
                    assert b is not None
                    console.print(Text(f"GPU {a.index} and GPU {b.index}: no peer access: {pair.reason}"))
        console.print(Text(f"IMEX channels: {', '.join(machine.imex) or 'none'}"))
    for table in (_libraries(found), _rights(found), _transports(found)):
        console.print()
        console.print(table)
    console.print()
    for note in found.tables or ("cost tables: none fits this machine and group; `dcpcomm tune` measures one",):
        console.print(Text(note))


def _table(*columns: str, title: str) -> Table:
    from rich.table import Table

    return Table(
        *columns, title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False,
        padding=(0, 2, 0, 0),
    )  # fmt: skip


def _gpus(found: Probed) -> Table:
    table = _table("", "GPU", "arch", "UUID", "CUDA", "fabric", title="")
    for gpu in found.machine.gpus:
        seen = str(found.visible.index(gpu.uuid)) if gpu.uuid in found.visible else "hidden"
        fabric = gpu.fabric.state if gpu.fabric else "?"
        table.add_row(str(gpu.index), gpu.name, gpu.architecture, gpu.uuid, seen, fabric)
    return table


def _links(machine: Machine) -> Table:
    """As `nvidia-smi topo -m`; a "!" where there is no peer access, a "?" where it isn't known."""
    table = _table("", *(str(gpu.index) for gpu in machine.gpus), title="links (! no peer access, ? access not known)")
    for a in machine.gpus:
        row = [str(a.index)]
        for b in machine.gpus:
            pair = machine.pair(a.uuid, b.uuid)
            mark = "" if pair is None else {True: "", False: "!", None: "?"}[pair.access]
            row.append("x" if a is b else "?" if pair is None else pair.link.removesuffix("?") + mark or "?")
        table.add_row(*row)
    return table


def _libraries(found: Probed) -> Table:
    from rich.text import Text

    table = _table("library", "loaded", "installed", "", title="")
    for one in found.libraries:
        table.add_row(one.name, Text(one.loaded or "-"), Text(one.installed or "-"), Text(one.note))
    return table


def _rights(found: Probed) -> Table:
    from rich.text import Text

    table = _table("right", "", "seen", "needed by", title="")
    for one in found.rights:
        state = {True: Text("yes", "green"), False: Text("no", "yellow"), None: Text("?")}[one.ok]
        said = one.said if not one.remedy else f"{one.said}; {one.remedy}"
        table.add_row(one.name, state, Text(said), Text(one.needed_by))
    return table


def _transports(found: Probed) -> Table:
    from rich.text import Text

    where = "GPU" if found.device == "cuda" else "CPU"
    table = _table(
        "transport",
        "usable",
        "why not, and what to do",
        title=f"for {found.ranks} ranks on {where}; `dcpcomm verify` proves it",
    )
    for one in found.transports:
        style = {"yes": "green", "if named": "cyan"}.get(one.verdict, "yellow")
        why = one.reason if not one.remedy else f"{one.reason}; {one.remedy}"
        table.add_row(one.name, Text(one.verdict, style), Text(why))
    return table
