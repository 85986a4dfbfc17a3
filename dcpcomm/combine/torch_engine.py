"""Pack and combine in torch operations: the engine of CPU, and the reference that stands beside the kernels.

The arithmetic is the canonical one (design, section 3): float32, all LSEs first, weights normalised before the sum,
sources added in rank order. It agrees with the CUDA engine to one ulp of the output dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dcpcomm.combine.wire import WireViews

__all__ = ["by_destination", "clean_lse", "combine", "pack"]

_INF = math.inf
_LOWEST = torch.finfo(torch.float32).min


def by_destination(tensor: torch.Tensor, scatter: str, world_size: int) -> torch.Tensor:
    """A view of `[B, H, ...]` with the destination rank first: `[N, t, h, ...]`, (t, h) being the result's rows. Any
    strides.
    """
    b, h, *rest = tensor.shape
    if scatter == "heads":
        return tensor.view(b, world_size, h // world_size, *rest).transpose(0, 1)
    if scatter == "tokens":
        return tensor.view(world_size, b // world_size, h, *rest)
    return tensor.expand(world_size, b, h, *rest)


def clean_lse(partial_lse: torch.Tensor, empty: torch.Tensor | None) -> torch.Tensor:
    """The LSE as float32, -inf wherever the partial must not count: NaN, +inf, or `[B, H]` in an `empty` row, `[B]`."""
    lse = partial_lse.float()
    keep = lse < _INF  # false for NaN too
    if empty is not None:
        keep &= ~empty.unsqueeze(-1)
    return torch.where(keep, lse, -_INF)


def pack(send: WireViews, partial_out: torch.Tensor, lse: torch.Tensor, rank: int) -> None:
    """Write the rows of every destination but `rank` itself, whose rows don't travel.

    Args:
        partial_out: `[N, t, h, D]`, any strides.
        lse: `[N, t, h]`, any strides and float dtype.
    """
    for others in (slice(0, rank), slice(rank + 1, None)):
        if len(partial_out[others]):
            send.payload[others].copy_(partial_out[others])
            send.lse[others].copy_(lse[others])


def combine(
    rows: Sequence[torch.Tensor], lse: torch.Tensor, lse_base: str, dtype: torch.dtype, want_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The LSE-weighted sum over sources.

    A row's result depends on that row alone: masks change nothing where there is nothing to mask.

    Args:
        rows: by source, `[t, h, D]`, any strides.
        lse: `[N, t, h]`, any float dtype; -inf, NaN and +inf where the source's row is empty.

    Returns:
        out `[t, h, D]` in `dtype`, freshly allocated, and the merged LSE `[t, h]` float32 in `lse_base`, or None.
    """
    lse = lse.float()
    top, weight, total, share = _shares(lse, lse_base)
    every_source_counts = bool((share > 0).all())  # false for NaN: an LSE that is one, or 0 / 0
    if not every_source_counts:
        lse = clean_lse(lse, None)
        top, weight, total, share = _shares(lse, lse_base)
        share = torch.where(weight > 0, share, 0.0)

    merged = torch.empty(rows[0].shape, dtype=torch.float32, device=lse.device)
    columns = share.unsqueeze(-1)
    for source, (one, column) in enumerate(zip(rows, columns, strict=True)):
        if not every_source_counts:
            # A weight of 0 times a NaN is a NaN: what an empty row holds must not be looked at.
            one = torch.where(column > 0, one, 0.0)
        if source == 0:
            torch.mul(one, column, out=merged)
        else:
            merged.addcmul_(one, column)
    merged_lse = None
    if want_lse:
        merged_lse = top + (total.log() if lse_base == "e" else total.log2())
    return merged.to(dtype), merged_lse


def _shares(lse: torch.Tensor, lse_base: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the largest LSE, weights, their sum, weights over their sum), all LSEs known before the first is weighed."""
    top = lse.amax(0).clamp_min_(_LOWEST)  # never -inf, so that -inf - top stays -inf instead of NaN
    weight = lse - top
    weight = weight.exp_() if lse_base == "e" else weight.exp2_()
    total = weight[0]
    for source in range(1, len(weight)):
        total = total + weight[source]
    return top, weight, total, weight / total
