"""Pictures of a result: time against bytes with the limit, and who won where. Needs matplotlib (`dcpcomm[bench]`)."""

from __future__ import annotations

import importlib.util
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcpcomm.bench.compare import SPREADS
from dcpcomm.bench.result import Result
from dcpcomm.bench.table import Row, is_merge
from dcpcomm.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Series",
    "Winner",
    "check_plot",
    "draw_times",
    "draw_winners",
    "figure",
    "limits_of",
    "save",
    "series_of",
    "winners_of",
]

_SUFFIXES = (".png", ".svg", ".pdf")
_MARKERS = "osD^vP*X"
_COLUMNS = 2
_DASHES = ("-", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
#: What tells cells apart, rows apart: how each is written in a legend.
_WORDS = {
    "ranks": "N={}", "heads": "H={}", "dim": "D={}", "dtype": "{}", "projection": "projection {}",
    "empty": "{:.0%} empty", "skew_us": "skew {:g} us",
}  # fmt: skip


@dataclass(frozen=True)
class Series:
    """One line: points (bytes, p50, p99), smallest first."""

    label: str
    transport: str
    variant: str
    points: tuple[tuple[int, float, float], ...]


@dataclass(frozen=True)
class Winner:
    """The fastest merge of a cell; `lead` over the second, 1.0 where noise may turn them round, None without one."""

    transport: str
    lead: float | None


def check_plot(path: Path) -> None:
    """Say before anything is measured that a picture couldn't be written.

    Raises:
        ConfigError: matplotlib isn't there, the suffix is unknown, or the folder is missing.
    """
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"--plot {path}: expected a name that ends in {', '.join(_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which isn't installed: pip install 'dcpcomm[bench]'")


def save(result: Result, path: Path) -> None:
    """Draw, and write to `path`; its suffix says as what."""
    # Without a version in it: the same result gives the same PNG.
    figure(result).savefig(path, dpi=110, metadata={"Software": None} if path.suffix == ".png" else None)


def figure(result: Result) -> Figure:
    """For each group of cells that differ in rows, dim and dtype alone: time against bytes, and for each dtype a map of
    who won.
    """
    from matplotlib.figure import Figure

    colours, parts = _colours(result.rows), _facets(result.rows, ("dim", "dtype"))
    columns = min(_COLUMNS, len(parts)) or 1
    lines = [parts[at : at + columns] for at in range(0, len(parts), columns)]
    heights = [max(sum(_heights(rows)) for _, rows in line) for line in lines]
    width = 6.6 + 0.07 * max((len(one.label) for _, rows in parts for one in series_of(rows)), default=0)
    made = Figure(figsize=(columns * width, sum(heights) + 0.4 if heights else 2.0), layout="constrained")
    made.suptitle(
        "\n".join(textwrap.wrap(result.title, int(columns * width * 12), replace_whitespace=False)), fontsize=10
    )
    if not parts:
        return made
    places = made.subfigures(len(lines), columns, height_ratios=heights, squeeze=False)
    for place, (name, rows) in zip(places.flat, parts, strict=False):
        tall = _heights(rows)
        grid = place.add_gridspec(len(tall), 1, height_ratios=tall)
        draw_times(place.add_subplot(grid[0]), rows, colours, name)
        for index, (dtype, some) in enumerate(_maps(rows), 1):
            words = ", ".join(filter(None, (name, dtype)))
            draw_winners(place.add_subplot(grid[index]), some, colours, f"fastest merge{': ' * bool(words)}{words}")
    return made


def _heights(rows: Sequence[Row]) -> list[float]:
    """Inches of a part's pictures: each grows with its legend."""
    entries = len(series_of(rows)) + len(limits_of(rows))
    return [max(4.8, 0.19 * entries + 1.0), *(1.1 + 0.36 * len({row.dim for row in some}) for _, some in _maps(rows))]


def series_of(rows: Iterable[Row]) -> list[Series]:
    """A line for each transport, and for each value of what else varies but the rows. What has no time is left out."""
    rows = list(rows)
    varies = _varying(rows)
    points: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for row in rows:
        if row.times is not None:
            at = (row.transport, _words(row, varies))
            points.setdefault(at, []).append((row.size, row.times.p50, row.times.p99))
    return [Series(_label(*key), *key, tuple(sorted(found))) for key, found in points.items()]


def limits_of(rows: Iterable[Row]) -> list[Series]:
    """The limit by bytes: one line where it depends on them alone, else one for each value of what it depends on."""
    rows = list(rows)
    one: dict[int, set[float]] = {}
    for row in rows:
        one.setdefault(row.size, set()).add(round(row.limit_us, 6))
    if all(len(found) == 1 for found in one.values()):
        points = ((size, min(found)) for size, found in sorted(one.items()))
        return [Series("limit", "limit", "", tuple((size, us, us) for size, us in points))]
    varies = _varying(rows)
    by: dict[str, set[tuple[int, float, float]]] = {}
    for row in rows:
        by.setdefault(_words(row, varies), set()).add((row.size, row.limit_us, row.limit_us))
    return [Series(_label("limit", name), "limit", name, tuple(sorted(found))) for name, found in by.items()]


