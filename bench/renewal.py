"""A new measurement over an old one, so that noise changes no decision: a figure that came out as before stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from dcpcomm.costtable import CostTable, MergeRow, Projection, ProjectionRow

__all__ = ["NOISE", "Renewal", "renew"]

#: Two runs on one machine differ by this share, whatever the spread within each: nccl_a2a of merge_h200x2.json and of
#: merge_h200x2_direct.json (bench/results/), before and after it called NCCL directly, by 0.8 to 1.6 %.
NOISE = 0.02
_SPREADS = 2
_Row = TypeVar("_Row", MergeRow, ProjectionRow)


@dataclass(frozen=True)
class Renewal:
    """What came of it.

    Attributes:
        table: to write.
        kept: figures that stay, the new one being within noise.
        changed: in words, those that don't.
        added: figures that are new.
        dropped: why all of the old ones went, in words; "" where they didn't.
    """

    table: CostTable
    kept: int
    changed: tuple[str, ...]
    added: int
    dropped: str = ""


def renew(old: CostTable | None, new: CostTable) -> Renewal:
    """`new` over `old`. What `new` hasn't measured stays, if it is of the same machine and the same versions."""
    if old is not None:
        why = _apart(old, new)
        if why:
            return Renewal(new, 0, (), _count(new), why)
    count = _Count()
    merges = {name: dict(by) for name, by in (old.merges if old else {}).items()}
    if old is not None:
        for name in new.merges:
            if old.options.get(name, {}) != new.options.get(name, {}):
                merges.pop(name, None)  # with other options it was another transport
    for name, by in new.merges.items():
        for dtype, rows in by.items():
            before = merges.setdefault(name, {}).get(dtype, ())
            merges[name][dtype] = _rows(before, rows, f"{name} {dtype}", "B", count)
    projections: dict[str, dict[tuple[int, int, int], Projection]] = {
        dtype: {(one.heads, one.latent, one.value): one for one in ones}
        for dtype, ones in (old.projections if old else {}).items()
    }
    for dtype, ones in new.projections.items():
        known = projections.setdefault(dtype, {})
        for one in ones:
            shape = one.heads, one.latent, one.value
            before_it = known[shape].rows if shape in known else ()
            rows_now = _rows(before_it, one.rows, f"W_UV {dtype}, {one.heads} heads", "rows", count)
            known[shape] = one.model_copy(update={"rows": rows_now})
    table = new.model_copy(
        update={
            "merges": merges,
            "projections": {
                dtype: tuple(known[shape] for shape in sorted(known)) for dtype, known in projections.items()
            },
            "options": {**(old.options if old else {}), **new.options},
            "sources": tuple(dict.fromkeys((*(old.sources if old else ()), *new.sources))),
        }
    )
    return Renewal(table, count.kept, tuple(count.changed), count.added)


class _Count:
    def __init__(self) -> None:
        self.kept = self.added = 0
        self.changed: list[str] = []


def _rows(old: tuple[_Row, ...], new: tuple[_Row, ...], what: str, unit: str, count: _Count) -> tuple[_Row, ...]:
    rows = {row.at: row for row in old}
    for row in new:
        before = rows.get(row.at)
        if before is None:
            count.added += 1
        elif abs(before.median_us - row.median_us) <= max(
            _SPREADS * max(before.mad_us, row.mad_us), NOISE * before.median_us
        ):
            count.kept += 1
            continue
        else:
            count.changed.append(f"{what}, {row.at} {unit}: {before.median_us:.1f} -> {row.median_us:.1f} us")
        rows[row.at] = row
    return tuple(rows[at] for at in sorted(rows))


def _apart(old: CostTable, new: CostTable) -> str:
    if old.key is None or new.key is None:
        return "the old table has no key"
    apart = old.key.elsewhere(new.key) or old.key.changed(new.key)
    if not apart and old.machine != new.machine:
        apart = ["another machine of this kind"]
    return "; ".join(apart)


def _count(table: CostTable) -> int:
    merges = sum(len(rows) for by in table.merges.values() for rows in by.values())
    return merges + sum(len(one.rows) for ones in table.projections.values() for one in ones)
