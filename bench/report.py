"""What the terminal shows of a result, and of how it compares with an earlier one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpcomm.bench.compare import LEAST, SPREADS, Comparison, Gone
from dcpcomm.bench.result import Result
from dcpcomm.bench.table import table

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["show", "show_comparison"]


def show(result: Result, console: Console) -> None:
    """The table, what was not measured and why, and what is wrong."""
    if result.rows:
        made = table(result.rows, result.title)
        # On a narrow terminal lines wrap: cut off figures would be worse.
        console.width = max(
            console.width, console.measure(made, options=console.options.update(max_width=1000)).maximum
        )
        console.print(made)
    for line in result.not_measured():
        _say(console, line)
    wrong = [row for row in result.rows if row.wrong]
    if wrong:
        said = f"WRONG: {len(wrong)} of {len(result.rows)} cells differ from the oracle; they have no time"
        _say(console, said, "bold red")


def show_comparison(comparison: Comparison, old: Result, console: Console) -> None:
    """Every cell that changed or was lost, what else is gone, and a line that says how many."""
    _say(console, f"\nagainst {old.label}, {old.when or 'of unknown date'}, commit {old.commit or 'unknown'}")
    for said in comparison.apart:
        _say(console, f"NOT MEASURED ALIKE: {said}", "bold yellow")
    for change in comparison.worse:
        _say(console, f"REGRESSION: {change}", "bold red")
    for change in comparison.better:
        _say(console, f"faster: {change}", "green")
    unasked: dict[str, list[Gone]] = {}
    for gone in comparison.gone:
        if gone.why is not None:
            _say(console, f"LOST: {gone}", "bold red")
        else:
            unasked.setdefault(gone.old.transport, []).append(gone)
    for transport, some in unasked.items():
        what = str(some[0]) if len(some) == 1 else f"{transport}, {len(some)} cells: the new run did not ask for them"
        _say(console, f"gone: {what}", "bold yellow")
    lost = sum(gone.why is not None for gone in comparison.gone)
    _say(
        console,
        f"{comparison.compared} cells compared: {len(comparison.worse)} regressions, {len(comparison.better)} faster, "
        f"{comparison.same} within noise ({LEAST:.0%}, or {SPREADS:g} x both spreads if that is more); "
        f"{lost} lost, {len(comparison.gone) - lost} gone",
    )
    if not comparison.compared:
        _say(console, "nothing was compared: the two have no cell in common", "bold red")


def _say(console: Console, line: str, style: str | None = None) -> None:
    """As it is: a program may look for it."""
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
