"""A result held against an earlier one: what became slower by more than noise, and what is no longer there.

A cell has regressed if its median is larger by more than twice the sum of both runs' spreads (median absolute
deviations), and by more than 5 %; or if it is wrong now. Both bounds count: the spread within a run doesn't know that
two runs of one machine differ by a per cent or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dcpcomm.bench.result import Group, Result
from dcpcomm.bench.table import Row

__all__ = ["LEAST", "SPREADS", "Change", "Comparison", "Gone", "beyond_noise", "compare"]

SPREADS = 2.0
LEAST = 0.05


@dataclass(frozen=True)
class Change:
    """A cell in both results; `new` has no times where it is wrong now."""

    old: Row
    new: Row

    def __str__(self) -> str:
        assert self.old.times is not None
        before = self.old.times
        if self.new.times is None:
            return f"{self.old.transport}, {self.old.cell}: {before.p50:.2f} us -> wrong in {self.new.wrong} elements"
        after = self.new.times
        return (
            f"{self.old.transport}, {self.old.cell}: {before.p50:.2f} -> {after.p50:.2f} us "
            f"({after.p50 / before.p50 - 1:+.1%}; noise {_noise(self.old, self.new):.2f} us)"
        )


@dataclass(frozen=True)
class Gone:
    """A cell that is only in the old result; `why` it is missing, if the new run tried to measure it."""

    old: Row
    why: str | None

    def __str__(self) -> str:
        return f"{self.old.transport}, {self.old.cell}: {self.why or 'the new run did not ask for it'}"


@dataclass(frozen=True)
class Comparison:
    """What became of every cell of the old result.

    Attributes:
        apart: what differs between the two runs' machines, versions and ways of measuring, in words.
        worse, better: beyond noise.
        same: cells within noise.
        gone: cells that the new result lacks.
    """

    apart: tuple[str, ...]
    worse: tuple[Change, ...]
    better: tuple[Change, ...]
    same: int
    gone: tuple[Gone, ...]

    @property
    def compared(self) -> int:
        """Cells that are in both."""
        return len(self.worse) + len(self.better) + self.same

    @property
    def failed(self) -> bool:
        """Something became worse, or could be measured before and can't be now, or nothing was compared."""
        return bool(self.worse) or not self.compared or any(one.why is not None for one in self.gone)


def beyond_noise(old: Row, new: Row) -> bool:
    """Whether two times of a cell lie further apart than noise explains."""
    assert old.times is not None
    assert new.times is not None
    return abs(new.times.p50 - old.times.p50) > _noise(old, new)


def _noise(old: Row, new: Row) -> float:
    """Microseconds."""
    assert old.times is not None
    assert new.times is not None
    return max(SPREADS * (old.times.mad + new.times.mad), LEAST * old.times.p50)


def compare(old: Result, new: Result) -> Comparison:
    """Hold `new` against `old`, cell by cell. What had no time in `old`, because it was wrong, is left out."""
    found = {(row.transport, row.cell): row for row in new.rows}
    worse, better, gone, same = [], [], [], 0
    for before in old.rows:
        if before.times is None:
            continue
        after = found.get((before.transport, before.cell))
        if after is None:
            gone.append(Gone(before, _why(before, new)))
        elif after.times is None:
            worse.append(Change(before, after))
        elif not beyond_noise(before, after):
            same += 1
        elif after.times.p50 > before.times.p50:
            worse.append(Change(before, after))
        else:
            better.append(Change(before, after))
    return Comparison(tuple(_apart(old, new)), tuple(worse), tuple(better), same, tuple(gone))


def _why(row: Row, new: Result) -> str | None:
    for one in new.skipped:
        if one.transport in (None, row.transport) and one.cell in (None, row.cell):
            return one.why
    return None


def _apart(old: Result, new: Result) -> list[str]:
    """Only what both tell can differ."""
    said = []
    for before, after in ((old.machine, new.machine), (old.versions, new.versions), (old.timing, new.timing)):
        keys = [key for key in before if key in after]
        said += [f"{key} {_text(before[key])} -> {_text(after[key])}" for key in keys if before[key] != after[key]]
    sizes = {group.count for group in old.groups} & {group.count for group in new.groups}
    for size in sorted(sizes):
        was, now = _ways(old.groups, size), _ways(new.groups, size)
        if was != now:
            said.append(f"{size} ranks as {was} -> {now}")
    return said


def _ways(groups: Sequence[Group], size: int) -> str:
    return " and ".join(sorted({group.are for group in groups if group.count == size}))


def _text(value: Any) -> str:
    return " + ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
