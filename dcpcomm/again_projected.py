"""A merge with W_UV whose tensors lie as those of one that went well: a product, and `Again` behind it or before."""

from __future__ import annotations

from typing import Any

import torch

from dcpcomm.again import Again
from dcpcomm.aliasing import reach
from dcpcomm.alike import Seen
from dcpcomm.projection import GatheredWUV, project

__all__ = ["AgainProjected"]


class AgainProjected(Seen):
    """Merges of one channel, all of one layout, and products with any weights that the merger has checked.

    Args:
        again: of what is merged: projected rows, or latent ones.
        before: whether they are projected before the merge.
        all_heads: whether the product takes weights of all heads.
        want_lse: of the call that went well, as the rest.
        result: what it returned.
    """

    def __init__(
        self,
        again: Again,
        before: bool,
        all_heads: bool,
        want_lse: bool,
        partial_latent: torch.Tensor,
        others: tuple[torch.Tensor | None, ...],
        w_uv: GatheredWUV,
        result: torch.Tensor,
    ) -> None:
        super().__init__(want_lse)
        self._again, self._before, self._all_heads = again, before, all_heads
        self._latent_reach, self._out_reach = reach(partial_latent), reach(result)
        self._reaches = [reach(one) for one in self._read(partial_latent, others, w_uv)]

    @staticmethod
    def _read(
        partial_latent: torch.Tensor, others: tuple[torch.Tensor | None, ...], w_uv: GatheredWUV
    ) -> list[torch.Tensor]:
        """All that a result must not lie in."""
        return [one for one in (partial_latent, w_uv.local, w_uv.full, *others) if one is not None]

    def merge(
        self,
        partial_latent: torch.Tensor,
        partial_lse: torch.Tensor,
        w_uv: GatheredWUV,
        valid_counts: torch.Tensor | None,
        seq_lens: torch.Tensor | None,
        query_start_loc: torch.Tensor | None,
        out: torch.Tensor | None,
        tag: Any,
        own: tuple[int, int],
        looked_at: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
        """As `Again.merge`."""
        again, before = self._again, self._before
        try:
            weights = w_uv.whole if self._all_heads else w_uv.local
            if not looked_at and again.tells(partial_latent, partial_lse, partial_latent if out is None else out):
                return None
            rows = partial_latent.data_ptr()
            if not rows or (own[0] < rows + self._latent_reach and rows < own[1]):
                return None
            if out is not None:
                others = partial_lse, valid_counts, seq_lens, query_start_loc
                begin = out.data_ptr()
                end = begin + self._out_reach
                if not begin or (own[0] < end and begin < own[1]):
                    return None
                for one, far in zip(self._read(partial_latent, others, w_uv), self._reaches, strict=True):
                    at = one.data_ptr()
                    if at < end and begin < at + far:
                        return None
            merged_rows = project(partial_latent, weights) if before else partial_latent
        except Exception:  # raised from here, the peers would meet this rank's next call
            return None
        into = out if before else None
        merged = again.merge(merged_rows, partial_lse, valid_counts, seq_lens, query_start_loc, into, tag, own, True)
        if merged is None or before:
            return merged
        if isinstance(merged, tuple):
            return project(merged[0], weights, out), merged[1]
        return project(merged, weights, out)
