"""A measured case as a row: its columns, their meaning, the table and the JSON.

size      bytes of rows that each rank sends to its peers; LSEs, headers and padding are not counted
p50 ...   microseconds of one whole merge: the slowest rank of each replay; median, 99th percentile, median absolute
          deviation
algbw     GB/s, own slice included: size x N / (N - 1) / p50, as nccl-tests has it for all-to-all
busbw     GB/s that each GPU sends: size / p50
#wrong    elements that were not what the oracle says, all ranks and comparisons together; what is wrong has no time
% limit   limit / p50: 100 is a merge as fast as the smallest exchange and the bandwidth allow
host us   what a call costs the host (eager), median of the slowest rank; only where ranks are processes
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dcpcomm.bench.timing import Summary

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["COLUMNS", "Row", "size_of", "table"]

COLUMNS = (
    "size", "rows", "heads", "dim", "dtype", "transport", "p50 us", "p99", "mad", "algbw", "busbw", "#wrong", "% limit",
    "host us",
)  # fmt: skip


def size_of(rows: int, heads: int, dim: int, itemsize: int, ranks: int) -> int:
    """Bytes of rows that each of `ranks` sends to its peers in a merge that scatters heads."""
    return rows * (heads // ranks) * (ranks - 1) * dim * itemsize


@dataclass(frozen=True)
class Row:
    """One transport or rival at one size.

    Attributes:
        times: None where something was wrong: it was not timed, or its times don't count.
        wrong: of all ranks together.
        limit_us: at this size.
        host_us: None where it was not measured.
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
            *(_text(value, 2) for value in shown), _text(self.algbw, 1), _text(self.busbw, 1),
            str(self.wrong), _text(self.of_limit, 0), _text(self.host_us, 1),
        ]  # fmt: skip


def table(rows: list[Row], title: str) -> Table:
    """For people."""
    from rich.table import Table

    made = Table(title=title)
    for column in COLUMNS:
        made.add_column(column, justify="left" if column in ("dtype", "transport") else "right", no_wrap=True)
    before = None
    for row in rows:
        made.add_section() if before not in (None, row.rows) else None
        made.add_row(*row.cells(), style="bold red" if row.wrong else None)
        before = row.rows
    return made


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
