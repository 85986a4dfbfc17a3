"""What a benchmark measures: values for each of rows, heads, dim and so on, and every combination of them a cell.

A sweep comes from a YAML file, from options of the command, or from both; then an option wins over the file. What is
wrong is told as for a configuration: all of it at once, each with its file and line, or its option.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dcpcomm.bench.ours import named
from dcpcomm.configcheck import Source, raise_all
from dcpcomm.errors import ConfigError
from dcpcomm.registry import nearest, registered_transports
from dcpcomm.yamlfile import dotted, read_yaml

__all__ = ["LISTS", "Cell", "Sweep", "cells_of", "read_sweep", "why_not"]

_NUMBERS = "a whole number above 0, or a list of them"
_WORDS: dict[str, tuple[str, ...]] = {
    "dtype": ("bfloat16", "float16", "float32"),
    "projection": ("none", "before", "after"),
    "lse_base": ("e", "2"),
    "device": ("cpu", "cuda"),
}
_EXPECTED = {
    "rows": _NUMBERS,
    "heads": _NUMBERS,
    "dim": _NUMBERS,
    "ranks": _NUMBERS,
    "v_head_dim": "a whole number above 0",
    "per_graph": "a whole number above 0",
    "replays": "a whole number of 3 or more",
    "transport": "registered names, perhaps with options (cupy_ipc:threads=256)",
    "empty": "a share of the rows, 0 to below 1, or a list of them",
    "skew_us": "microseconds, 0 or more, or a list of them",
    "rivals": "true or false",
    **{name: f"one of {', '.join(words)}" for name, words in _WORDS.items()},
}


def _as_tuple(value: Any) -> Any:
    """A single value stands for a list of one."""
    if isinstance(value, list):
        return tuple(value)
    return value if value is None or isinstance(value, tuple | dict) else (value,)


_Many = BeforeValidator(_as_tuple)
_Count = Annotated[int, Field(gt=0)]
_Counts = Annotated[tuple[_Count, ...], _Many, Field(min_length=1)]


class Sweep(BaseModel):
    """The values of each axis, and how they are measured. Every field but the last ones is an axis.

    Attributes:
        rows: B.
        heads: H, of the whole group.
        dim: D, the width of a partial; L where W_UV projects.
        ranks: N.
        transport: registered names, perhaps with options (`ours.named`); none: all that fit where it runs.
        projection: "none", or W_UV "before" or "after" the merge.
        empty: the share of rows that are empty on a rank, other ones on each.
        skew_us: how much later than the others one rank comes to each merge, in turns; microseconds.
        v_head_dim: V, where W_UV projects.
        per_graph, replays: merges in a graph and timed replays; on CPU `replays` is the number of timed calls. Without
            a value 30, and 200 on CPU.
        device: "cpu", "cuda", or None for a GPU where there is one.
    """

    # strict: a quoted "2" is a slip of the pen to report, not a value to guess at.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    rows: _Counts = (1, 4, 16, 32, 64, 128, 256)
    heads: _Counts = (128,)
    dim: _Counts = (128,)
    dtype: Annotated[
        tuple[Literal["bfloat16", "float16", "float32"], ...], _Many, Field(min_length=1)
    ] = ("bfloat16",)  # fmt: skip
    ranks: _Counts = (2,)
    transport: Annotated[tuple[str, ...], _Many] = ()
    projection: Annotated[tuple[Literal["none", "before", "after"], ...], _Many, Field(min_length=1)] = ("none",)
    empty: Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], ...], _Many, Field(min_length=1)] = (0.0,)
    skew_us: Annotated[tuple[Annotated[float, Field(ge=0, le=1e6)], ...], _Many, Field(min_length=1)] = (0.0,)
    v_head_dim: _Count = 128
    rivals: bool = False
    lse_base: Literal["e", "2"] = "e"
    device: Literal["cpu", "cuda"] | None = None
    per_graph: _Count = 20
    replays: Annotated[int, Field(ge=3)] | None = None


#: Fields that hold several values.
LISTS = ("rows", "heads", "dim", "dtype", "ranks", "transport", "projection", "empty", "skew_us")


@dataclass(frozen=True)
class Cell:
    """Where in a sweep something was measured, the transport apart. `v_head_dim` is None where nothing is projected."""

    ranks: int
    heads: int
    dim: int
    dtype: str
    projection: str
    v_head_dim: int | None
    rows: int
    empty: float = 0.0
    skew_us: float = 0.0

    @property
    def width(self) -> int:
        """Columns that travel."""
        return self.v_head_dim if self.projection == "before" and self.v_head_dim else self.dim

    def __str__(self) -> str:
        text = f"N={self.ranks} B={self.rows} H={self.heads} D={self.dim} {self.dtype}"
        if self.projection != "none":
            text += f" projected {self.projection} to {self.v_head_dim}"
        return text + f" {self.empty:.0%} empty" * bool(self.empty) + f" skew {self.skew_us:g} us" * bool(self.skew_us)


def cells_of(sweep: Sweep, ranks: int) -> Iterator[Cell]:
    """All cells of `ranks` ranks, those that share a merger next to each other."""
    axes = product(sweep.heads, sweep.dim, sweep.dtype, sweep.projection)
    for heads, dim, dtype, projection in axes:
        value = None if projection == "none" else sweep.v_head_dim
        for rows, empty, skew in product(sweep.rows, sweep.empty, sweep.skew_us):
            yield Cell(ranks, heads, dim, dtype, projection, value, rows, empty, skew)


def why_not(cell: Cell) -> str:
    """Why a cell can't be measured, whatever the transport; "" where it can."""
    if cell.ranks < 2:
        return "one rank exchanges nothing"
    if cell.heads % cell.ranks:
        return f"{cell.heads} heads don't divide over {cell.ranks} ranks"
    if cell.empty and not round(cell.empty * cell.rows):
        return f"{cell.empty:g} of {cell.rows} rows is none: nothing would be empty"
    return ""


