"""The oracle: what a merge means, in float64 and in the plainest way. The judge of every transport and every engine."""

from __future__ import annotations

import math

import torch

from dcpcomm.errors import ShapeError
from dcpcomm.transport import LSE_BASES, SCATTERS

__all__ = ["merge_partials"]


def merge_partials(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    lse_base: str,
    valid_counts: torch.Tensor | None = None,
    scatter: str = "heads",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank's merged result, stacked by rank, from every rank's partials (design: the combine of Helix, arXiv
    2507.07120).

    Args:
        outs: `[N, B, H, D]`, any float dtype: rank n's `partial_out` at index n.
        lses: `[N, B, H]`, in `lse_base`.
        lse_base: "e" or "2".
        valid_counts: `[N, B]` integers; a row with 0 is empty on that rank.
        scatter: "heads", "tokens" or "none".

    Returns:
        outs float64 `[N, B, H/N, D]` ("heads"), `[N, B/N, H, D]` ("tokens") or `[N, B, H, D]` ("none"), and lses
        float64, the same without D, in `lse_base`. Rows empty on every rank: 0 and -inf.

    Raises:
        ShapeError: shapes that don't fit together, or an unknown base or scatter.
    """
    if lse_base not in LSE_BASES or scatter not in SCATTERS:
        raise ShapeError(f"lse_base={lse_base!r}, scatter={scatter!r}; expected one of {LSE_BASES} and of {SCATTERS}")
    if outs.dim() != 4 or lses.shape != outs.shape[:3]:
        raise ShapeError(f"outs {tuple(outs.shape)}, lses {tuple(lses.shape)}; expected [N, B, H, D] and [N, B, H]")
    n, b, h, _ = outs.shape
    scale = 1.0 if lse_base == "e" else math.log(2.0)
    lse = lses.double() * scale
    absent = lse.isnan() | (lse == math.inf)
    if valid_counts is not None:
        if valid_counts.shape != (n, b):
            raise ShapeError(f"valid_counts {tuple(valid_counts.shape)}; expected [N, B] = [{n}, {b}]")
        absent |= (valid_counts <= 0).unsqueeze(-1)
    lse = lse.masked_fill(absent, -math.inf)

    top = lse.amax(0)
    live = top > -math.inf
    weight = torch.exp(lse - torch.where(live, top, 0.0))  # the 0 keeps -inf - -inf, a NaN, out of dead rows
    total = weight.sum(0)
    share = torch.where(live, weight / total, 0.0)
    # A weight of 0 times a NaN is a NaN: such a payload must not be looked at, only left out.
    merged = torch.where(share.unsqueeze(-1) > 0, outs.double() * share.unsqueeze(-1), 0.0).sum(0)
    merged_lse = torch.where(live, top + total.log(), -math.inf) / scale

    if scatter == "none":
        return merged.expand(n, *merged.shape).clone(), merged_lse.expand(n, *merged_lse.shape).clone()
    axis, size = (1, h) if scatter == "heads" else (0, b)
    if size % n:
        raise ShapeError(f"{size} {scatter} don't divide over {n} ranks")
    return torch.stack(merged.chunk(n, axis)), torch.stack(merged_lse.chunk(n, axis))
