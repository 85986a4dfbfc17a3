"""Prices: what a whole merge is expected to take, so that the cheaper way is taken. Arithmetic only; nothing is
measured here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import yaml

from dcpcomm.combine.wire import block_bytes
from dcpcomm.transport import MergeShape

__all__ = ["Model", "buckets", "load_model", "merge_us", "projection_orders"]


@dataclass(frozen=True)
class Model:
    """One place's assumptions (configs/costs/model.yaml)."""

    latency_us: float
    wire_gb_s: float
    tflops: float
    memory_gb_s: float


@lru_cache
def load_model(place: str) -> Model:
    """The model of a place ("cpu", "loopback", "sm_90", ...); every GPU architecture shares one."""
    text = (resources.files("dcpcomm.configs") / "costs" / "model.yaml").read_text(encoding="utf-8")
    models = yaml.safe_load(text)
    return Model(**models[place if place in models else "cuda"])


def buckets(max_tokens: int) -> list[int]:
    """Upper ends of the ranges of B that are priced apart: powers of two, the last one `max_tokens`."""
    ends = [1 << k for k in range(max_tokens.bit_length()) if 1 << k < max_tokens]
    return [*ends, max_tokens]


def merge_us(shape: MergeShape, world_size: int, tokens: int, width: int, model: Model) -> float:
    """Predicted microseconds of one exchange of `tokens` rows of `width`."""
    rows = shape.rows_per_destination(tokens, world_size)
    sent = (world_size - 1) * block_bytes(rows, width, shape.dtype.itemsize)
    return model.latency_us + sent / (model.wire_gb_s * 1e3)


def projection_orders(shape: MergeShape, world_size: int, model: Model, one_for_all: bool) -> dict[int, str]:
    """ "before" or "after" for each bucket of B: which side of the exchange the W_UV projection is cheaper on.

    Before the merge the wire carries V instead of L columns, but every rank multiplies all heads (vLLM PR #48196);
    after it, only its own slice.

    Args:
        one_for_all: one order for every B, the one cheapest in sum (`deterministic: true`).

    Returns:
        bucket -> order; empty where the shape projects nothing.
    """
    if shape.v_head_dim is None:
        return {}
    prices: dict[int, tuple[float, float]] = {}
    for tokens in buckets(shape.max_tokens):
        after_tokens, after_heads = shape.result_rows(tokens, world_size)
        if shape.scatter == "tokens":
            after_tokens = max(after_tokens, 1)
        before = _bmm_us(shape, tokens, shape.num_heads, model) + merge_us(
            shape, world_size, tokens, shape.v_head_dim, model
        )
        after = _bmm_us(shape, after_tokens, after_heads, model) + merge_us(
            shape, world_size, tokens, shape.head_dim, model
        )
        prices[tokens] = (before, after)
    if one_for_all:
        total_before, total_after = (sum(column) for column in zip(*prices.values(), strict=True))
        return dict.fromkeys(prices, "before" if total_before < total_after else "after")
    return {tokens: "before" if before < after else "after" for tokens, (before, after) in prices.items()}


def _bmm_us(shape: MergeShape, tokens: int, heads: int, model: Model) -> float:
    assert shape.v_head_dim is not None
    flops = 2.0 * tokens * heads * shape.head_dim * shape.v_head_dim
    weights = heads * shape.head_dim * shape.v_head_dim
    rows = tokens * heads * (shape.head_dim + shape.v_head_dim)
    moved = (weights + rows) * shape.dtype.itemsize
    return max(flops / (model.tflops * 1e6), moved / (model.memory_gb_s * 1e3))
