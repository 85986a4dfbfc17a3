"""`nccl_ag_rs`: NCCL all-gather of the LSEs, scale, reduce-scatter: what engines did first, kept as the yardstick.

Scaled partials are rounded to their dtype before NCCL adds them, in its own order: results are near the canonical ones,
not equal to them.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from dcpcomm.backends.nccl_groups import NcclTransport
from dcpcomm.combine.engine import by_destination
from dcpcomm.transport import Capabilities

__all__ = ["NcclAgRs"]

_LOG2E = math.log2(math.e)
_LOWEST = torch.finfo(torch.float32).min


class NcclAgRs(NcclTransport):
    """Merges by itself; a row of weight 0 has no influence, whatever it holds."""

    name: ClassVar[str] = "nccl_ag_rs"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cuda",), multi_host=True, graph_capturable=True, deterministic=False, interruptible=False
    )

    def fused_merge(
        self, partial_out: torch.Tensor, partial_lse: torch.Tensor, channel: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`partial_out [B, H, D]`, `partial_lse [B, H]` float32, -inf where a row is empty -> this rank's rows of the
        merged out, and their LSE.
        """
        self.notice_capture()
        nccl, n, rank, scatter = self._groups[channel], self.group.size, self.group.rank, self.shape.scatter
        mine = partial_lse.contiguous()
        lses = mine.new_empty((n, *mine.shape))
        nccl._allgather_base(lses.flatten(0, 1), mine).wait()

        top = lses.amax(0).clamp_min_(_LOWEST)  # never -inf, so that -inf - top stays -inf instead of NaN
        weights = lses - top
        if self.shape.lse_base == "e":
            weights *= _LOG2E
        total = weights.exp2_().sum(0)
        share = weights[rank] / total  # NaN where every rank's row is empty
        # A weight of 0 times a NaN is a NaN: what an empty row holds must not be looked at.
        scaled = torch.where((share > 0).unsqueeze(-1), partial_out * share.unsqueeze(-1), 0.0).to(partial_out.dtype)
        merged_lse = top + (total.log() if self.shape.lse_base == "e" else total.log2())

        if scatter == "none":
            nccl.allreduce([scaled]).wait()
            return scaled, merged_lse
        by_rank = by_destination(scaled, scatter, n).contiguous()
        merged = torch.empty_like(by_rank[0])
        nccl._reduce_scatter_base(merged, by_rank.flatten(0, 1)).wait()
        return merged, by_destination(merged_lse, scatter, n)[rank].contiguous()
