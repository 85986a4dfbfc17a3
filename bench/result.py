"""The result of a run, as it is written and read again: rows, and what they were measured on, with and by.

Results of earlier versions are read too: those of `python -m dcpcomm.bench.merge` before it knew sweeps, and those of
`python -m dcpcomm.bench.gloo_merge`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dcpcomm.bench.sweep import Cell
from dcpcomm.bench.table import Row, size_of
from dcpcomm.bench.timing import Summary
from dcpcomm.errors import ConfigError

__all__ = ["BARE_GLOO", "Group", "Result", "Skipped"]

_FORMAT = 2
BARE_GLOO = "the bare packed all-to-all over Gloo, timed in turns with each cell"
_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Group:
    """N ranks that were measured together.

    Attributes:
        are: "processes", or "threads on one GPU".
        limit: what the limit is, in words.
        limits: what it is made of, on GPUs.
    """

    count: int
    are: str
    limit: str
    limits: dict[str, Any] | None = None


@dataclass(frozen=True)
class Skipped:
    """What was not measured; `transport` or `cell` is None where it holds for all."""

    transport: str | None
    cell: Cell | None
    why: str


@dataclass(frozen=True)
class Result:
    """All that a run found.

    Attributes:
        label: the file that it was read from, or "this run".
        machine, versions: of `bench.machine`.
        timing: calls, replays and the base of LSEs.
    """

    label: str
    command: str
    when: str
    commit: str | None
    machine: dict[str, Any]
    versions: dict[str, Any]
    timing: dict[str, Any]
    groups: tuple[Group, ...]
    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...] = field(default=())

    @property
    def title(self) -> str:
        """What it was measured on, and the limit."""
        gpus = " + ".join(sorted({name for name in self.machine.get("gpus") or () if name}))
        link = f", link {self.machine['link']}" if self.machine.get("link") else ""
        parts = []
        for group in self.groups:
            who, on = f"{group.count} ranks", f"CPU ({self.machine.get('cpu')}, {self.machine.get('host_cores')} cores)"
            if gpus and group.are == "processes":
                on = f"a GPU each ({gpus}{link})"
            elif gpus:
                who, on = f"{group.count} virtual ranks", f"streams of one GPU ({gpus})"
            guide = ", a guide alone: they take turns" if gpus and group.are != "processes" else ""
            parts.append(f"{who}, {on}; limit: {group.limit}{guide}")
        return "\n".join(parts)

    def not_measured(self) -> list[str]:
        """A line for each transport and reason."""
        found: dict[tuple[str, str], list[Cell]] = {}
        for one in self.skipped:
            cells = found.setdefault((one.transport or "", one.why), [])
            cells += [one.cell] if one.cell is not None else []
        lines = []
        for (transport, why), cells in found.items():
            where = f"{cells[0]}" if len(cells) == 1 else f"{len(cells)} cells" if cells else ""
            lines.append(f"not measured: {', '.join(filter(None, (transport, where)))}: {why}")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "format": _FORMAT,
            **{name: getattr(self, name) for name in ("command", "when", "commit", "machine", "versions", "timing")},
            "groups": [asdict(group) for group in self.groups],
            "rows": [row.as_dict() for row in self.rows],
            "skipped": [asdict(one) for one in self.skipped],
        }

    @classmethod
    def read(cls, path: Path) -> Result:
        """From a file.

        Raises:
            ConfigError: it can't be read, or holds something else.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}; give a file that `--json` wrote") from None
        except ValueError as error:
            raise ConfigError(f"{path} is no JSON ({error}); give a file that `dcpcomm bench --json` wrote") from None
        try:
            return cls.of(found, path.name)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"{path} holds no result of `dcpcomm bench` ({type(error).__name__}: {error}); give a file that "
                "its --json wrote"
            ) from None

    @classmethod
    def of(cls, found: Mapping[str, Any], label: str) -> Result:
        """From what `as_dict` made, in this version or an earlier one."""
        if "dtypes" in found:
            return _of_gloo_merge(found, label)
        if found.get("format", _FORMAT) != _FORMAT:
            raise KeyError(f"format {found['format']}, expected {_FORMAT}")
        common = {name: found[name] for name in ("command", "when", "commit", "machine", "versions", "timing")}
        rows = tuple(Row.read(row) for row in found["rows"])
        if "groups" not in found:
            limits, ranks = found["limits"], found["ranks"]
            words = f"{limits['exchange_us']:.2f} us + bytes / {max(limits['gb_s'].values()):.0f} GB/s"
            groups: tuple[Group, ...] = (Group(ranks["count"], ranks["are"], words, limits),)
            skipped = tuple(Skipped(name, None, why) for name, why in found["skipped"].items())
            return cls(label, **common, groups=groups, rows=rows, skipped=skipped)
        groups = tuple(Group(**group) for group in found["groups"])
        skipped = tuple(
            Skipped(one["transport"], None if one["cell"] is None else Cell(**one["cell"]), one["why"])
            for one in found["skipped"]
        )
        return cls(label, **common, groups=groups, rows=rows, skipped=skipped)


def _of_gloo_merge(found: Mapping[str, Any], label: str) -> Result:
    shape, rows = found["shape"], []
    heads, dim, ranks = shape["heads"], shape["dim"], shape["ranks"]
    count = shape["rounds"] * shape.get("launches", 1)
    for dtype, us in found["dtypes"].items():
        size = size_of(shape["rows"], heads, dim, _ITEMSIZE[dtype], ranks)
        merge = Summary(us["merge_p50_us"], us["merge_p99_us"], us["merge_mad_us"], count)
        rows.append(Row(size, shape["rows"], heads, dim, dtype, ranks, "gloo_a2a", merge, 0, us["bare_p50_us"]))
    machine = {"gpus": [], "cpu": found["machine"]["cpu"], "host_cores": found["machine"]["cores"]}
    return Result(
        label, found["command"], "", None, machine, dict(found["versions"]), {"replays": count},
        (Group(ranks, "processes", BARE_GLOO),), tuple(rows),
    )  # fmt: skip
