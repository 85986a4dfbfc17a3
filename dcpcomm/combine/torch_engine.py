"""Pack and combine in torch operations: the engine of CPU, and the reference that stands beside the kernels.

The arithmetic is the canonical one (design, section 3): float32, all LSEs first, weights normalised before the sum,
sources added in rank order. It agrees with the CUDA engine to one ulp of the output dtype.
"""

from __future__ import annotations

import math

import torch

from dcpcomm.combine.wire import WireViews

__all__ = ["by_destination", "clean_lse", "combine", "pack"]

_INF = math.inf
_LOWEST = torch.finfo(torch.float32).min


def by_destination(tensor: torch.Tensor, scatter: str, world_size: int) -> torch.Tensor:
    """A view of `[B, H, ...]` with the destination rank first: `[N, t, h, ...]`, (t, h) being the result's rows. Any
    strides.
    """
    if scatter == "heads":
        return tensor.unflatten(1, (world_size, -1)).transpose(0, 1)  # type: ignore[no-any-return]
    if scatter == "tokens":
        return tensor.unflatten(0, (world_size, -1))  # type: ignore[no-any-return]
    return tensor.expand(world_size, *tensor.shape)


def clean_lse(partial_lse: torch.Tensor, empty: torch.Tensor | None) -> torch.Tensor:
    """The LSE as float32 `[B, H]`, -inf wherever the partial must not count: an empty row, NaN, +inf."""
    lse = partial_lse.float()
    keep = lse < _INF  # false for NaN too
    if empty is not None:
        keep &= ~empty.unsqueeze(-1)
    return torch.where(keep, lse, -_INF)


def pack(send: WireViews, partial_out: torch.Tensor, lse: torch.Tensor) -> None:
    """Write the rows of every destination: `partial_out [N, t, h, D]` and `lse [N, t, h]`, of any strides."""
    send.payload.view(partial_out.shape).copy_(partial_out)
    send.lse.view(lse.shape).copy_(lse)


def combine(
    payload: torch.Tensor, lse: torch.Tensor, lse_base: str, dtype: torch.dtype, want_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The LSE-weighted sum over sources.

    Args:
        payload: `[N, R, D]`, source first, any strides.
        lse: `[N, R]` float32, -inf where the source's row is empty.

    Returns:
        out `[R, D]` in `dtype`, freshly allocated, and the merged LSE `[R]` float32 in `lse_base`, or None.
    """
    top = lse.amax(0).clamp_min_(_LOWEST)  # never -inf, so that -inf - top stays -inf instead of NaN
    weight = lse - top
    weight = weight.exp_() if lse_base == "e" else weight.exp2_()
    total = weight.sum(0)
    share = weight / total
    every_source_counts = bool((share > 0).all())  # false for the NaN of 0 / 0 too, a row empty everywhere
    if not every_source_counts:
        share = torch.where(weight > 0, share, 0.0)

    merged: torch.Tensor | None = None
    for rows, column in zip(payload, share.unsqueeze(-1), strict=True):
        if not every_source_counts:
            # A weight of 0 times a NaN is a NaN: what an empty row holds must not be looked at.
            rows = torch.where(column > 0, rows, 0.0)
        if merged is None:
            merged = torch.mul(rows, column)  # float32: the column's dtype wins
        else:
            merged.addcmul_(rows.float(), column)
    assert merged is not None
    merged_lse = None
    if want_lse:
        merged_lse = top + (total.log() if lse_base == "e" else total.log2())
    return merged.to(dtype), merged_lse