def read_sweep(file: Path | None, options: Mapping[str, tuple[str, Any]]) -> Sweep:
    """The sweep of a file, changed by options.

    Args:
        file: YAML, or None for the defaults.
        options: field -> the option's name, to be named in errors, and its value. Of a field that holds several the
            value may be text with commas between them.

    Raises:
        ConfigError: a line for each thing that is wrong: FILE:LINE or the option, what came, what was expected, the
            nearest valid word.
    """
    source = _from_file(file) if file is not None else Source("sweep", values={})
    if not isinstance(source.values, dict):
        if not source.problems:
            source.add((), f"holds {source.values!r:.60}; expected a mapping, such as `rows: [1, 16, 256]`")
        raise_all(source.problems)
    for field, (option, value) in options.items():
        source.values[field] = _split(field, value)
        source.lines = {path: lines for path, lines in source.lines.items() if path[0] != field}
        source.places[(field,)] = option
    sweep = None
    try:
        sweep = Sweep.model_validate(source.values)
    except ValidationError as failure:
        for error in failure.errors(include_url=False):
            _record(source, error)
    for field in LISTS:
        _check_list(source, field)
    raise_all(sorted(source.problems, key=lambda problem: problem.line or 0))
    assert sweep is not None
    return sweep


def _from_file(file: Path) -> Source:
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--sweep {file}: {error.strerror}; give the path of a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--sweep {file} is not UTF-8 text ({error.reason}); save it as UTF-8") from None
    read = read_yaml(text, str(file))
    values = {} if read.values is None else read.values
    return Source(str(file), values=values, lines=read.lines, problems=read.problems)


def _split(field: str, value: Any) -> Any:
    if field not in LISTS or not isinstance(value, str):
        return value
    kind = {"empty": float, "skew_us": float, "dtype": str, "projection": str}.get(field, int)
    found: list[Any] = []
    for one in value.split(","):
        try:
            found.append(kind(one.strip()))
        except ValueError:
            found.append(one.strip())  # the model says what is wrong with it
    return found


def _record(source: Source, error: Any) -> None:
    """One of pydantic's errors, in words."""
    path = tuple(part for part in error["loc"] if isinstance(part, int) or part in Sweep.model_fields)
    if error["type"] == "extra_forbidden":
        key, keys = error["loc"][0], list(Sweep.model_fields)
        hint = nearest(key, keys) or "; remove it."
        source.add((key,), f"key {key!r} is not known{hint} Valid keys: {', '.join(keys)}", at_key=True)
        return
    if error["type"] == "invalid_key":
        source.add((), f"a key is {error['loc'][0]!r}; expected one of {', '.join(Sweep.model_fields)}")
        return
    value, field = error["input"], str(path[0])
    path = path if isinstance(source.values.get(field), list) else path[:1]
    hint = nearest(value, _WORDS.get(field, ())) if isinstance(value, str) else ""
    shown = "empty" if value in (None, (), []) else f"{value!r:.60}"
    source.add(path, f"{dotted(path)} is {shown}; expected {_EXPECTED[field]}{hint}")


def _check_list(source: Source, field: str) -> None:
    """Record values that come twice, and transports that aren't there."""
    given = source.values.get(field, ())
    values = given if isinstance(given, list | tuple) else (given,)
    for index, value in enumerate(values):
        path = (field, index) if isinstance(given, list | tuple) else (field,)
        if value in values[:index]:
            source.add(path, f"{field} lists {value!r} twice; remove one")
        elif field == "transport" and isinstance(value, str):
            _check_transport(source, path, value)


def _check_transport(source: Source, path: tuple[Any, ...], value: str) -> None:
    try:
        name, _ = named(value)
    except ValueError as error:
        source.add(path, f"{dotted(path)}: {error}")
        return
    names = registered_transports()
    if name not in names:
        source.add(
            path,
            f"{dotted(path)}: no transport is registered as {name!r}{nearest(name, names) or '.'} Registered: "
            f"{', '.join(names)}. Correct the name, or install the package that provides it",
        )
