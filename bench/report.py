"""What the terminal shows of a result, and of how it compares with an earlier one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpcomm.bench.compare import LEAST, SPREADS, Comparison
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
        console.print(line, markup=False, highlight=False)
    wrong = [row for row in result.rows if row.wrong]
    if wrong:
        console.print(
            f"WRONG: {len(wrong)} of {len(result.rows)} cells differ from the oracle; they have no time",
            style="bold red",
        )


def show_comparison(comparison: Comparison, old: Result, console: Console) -> None:
    """Every cell that changed or went, and a line that says how many did."""
    console.print(
        f"\nagainst {old.label}, {old.when or 'of unknown date'}, commit {old.commit or 'unknown'}", markup=False
    )
    for said in comparison.apart:
        console.print(f"NOT MEASURED ALIKE: {said}", style="bold yellow", markup=False)
    for style, word, changes in (
        ("bold red", "REGRESSION", comparison.worse),
        ("green", "faster", comparison.better),
        ("bold yellow", "gone", comparison.gone),
    ):
        for change in changes:
            console.print(f"{word}: {change}", style=style, markup=False, highlight=False)
    console.print(
        f"{comparison.compared} cells compared: {len(comparison.worse)} regressions, {len(comparison.better)} faster, "
        f"{comparison.same} within noise ({LEAST:.0%}, or {SPREADS:g} x both spreads if that is more); "
        f"{len(comparison.gone)} gone",
        highlight=False,
    )
    if not comparison.compared:
        console.print("nothing was compared: the two have no cell in common", style="bold red")
