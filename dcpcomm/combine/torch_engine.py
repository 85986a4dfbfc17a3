"""Pack and combine in torch operations: the engine of CPU, and the reference that stands beside the kernels.

The order is the canonical one: float32, all LSEs first, exp2, weights normalised before the sum by one reciprocal,
sources added in rank order. Torch has no fused multiply-add, so sums are rounded once more than in native.c: the two
agree to one ulp of a float16 or bfloat16 result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dcpcomm.combine.engine import Engine, Layout, PackedCall, Partials
from dcpcomm.combine.wire import Header, WireViews
from dcpcomm.rows import clean_lse

__all__ = ["WORDS", "TorchCall", "TorchEngine", "combine", "write_result"]

WORDS = "torch operations (nothing compiled is there)"

_LOG2E = math.log2(math.e)
_LOWEST = torch.finfo(torch.float32).min


class TorchEngine(Engine):
    """Any device that torch has, in its own operations."""

    @property
    def words(self) -> str:
        return WORDS

    def packed_call(self, channel: int, layout: Layout, send: WireViews, recv: WireViews) -> PackedCall:
        return TorchCall(self, send, recv)

    def combine(self, rows: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, out_lse: torch.Tensor | None) -> None:
        write_result(combine(list(rows), list(lses), self.shape.lse_base, out_lse is not None), out, out_lse)


class TorchCall(PackedCall):
    """Keeps nothing but the buffers: torch finds out the rest anew in every call."""

    def __init__(self, engine: Engine, send: WireViews, recv: WireViews) -> None:
        self._engine, self._send, self._recv = engine, send, recv

    def call_off(self, header: Header) -> None:
        self._send.words[:] = header.words()

    def pack(self, partials: Partials, start: int, header: Header) -> None:
        self._send.words[:] = header.words()
        self._pack_rows(partials, start)

    def combine(
        self, partials: Partials, start: int, header: Header, out: torch.Tensor, out_lse: torch.Tensor | None
    ) -> bool:
        rank, words = self._engine.rank, header.words()
        if any(tuple(theirs) != words for source, theirs in enumerate(self._recv.words.tolist()) if source != rank):
            return False
        write_result(self._merged(partials, start, out_lse is not None), out, out_lse)
        return True

    def _pack_rows(self, partials: Partials, start: int) -> None:
        out, lse = self._part(partials, start)
        rank, send = self._engine.rank, self._send
        for others in (slice(0, rank), slice(rank + 1, None)):
            if len(out[others]):
                send.payload[others].copy_(out[others])
                send.lse[others].copy_(lse[others])

    def _merged(self, partials: Partials, start: int, want_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        own, own_lse = self._part(partials, start)
        rank, rows, lses = self._engine.rank, list(self._recv.payload), list(self._recv.lse)
        rows[rank], lses[rank] = own[rank], own_lse[rank]
        return combine(rows, lses, self._engine.shape.lse_base, want_lse)

    def _part(self, partials: Partials, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        t = self._send.payload.shape[1]
        return partials.part(self._engine.shape.scatter, self._engine.world_size, start, t)


def write_result(
    merged: tuple[torch.Tensor, torch.Tensor | None], out: torch.Tensor, out_lse: torch.Tensor | None
) -> None:
    """Copy a merged result to where it belongs; `out_lse` None where it isn't wanted."""
    out.copy_(merged[0])
    if out_lse is not None and merged[1] is not None:
        out_lse.copy_(merged[1])


def combine(
    rows: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], lse_base: str, want_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The LSE-weighted sum over sources.

    Masks change nothing where there is nothing to mask. Still, torch's exp2 may round the last few numbers of a tensor
    otherwise than the rest, so here, unlike in native.c, a row's last bit can depend on how many rows there are.

    Args:
        rows: by source, `[t, h, D]`, any strides.
        lses: by source, `[t, h]`, any float dtype; -inf, NaN and +inf where the source's row is empty.

    Returns:
        out `[t, h, D]` in float32, freshly allocated, and the merged LSE `[t, h]` float32 in `lse_base`, or None.
    """
    lse = torch.stack([one.float() for one in lses])
    top, weight, total, share = _shares(lse, lse_base)
    # False for NaN: an LSE that is one, or 0 x inf. Only on CPU, where looking costs no wait for a stream.
    every_source_counts = lse.is_cpu and bool((share > 0).all())
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
    return merged, merged_lse


def _shares(lse: torch.Tensor, lse_base: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the largest LSE, weights, their sum, weights over their sum), all LSEs known before the first is weighed."""
    top = lse.amax(0).clamp_min_(_LOWEST)  # never -inf, so that -inf - top stays -inf instead of NaN
    weight = lse - top
    if lse_base == "e":
        weight *= _LOG2E
    weight.exp2_()
    total = weight[0]
    for source in range(1, len(weight)):
        total = total + weight[source]
    return top, weight, total, weight * total.reciprocal()
