"""A measured case as a row: its columns, the table, the JSON and the CSV. docs/benchmark.md says how they are measured.

size      bytes of rows that each rank sends to its peers; LSEs, headers and padding are not counted
p50 ...   microseconds of one whole merge: the slowest rank of each replay; median, 99th percentile, median absolute
          deviation
algbw     GB/s, own slice included: size x N / (N - 1) / p50, as nccl-tests has it for all-to-all
busbw     GB/s that each rank sends: size / p50
#wrong    elements that were not what the oracle says, all ranks and comparisons together; what is wrong has no time
% limit   limit / p50: 100 is a merge as fast as the limit that was measured in the same run
host us   what a call costs the host (eager), median of the slowest rank; only where ranks are processes with GPUs
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dcpcomm.bench.sweep import Cell
from dcpcomm.bench.timing import Summary

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["COLUMNS", "Row", "as_csv", "is_merge", "size_of", "table"]

COLUMNS = (
    "size", "rows", "heads", "dim", "dtype", "transport", "p50 us", "p99", "mad", "algbw", "busbw", "#wrong", "% limit",
    "host us",
)  # fmt: skip

_LEFT = ("dtype", "transport", "projection")


def size_of(rows: int, heads: int, dim: int, itemsize: int, ranks: int) -> int:
    """Bytes of rows that each of `ranks` sends to its peers in a merge that scatters heads."""
    return rows * (heads // ranks) * (ranks - 1) * dim * itemsize


@dataclass(frozen=True)
class Row:
    """One transport or rival in one cell.

    Attributes:
        times: None where something was wrong: it was not timed, or its times don't count.
        wrong: of all ranks together.
        limit_us: at this size, measured in the same run.
        host_us: None where it was not measured.
        projection: "none", or W_UV "before" or "after" the merge, to `v_head_dim` columns.
        empty: share of the rows that were empty on a rank.
        skew_us: how late one rank came to each merge, which is not in `times`.
    """

    size: int
    rows: int
    heads: int
    dim: int
    dtype: str
    ranks: int
    transport: str
    times: Summary | None
    wrong: int
    limit_us: float
    host_us: float | None = None
    projection: str = "none"
    v_head_dim: int | None = None
    empty: float = 0.0
    skew_us: float = 0.0

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Row:
        """From JSON, also that of earlier versions, which lacks the last fields."""
        given = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        times = given["times"]
        return cls(**{**given, "times": None if times is None else Summary(**times)})

    @property
    def cell(self) -> Cell:
        return Cell(
            self.ranks, self.heads, self.dim, self.dtype, self.projection, self.v_head_dim, self.rows, self.empty,
            self.skew_us,
        )  # fmt: skip

    @property
    def busbw(self) -> float | None:
        return self.size / self.times.p50 / 1e3 if self.times else None

    @property
    def algbw(self) -> float | None:
        return self.busbw * self.ranks / (self.ranks - 1) if self.busbw is not None else None

    @property
    def of_limit(self) -> float | None:
        """Per cent."""
        return 100 * self.limit_us / self.times.p50 if self.times else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        derived = {"algbw": self.algbw, "busbw": self.busbw, "percent_of_limit": self.of_limit}
        return {**asdict(self), **{name: _rounded(value) for name, value in derived.items()}}

    def cells(self) -> list[str]:
        """In the order of `COLUMNS`."""
        times = self.times
        shown = (times.p50, times.p99, times.mad) if times else (None, None, None)
        return [
            str(self.size), str(self.rows), str(self.heads), str(self.dim), self.dtype, self.transport,
            *(_text(value, 2) for value in shown), _text(self.algbw, 2), _text(self.busbw, 2),
            str(self.wrong), _text(self.of_limit, 0), _text(self.host_us, 1),
        ]  # fmt: skip


def is_merge(transport: str) -> bool:
    """Whether what was measured is a whole merge, and not an exchange alone, which a table has for comparison."""
    return "(bare" not in transport


def table(rows: Sequence[Row], title: str) -> Table:
    """For people. Of what only some sweeps vary (N, projection, empty rows, skew), a column where any row differs from
    the default; host times where there are any.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    more: list[tuple[str, list[str]]] = []
    if len({row.ranks for row in rows}) > 1:
        more.append(("N", [str(row.ranks) for row in rows]))
    if any(row.projection != "none" for row in rows):
        more.append(("projection", [row.projection for row in rows]))
    if any(row.empty for row in rows):
        more.append(("empty", [f"{row.empty:g}" for row in rows]))
    if any(row.skew_us for row in rows):
        more.append(("skew us", [f"{row.skew_us:g}" for row in rows]))
    columns = COLUMNS if any(row.host_us is not None for row in rows) else COLUMNS[:-1]
    made = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    at = columns.index("transport")
    for column in (*columns[:at], *(name for name, _ in more), *columns[at:]):
        made.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=True)
    before, apart = None, len(rows) > len({row.cell for row in rows})
    for index, row in enumerate(rows):
        made.add_section() if apart and before not in (None, row.cell) else None
        shown = row.cells()[: len(columns)]
        extra = [values[index] for _, values in more]
        made.add_row(*shown[:at], *extra, *shown[at:], style="bold red" if row.wrong else None)
        before = row.cell
    return made


def as_csv(rows: Sequence[Row]) -> str:
    """For programs: a line of names, and one for each row. What was not measured is empty."""
    text = io.StringIO()
    lines = []
    for row in rows:
        values = row.as_dict()
        times = values.pop("times") or {}
        lines.append({**values, **{f"{name}_us": times.get(name, "") for name in ("p50", "p99", "mad")}})
        lines[-1]["count"] = times.get("count", "")
    names = list(lines[0]) if lines else []
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
