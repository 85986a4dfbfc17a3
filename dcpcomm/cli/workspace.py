"""`dcpcomm workspace`: bytes of the TRT-LLM sparse-MLA workspace at a DCP decode shape, or the rows a budget holds."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import Annotated

import typer

from dcpcomm.errors import ConfigError, ShapeError
from dcpcomm.trtllm_workspace import (
    COUNTER_BYTES,
    DEFAULT_SCRATCH_BYTES,
    GUARD_BYTES,
    QUERY_TILE,
    STATISTICS_BYTES,
    SparseMLAWorkspace,
    trtllm_sparse_mla_max_tokens,
    trtllm_sparse_mla_parts,
)

__all__ = ["workspace"]

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def workspace(
    heads_per_rank: Annotated[int, typer.Option(help="Query heads of one rank: H / N.")],
    dcp_size: Annotated[int, typer.Option(help="N, ranks of the DCP group.")],
    max_tokens: Annotated[
        int | None, typer.Option(help="Rows of a launch: all tokens that a step may schedule, prefill included.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Instead of --max-tokens: bytes (or 4GiB, 512MiB), for the most rows that fit.")
    ] = None,
    max_q_len: Annotated[int, typer.Option(help="Query tokens of a row; 1 where every token is a row.")] = 1,
    scratch: Annotated[
        str, typer.Option(help="To be left beside the slab: bytes, or 394MiB.")
    ] = f"{DEFAULT_SCRATCH_BYTES >> 20}MiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")] = False,
) -> None:
    """Bytes for the TRT-LLM sparse-MLA workspace of one rank, part by part, at a DCP decode shape.

    Exit status: 0 fine, 1 not even one row fits the budget, 2 wrong usage.
    """
    if (max_tokens is None) == (budget is None):
        raise ConfigError("expected either --max-tokens or --budget, and not both")
    scratch_bytes = _bytes("--scratch", scratch)
    budget_bytes = None if budget is None else _bytes("--budget", budget)
    most: int | None = None
    try:
        if budget_bytes is not None:
            most = trtllm_sparse_mla_max_tokens(
                budget_bytes,
                heads_per_rank=heads_per_rank,
                dcp_size=dcp_size,
                max_q_len=max_q_len,
                scratch_bytes=scratch_bytes,
            )
        rows = max_tokens if max_tokens is not None else most or 1
        parts = trtllm_sparse_mla_parts(
            heads_per_rank=heads_per_rank,
            dcp_size=dcp_size,
            max_tokens=rows,
            max_q_len=max_q_len,
            scratch_bytes=scratch_bytes,
        )
    except ShapeError as error:
        raise ConfigError(str(error)) from None
    if most == 0:
        raise ShapeError(
            f"--budget is {budget_bytes} bytes; expected at least {parts.total}: one row takes a slab of {parts.slab} "
            f"beside {parts.scratch} of scratch"
        )
    unbounded = budget is not None and most is None
    if as_json:
        facts = {
            "heads_per_rank": heads_per_rank,
            "dcp_size": dcp_size,
            "max_q_len": max_q_len,
            "max_tokens": None if unbounded else rows,
            "slab_bytes": parts.slab,
            "scratch_bytes": parts.scratch,
            "total_bytes": parts.total,
        }
        if budget_bytes is not None:
            facts["budget_bytes"] = budget_bytes
        print(json.dumps(facts, indent=2))
        return
    _show(parts, heads_per_rank, dcp_size, rows, max_q_len)
    if unbounded:
        print(f"{budget_bytes} bytes are enough for any number of rows: without DCP there is no slab")
    elif budget is not None:
        print(f"{rows} rows are the most that {budget_bytes} bytes hold; {rows + 1} do not fit")


def _show(parts: SparseMLAWorkspace, heads_per_rank: int, dcp_size: int, rows: int, max_q_len: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("part", "bytes", "", "is", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns[1:3]:
        column.justify = "right"
    slots = -(-max_q_len // QUERY_TILE) * QUERY_TILE
    slab = (
        f"{STATISTICS_BYTES} B x ({heads_per_rank} heads x {dcp_size} ranks) x {rows} rows x {slots}, "
        f"and {_words(GUARD_BYTES)}"
        if parts.slab
        else "none without DCP: no LSE is asked for"
    )
    table.add_row("slab", str(parts.slab), _words(parts.slab), slab)
    table.add_row("scratch", str(parts.scratch), _words(parts.scratch), f"{_words(COUNTER_BYTES)} of it for counters")
    table.add_row("total", str(parts.total), _words(parts.total), "per rank")
    console = Console(highlight=False)
    # Where nobody looks, in a pipe or a log, lines are as long as they need to be.
    (console if console.is_terminal else Console(width=200, highlight=False)).print(table)


def _words(nbytes: int) -> str:
    """In the largest unit of which there is one or more."""
    unit = next((one for one in ("GiB", "MiB", "KiB") if nbytes >= _UNITS[one.lower()]), "B")
    return f"{nbytes / _UNITS[unit.lower()]:.6g} {unit}"


def _bytes(option: str, text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[2].lower()) if found else None
    # By fractions: a float would round what is above 8 PiB, or 0.1 of something.
    nbytes = Fraction(found[1]) * unit if found and unit else Fraction(0)
    if not nbytes or nbytes.denominator != 1:
        raise ConfigError(f"{option} is {text!r}; expected a number of bytes above 0, or one with KiB, MiB or GiB")
    return nbytes.numerator
