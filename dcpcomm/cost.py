"""Prices: what a whole merge is expected to take, projection included, so that the cheapest way is taken.

Nothing is measured here. Tables are looked through in order, the user's own before the built-in ones, and the first
that fits this machine and has measured this transport tells its time. Where none has, a model does: latency plus bytes
over bandwidth, by class of link. Every price says where it came from.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from dcpcomm import costtable
from dcpcomm.cachefolder import cache_dir
from dcpcomm.costkey import CostKey
from dcpcomm.costtable import CostTable, Estimate, Link
from dcpcomm.errors import ConfigError
from dcpcomm.log import log
from dcpcomm.machine import link_class
from dcpcomm.transport import MergeShape

__all__ = [
    "ELSEWHERE",
    "HERE",
    "MODEL",
    "Costs",
    "Found",
    "Price",
    "Source",
    "buckets",
    "load_costs",
    "tuned_path",
    "wire_bytes",
]

HERE, ELSEWHERE, MODEL = "measured here", "measured elsewhere", "model"
_SPREADS = 2  # that two prices may lie apart and count as equal


@dataclass(frozen=True)
class Price:
    """The predicted microseconds of one merge over one transport.

    Attributes:
        projection: "before" or "after" the exchange, "" where nothing is projected.
        origin: "measured here", "measured elsewhere" or "model"; of a price with parts, that of the least sure.
        mad_us: the spread of what was measured; 0 of a model.
        extrapolated: outside of what was measured.
    """

    transport: str
    projection: str
    us: float
    origin: str
    mad_us: float = 0.0
    extrapolated: bool = False

    def equals(self, other: Price) -> bool:
        """Whether the two lie so close that another measurement might turn them round."""
        return abs(self.us - other.us) <= _SPREADS * max(self.mad_us, other.mad_us)


@dataclass(frozen=True)
class Found:
    """A table, what to call it, and whether it comes with dcpcomm."""

    label: str
    table: CostTable
    shipped: bool = False


@dataclass(frozen=True)
class Source:
    """A table that fits, and what its figures count for."""

    table: CostTable
    origin: str


@dataclass(frozen=True)
class Costs:
    """What prices are made of, for one group on one machine.

    Attributes:
        key: of the group.
        device: "cpu" or "cuda".
        model: what is assumed where nothing was measured.
        sources: tables that fit, in the order in which they are asked.
        notes: of tables, in words: which are used, which may be stale and why, which of the user's don't fit.
        stale: those of the notes that tell of a table of the user's which may be stale.
    """

    key: CostKey
    device: str
    model: CostTable
    sources: tuple[Source, ...] = ()
    notes: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        key: CostKey,
        device: str,
        found: Sequence[Found],
        *,
        machine: str = "",
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Costs:
        """Sort out which tables count.

        Args:
            found: the user's before the built-in ones.
            machine: of `costkey.machine_id`.
            options: of the transports, as configured: one that was measured with others was not measured.
        """
        model = CostTable()
        sources: list[Source] = []
        notes: list[str] = []
        stale: list[str] = []
        for one in found:
            label, table = one.label, one.table
            model = model.over(table)
            if table.key is None:
                continue
            apart = table.key.elsewhere(key)
            if apart:
                if not one.shipped:
                    notes.append(f"{label} isn't used: it is for {'; '.join(apart)}")
                continue
            given = options or {}
            others = [name for name in table.merges if table.options.get(name, {}) != dict(given.get(name, {}))]
            if others:
                notes.append(f"{label} doesn't price {', '.join(others)}: measured with other options")
                table = table.model_copy(update={"merges": {n: m for n, m in table.merges.items() if n not in others}})
            origin = HERE if machine and table.machine == machine else ELSEWHERE
            sources.append(Source(table, origin))
            changed = one.table.key.changed(key) if one.table.key is not None else []
            if not changed:
                notes.append(f"{label}: {origin}")
                continue
            notes.append(
                f"{label}: {origin}, and perhaps stale, with {'; '.join(changed)}: `dcpcomm tune` measures anew"
            )
            if not one.shipped:
                stale.append(notes[-1])
        return cls(key, device, model, tuple(sources), tuple(notes), tuple(stale))

    @property
    def _link(self) -> Link:
        return self.model.links[link_class(self.key.link)]

    def price(self, transport: str, shape: MergeShape, tokens: int, order: str = "") -> Price:
        """One whole merge of `tokens` rows over `transport`, projected in `order` ("" for not at all)."""
        width = shape.v_head_dim if order == "before" and shape.v_head_dim else shape.head_dim
        n, dtype = self.key.ranks, str(shape.dtype).removeprefix("torch.")
        price = Price(transport, order, 0.0, HERE)
        if n > 1:
            price = _plus(price, *self._merge(transport, dtype, wire_bytes(shape, n, tokens, width)))
        if order and shape.v_head_dim:
            rows, heads = (tokens, shape.num_heads) if order == "before" else shape.result_rows(tokens, n)
            price = _plus(price, *self._projection(dtype, shape, rows, heads))
        return price

    def _merge(self, transport: str, dtype: str, nbytes: int) -> tuple[Estimate, str]:
        for source in self.sources:
            estimate = source.table.merge(transport, dtype, nbytes, self._link)
            if estimate is not None:
                return estimate, source.origin
        rate = self.model.transports.get(transport, {}).get(link_class(self.key.link)) or self._link
        return Estimate(us=rate.latency_us + nbytes / (rate.gb_s * 1e3), mad_us=0.0, extrapolated=False), MODEL

    def _projection(self, dtype: str, shape: MergeShape, tokens: int, heads: int) -> tuple[Estimate, str]:
        latent, value = shape.head_dim, shape.v_head_dim
        assert value is not None
        for source in self.sources:
            estimate = source.table.projection(dtype, heads, latent, value, tokens)
            if estimate is not None:
                return estimate, source.origin
        rate = self.model.compute["cuda" if self.device == "cuda" else "cpu"]
        flops = 2.0 * tokens * heads * latent * value
        moved = (heads * latent * value + tokens * heads * (latent + value)) * shape.dtype.itemsize
        us = max(flops / (rate.tflops * 1e6), moved / (rate.memory_gb_s * 1e3))
        return Estimate(us=us, mad_us=0.0, extrapolated=False), MODEL


def _plus(price: Price, estimate: Estimate, origin: str) -> Price:
    surest_first = (HERE, ELSEWHERE, MODEL)
    return replace(
        price,
        us=price.us + estimate.us,
        mad_us=price.mad_us + estimate.mad_us,
        extrapolated=price.extrapolated or estimate.extrapolated,
        origin=max(price.origin, origin, key=surest_first.index),
    )


def wire_bytes(shape: MergeShape, world_size: int, tokens: int, width: int) -> int:
    """Bytes of rows that a rank sends to its peers in a merge, all together, as tables count them."""
    return (world_size - 1) * shape.rows_per_destination(tokens, world_size) * width * shape.dtype.itemsize


def buckets(max_tokens: int) -> list[int]:
    """Upper ends of the ranges of B that are priced apart: powers of two, the last one `max_tokens`."""
    ends = [1 << k for k in range(max_tokens.bit_length()) if 1 << k < max_tokens]
    return [*ends, max_tokens]


def tuned_path(key: CostKey) -> Path:
    """Where `dcpcomm tune` writes what it measures for groups like this, and `cost_table: auto` looks for it."""
    return cache_dir() / "costs" / f"{key.slug}.yaml"


def load_costs(setting: str, key: CostKey | None = None) -> list[Found]:
    """The tables that a config asks for: the user's first, then the built-in ones.

    Args:
        setting: "auto" (what was tuned for `key`, over the built-in tables), "builtin" (those alone), or the path of a
            YAML file, over the built-in tables.
        key: whose tuned table to take; None: nobody's.

    Raises:
        ConfigError: the file can't be read, or holds something else than a cost table.
    """
    found: list[Found] = []
    if setting not in ("auto", "builtin"):
        found.append(Found(setting, costtable.read(Path(setting))))
    elif setting == "auto" and key is not None:
        found += _tuned(tuned_path(key))
    return [*found, *_shipped()]


@functools.cache
def _shipped() -> tuple[Found, ...]:
    folder = resources.files("dcpcomm.configs.costs")
    names = sorted(one.name for one in folder.iterdir() if one.name.endswith(".yaml"))
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in names}
    return tuple(Found(name, costtable.parse(text, name), shipped=True) for name, text in texts.items())


def _tuned(path: Path) -> list[Found]:
    """What was tuned here; an engine starts without it where it is damaged, and says so."""
    try:
        if path.stat().st_uid not in (os.getuid(), 0):
            log.warning("%s belongs to another user: it is left out; see DCPCOMM_CACHE_DIR", path)
            return []
    except OSError:
        return []
    try:
        return [Found(str(path), costtable.read(path))]
    except ConfigError as error:
        log.warning("what was tuned is left out: %s; `dcpcomm tune --fresh` writes it anew", error)
        return []