def draw_times(axes: Axes, rows: Sequence[Row], colours: dict[str, Any], title: str = "") -> None:
    """Microseconds against bytes, both logarithmic; a stroke from each median up to the 99th percentile."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    series, limits = series_of(rows), limits_of(rows)
    variants = list(dict.fromkeys(one.variant for one in series))
    for one in series:
        sizes, p50, p99 = zip(*one.points, strict=True)
        turn, bare = variants.index(one.variant), not is_merge(one.transport)
        style: Any = ":" if bare else _DASHES[turn % len(_DASHES)]
        axes.plot(
            sizes, p50, label=one.label, color=colours[one.transport], linestyle=style, marker=_MARKERS[turn % 8],
            markersize=5, linewidth=1.2 if bare else 1.8,
        )  # fmt: skip
        axes.vlines(sizes, p50, p99, color=colours[one.transport], alpha=0.35, linewidth=3)
    for turn, one in enumerate(limits):
        sizes, us, _ = zip(*one.points, strict=True)
        marker = _MARKERS[turn % 8] if len(limits) > 1 or len(sizes) == 1 else ""
        axes.plot(
            sizes, us, label=one.label, color="black", linestyle="--", linewidth=1.5, marker=marker, markersize=5,
            markerfacecolor="none",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _bytes(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    wrong = Counter(row.transport for row in rows if row.times is None)
    more = "".join(f"\nnot drawn, because wrong: {name}, {count} cells" for name, count in wrong.items())
    axes.set_xlabel(f"bytes of rows that each rank sends{more}")
    axes.set_ylabel("one merge, us: median, up to p99")
    axes.grid(True, which="major", alpha=0.3)
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def winners_of(rows: Iterable[Row]) -> dict[tuple[int, int], Winner]:
    """(rows, dim) -> the fastest of the merges that are right; what is an exchange alone doesn't count."""
    found: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        if row.times is not None and is_merge(row.transport):
            found.setdefault((row.rows, row.dim), []).append(row)
    return {at: _winner(some) for at, some in found.items()}


def _winner(rows: list[Row]) -> Winner:
    (best, first), *others = sorted(
        ((row, row.times) for row in rows if row.times is not None), key=lambda pair: pair[1].p50
    )
    if not others:
        return Winner(best.transport, None)
    second = others[0][1]
    apart = second.p50 - first.p50 > SPREADS * (first.mad + second.mad)
    return Winner(best.transport, second.p50 / first.p50 if apart else 1.0)


def draw_winners(axes: Axes, rows: Sequence[Row], colours: dict[str, Any], title: str) -> None:
    """A map, rows to the right and dim upwards: the colour is the fastest merge's, the figure its lead."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    found = winners_of(rows)
    names = [name for name in colours if any(one.transport == name for one in found.values())]
    xs, ys = sorted({at[0] for at in found}), sorted({at[1] for at in found})
    area = [[names.index(found[x, y].transport) if (x, y) in found else float("nan") for x in xs] for y in ys]
    axes.imshow(
        area, cmap=ListedColormap([colours[name] for name in names]), vmin=-0.5, vmax=len(names) - 0.5, origin="lower",
        aspect="auto", alpha=0.75,
    )  # fmt: skip
    for (x, y), one in found.items():
        text = "alone" if one.lead is None else "even" if one.lead == 1.0 else f"{one.lead:.2f}x"
        axes.text(xs.index(x), ys.index(y), text, ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(xs)), [str(x) for x in xs])
    axes.set_yticks(range(len(ys)), [str(y) for y in ys])
    axes.set_xlabel("rows")
    axes.set_ylabel("dim")
    axes.set_title(f"{title} (figure: the second's time over its own)", fontsize=10)
    axes.legend(
        handles=[Patch(color=colours[name], alpha=0.75, label=name) for name in names], fontsize=8,
        loc="center left", bbox_to_anchor=(1.0, 0.5),
    )  # fmt: skip


def _merges(rows: Sequence[Row]) -> set[str]:
    return {row.transport for row in rows if is_merge(row.transport) and row.times is not None}


def _colours(rows: Sequence[Row]) -> dict[str, Any]:
    """Of each transport, the same in all parts of a picture."""
    from matplotlib import colormaps

    names = list(dict.fromkeys(row.transport for row in rows))
    palette = colormaps["tab10" if len(names) <= 10 else "tab20"]
    return {name: palette(index % palette.N) for index, name in enumerate(names)}


def _maps(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The groups of a part for which there is somebody to win against."""
    return [(name, some) for name, some in _facets(rows, ("dim",)) if len(_merges(some)) > 1]


def _facets(rows: Sequence[Row], inside: tuple[str, ...]) -> list[tuple[str, list[Row]]]:
    """Groups of rows that differ in transport, rows and what is named `inside` alone."""
    varies = [name for name in _varying(rows) if name not in inside]
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(_words(row, varies), []).append(row)
    return list(found.items())


def _varying(rows: Sequence[Row]) -> list[str]:
    return [name for name in _WORDS if len({getattr(row, name) for row in rows}) > 1]


def _words(row: Row, names: Sequence[str]) -> str:
    return ", ".join(_WORDS[name].format(getattr(row, name)) for name in names)


def _label(name: str, variant: str) -> str:
    return f"{name}, {variant}" if variant else name


def _bytes(value: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} B"
