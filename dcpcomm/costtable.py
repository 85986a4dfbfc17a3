"""A cost table as a file has it: what was measured, on what, and what is assumed where nothing was.

    key           the machine, the group and the versions that the measurements hold for
    merges        transport -> dtype -> rows of wire_bytes, median_us, mad_us, n: whole merges, nothing projected
    projections   dtype -> for heads x latent x value, rows of tokens, median_us, mad_us, n: the product with W_UV
    links, transports, compute      a model: latency and bandwidth, by class of link; arithmetic and memory

`wire_bytes` are those of the rows that a rank sends to its peers, all together; LSEs, headers and padding not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dcpcomm.costkey import CostKey
from dcpcomm.errors import ConfigError
from dcpcomm.machine import LinkClass
from dcpcomm.yamlfile import Lines, dump_yaml, read_yaml

__all__ = [
    "Compute",
    "CostTable",
    "Estimate",
    "Link",
    "MergeRow",
    "Projection",
    "ProjectionRow",
    "dump",
    "parse",
    "read",
]

_MOST = 1e15  # of microseconds 30 years: sums and lines through such figures stay finite


def _a_number(value: Any) -> Any:
    if isinstance(value, bool):  # which Python takes for 1
        raise ValueError(f"got {str(value).lower()}; expected a number")
    return value


_Number = BeforeValidator(_a_number)
_Positive = Annotated[float, _Number, Field(gt=0, le=_MOST, allow_inf_nan=False)]
_NotNegative = Annotated[float, _Number, Field(ge=0, le=_MOST, allow_inf_nan=False)]
_Count = Annotated[int, _Number, Field(gt=0, le=int(_MOST))]
_Bytes = Annotated[int, _Number, Field(ge=0, le=int(_MOST))]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Link(_Part):
    """What an exchange is assumed to take: latency_us + bytes / gb_s."""

    latency_us: _Positive
    gb_s: _Positive


class Compute(_Part):
    """What a batched matrix product is assumed to take: the larger of its arithmetic and its bytes."""

    tflops: _Positive
    memory_gb_s: _Positive


class MergeRow(_Part):
    """A whole merge: the slowest rank's median over `n` timings, and their spread."""

    wire_bytes: _Bytes
    median_us: _Positive
    mad_us: _NotNegative
    n: _Count

    @property
    def at(self) -> int:
        return self.wire_bytes


class ProjectionRow(_Part):
    """`[B, heads, L] @ [heads, L, V]` for B = `tokens`."""

    tokens: _Count
    median_us: _Positive
    mad_us: _NotNegative
    n: _Count

    @property
    def at(self) -> int:
        return self.tokens


class Projection(_Part):
    """All that was measured for one shape of W_UV."""

    heads: _Count
    latent: _Count
    value: _Count
    rows: tuple[ProjectionRow, ...] = Field(min_length=1)


class Estimate(_Part):
    """Microseconds, their spread, and whether they lie outside of what was measured."""

    us: float
    mad_us: float
    extrapolated: bool


