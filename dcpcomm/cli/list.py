"""`dcpcomm list`: which transports are registered, where each came from, and whether its class can be loaded
here.

Only imports are tried. Whether a transport works on this machine is `check`'s business, and costs more.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

__all__ = ["list_transports"]


def list_transports(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")] = False,
) -> None:
    """Registered transports, where each came from, installed or not."""
    from dcpcomm.registry import registered_transports, try_load

    rows = []
    for name, entry in registered_transports().items():
        _, verdict = try_load(name)
        rows.append(
            {
                "name": name,
                "target": entry.dotted_path,
                "from": entry.distribution,
                "installed": verdict.ok,
                "blocked": bool(entry.blocked),
                "reason": verdict.reason,
                "remedy": verdict.remedy,
            }
        )
    if as_json:
        print(json.dumps(rows, indent=2))
        return

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("transport", "from", "installed", "why not, and what to do")
    for row in rows:
        state = "yes" if row["installed"] else "blocked" if row["blocked"] else "no"
        why = "" if row["installed"] else f"{row['reason']}; {row['remedy']}"
        # Text, because a reason may hold brackets, which rich would take for markup.
        table.add_row(*(Text(str(cell)) for cell in (row["name"], row["from"], state, why)))
    Console().print(table)
