"""Prices: what a whole merge is expected to take, projection included, so that the cheapest way is taken.

Nothing is measured here. A `CostTable` predicts from a file; today's files hold a model per link class (latency,
bandwidth), and every price says where it came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dcpcomm.combine.wire import block_bytes
from dcpcomm.errors import ConfigError
from dcpcomm.transport import MergeShape
from dcpcomm.yamlfile import read_yaml

__all__ = ["CostTable", "Price", "buckets", "load_cost_table"]

_Positive = Annotated[float, Field(gt=0)]
LinkClass = Literal["process", "host", "network", "gpu"]


@dataclass(frozen=True)
class Price:
    """The predicted microseconds of one merge over one transport, and what they come from ("model").

    `projection` is the cheaper order, or "" where nothing is projected.
    """

    transport: str
    projection: str
    us: float
    origin: str


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Link(_Part):
    latency_us: _Positive
    gb_s: _Positive


class _Compute(_Part):
    tflops: _Positive
    memory_gb_s: _Positive


class CostTable(_Part):
    """What is assumed of links, transports and processors."""

    links: dict[LinkClass, _Link] = {}
    transports: dict[str, dict[LinkClass, _Link]] = {}
    compute: dict[Literal["cpu", "cuda"], _Compute] = {}

    def over(self, other: CostTable) -> CostTable:
        """This table, and from `other` what it lacks."""
        return CostTable(
            links={**other.links, **self.links},
            transports={
                name: {**other.transports.get(name, {}), **self.transports.get(name, {})}
                for name in {*other.transports, *self.transports}
            },
            compute={**other.compute, **self.compute},
        )

    def price(
        self,
        transport: str,
        shape: MergeShape,
        world_size: int,
        tokens: int,
        link: LinkClass,
        device: str,
        orders: tuple[str, ...],
    ) -> Price:
        """One whole merge of `tokens` rows over `transport`, in the cheapest of `orders` ("before", "after")."""
        priced = [
            Price(transport, order, self._merge_us(transport, shape, world_size, tokens, link, device, order), "model")
            for order in orders or ("",)
        ]
        return min(priced, key=lambda price: price.us)

    def _merge_us(
        self, transport: str, shape: MergeShape, n: int, tokens: int, link: LinkClass, device: str, order: str
    ) -> float:
        width = shape.v_head_dim if order == "before" and shape.v_head_dim else shape.head_dim
        sent = (n - 1) * block_bytes(shape.rows_per_destination(tokens, n), width, shape.dtype.itemsize)
        rate = self.transports.get(transport, {}).get(link) or self.links[link]
        exchange = (rate.latency_us + sent / (rate.gb_s * 1e3)) if n > 1 else 0.0
        if order == "before":
            return exchange + self._project_us(shape, tokens, shape.num_heads, device)
        if order == "after":
            return exchange + self._project_us(shape, *shape.result_rows(tokens, n), device)
        return exchange

    def _project_us(self, shape: MergeShape, tokens: int, heads: int, device: str) -> float:
        assert shape.v_head_dim is not None
        flops = 2.0 * tokens * heads * shape.head_dim * shape.v_head_dim
        weights = heads * shape.head_dim * shape.v_head_dim
        rows = tokens * heads * (shape.head_dim + shape.v_head_dim)
        rate = self.compute["cuda" if device == "cuda" else "cpu"]
        return max(flops / (rate.tflops * 1e6), (weights + rows) * shape.dtype.itemsize / (rate.memory_gb_s * 1e3))


def buckets(max_tokens: int) -> list[int]:
    """Upper ends of the ranges of B that are priced apart: powers of two, the last one `max_tokens`."""
    ends = [1 << k for k in range(max_tokens.bit_length()) if 1 << k < max_tokens]
    return [*ends, max_tokens]


def load_cost_table(source: str) -> CostTable:
    """The table that a config names: "builtin", or the path of a YAML file over the built-in one.

    Raises:
        ConfigError: the file can't be read, or holds something else than a cost table.
    """
    builtin = (resources.files("dcpcomm.configs.costs") / "builtin.yaml").read_text(encoding="utf-8")
    table = _parse(builtin, "builtin.yaml")
    if source == "builtin":
        return table
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cost_table {source!r} can't be read: {error}") from error
    return _parse(text, source).over(table)


def _parse(text: str, label: str) -> CostTable:
    file = read_yaml(text, label)
    if file.problems:
        raise ConfigError("\n".join(map(str, file.problems)))
    try:
        return CostTable.model_validate(file.values or {})
    except ValidationError as failure:
        said = [
            f"{label}:{file.lines.get(error['loc'], (1, 1))[1]}: {'.'.join(map(str, error['loc']))}: {error['msg']}"
            for error in failure.errors(include_url=False)
        ]
        raise ConfigError("\n".join(said)) from failure