class CostTable(_Part):
    """One file. What it lacks, another may have."""

    key: CostKey | None = None
    machine: str = Field(default="", description="of `costkey.machine_id`, where it was measured")
    sources: tuple[str, ...] = Field(default=(), description="where the figures come from, in words")
    options: dict[str, dict[str, Any]] = Field(default={}, description="of the transports, when they were measured")
    merges: dict[str, dict[str, tuple[MergeRow, ...]]] = {}
    projections: dict[str, tuple[Projection, ...]] = {}
    links: dict[LinkClass, Link] = {}
    transports: dict[str, dict[LinkClass, Link]] = {}
    compute: dict[Literal["cpu", "cuda"], Compute] = {}

    @model_validator(mode="after")
    def _is_whole(self) -> CostTable:
        if self.key is None and (self.merges or self.projections):
            raise ValueError("it holds measurements and no key: nobody can tell what machine they are of")
        groups: list[tuple[str, Sequence[MergeRow | ProjectionRow]]]
        groups = [(f"{name}.{dtype}", rows) for name, by in self.merges.items() for dtype, rows in by.items()]
        groups += [(f"projections.{dtype}", one.rows) for dtype, ones in self.projections.items() for one in ones]
        for what, rows in groups:
            if not rows:
                raise ValueError(f"{what} has no rows; expected some, or nothing of that name")
            places = [row.at for row in rows]
            if places != sorted(set(places)):
                raise ValueError(f"rows of {what} are not in ascending order, each once: {places}")
        return self

    def merge(self, transport: str, dtype: str, wire_bytes: int, link: Link) -> Estimate | None:
        """A whole merge of that many bytes; None where this transport was not measured with this dtype.

        Args:
            link: whose bandwidth is taken beyond a single measured point.
        """
        rows = self.merges.get(transport, {}).get(dtype, ())
        return _between(rows, wire_bytes, 1 / (link.gb_s * 1e3)) if rows else None

    def projection(self, dtype: str, heads: int, latent: int, value: int, tokens: int) -> Estimate | None:
        """A product with W_UV; None where its shape was not measured."""
        for one in self.projections.get(dtype, ()):
            if (one.heads, one.latent, one.value) == (heads, latent, value):
                return _between(one.rows, tokens, one.rows[-1].median_us / one.rows[-1].tokens)
        return None

    def over(self, other: CostTable) -> CostTable:
        """The model of this table, and from `other`'s what it lacks."""
        return CostTable(
            links={**other.links, **self.links},
            transports={
                name: {**other.transports.get(name, {}), **self.transports.get(name, {})}
                for name in {*other.transports, *self.transports}
            },
            compute={**other.compute, **self.compute},
        )


def _between(rows: tuple[Any, ...], at: int, slope: float) -> Estimate:
    """Linear between the rows around `at`; flat below the first, and on along the last two beyond the last.

    Args:
        slope: microseconds for one more, beyond a single row.
    """
    first, last = rows[0], rows[-1]
    if at <= first.at:
        return Estimate(us=first.median_us, mad_us=first.mad_us, extrapolated=at < first.at)
    if at > last.at:
        if len(rows) > 1:
            slope = max(0.0, (last.median_us - rows[-2].median_us) / (last.at - rows[-2].at))
        return Estimate(us=last.median_us + (at - last.at) * slope, mad_us=last.mad_us, extrapolated=True)
    above = next(index for index, row in enumerate(rows) if row.at >= at)
    low, high = rows[above - 1], rows[above]
    share = (at - low.at) / (high.at - low.at)
    return Estimate(
        us=low.median_us + (high.median_us - low.median_us) * share,
        mad_us=low.mad_us + (high.mad_us - low.mad_us) * share,
        extrapolated=False,
    )


def read(path: Path) -> CostTable:
    """The table in a file.

    Raises:
        ConfigError: it can't be read, or holds something else than a cost table; with file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cost_table {str(path)!r} can't be read: {error}") from error
    return parse(text, str(path))


def parse(text: str, label: str) -> CostTable:
    """The table in a text.

    Args:
        label: what the text is called in errors.

    Raises:
        ConfigError: as for `read`.
    """
    file = read_yaml(text, label)
    if file.problems:
        raise ConfigError("\n".join(map(str, file.problems)))
    if not file.values:
        raise ConfigError(f"{label}:1: holds nothing; expected a cost table, such as `dcpcomm tune` writes")
    try:
        return CostTable.model_validate(file.values)
    except ValidationError as failure:
        said = [
            f"{label}:{file.lines.get(error['loc'], (1, 1))[1]}: "
            f"{''.join(f'{part}.' for part in error['loc']).rstrip('.') or 'the table'}: {error['msg']}"
            for error in failure.errors(include_url=False)
        ]
        raise ConfigError("\n".join(said)) from failure


def dump(table: CostTable) -> str:
    """The text of a file that `read` takes; a row on each line."""
    values = table.model_dump(mode="json", exclude_defaults=True)
    if "sources" in values:
        values["sources"] = Lines(values["sources"])
    return dump_yaml(values)
