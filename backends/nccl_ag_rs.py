"""`nccl_ag_rs`: NCCL all-gather of the LSEs, scale, reduce-scatter: what engines did first, kept as the yardstick.

Scaled partials are rounded to their dtype before NCCL adds them, in its own order: results are near the canonical ones,
not equal to them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from dcpcomm.backends.nccl_groups import NcclTransport
from dcpcomm.combine.scale import Scaler
from dcpcomm.group import Group
from dcpcomm.transport import Capabilities, MergeShape

__all__ = ["NcclAgRs"]


class NcclAgRs(NcclTransport):
    """Merges by itself; a row of weight 0 has no influence, whatever it holds."""

    name: ClassVar[str] = "nccl_ag_rs"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cuda",), multi_host=True, graph_capturable=True, deterministic=False, interruptible=False
    )

    def __init__(self, group: Group, shape: MergeShape, options: Any) -> None:
        super().__init__(group, shape, options)
        self._scaler = Scaler(shape, group.rank, group.size, group.device)

    def fused_merge(
        self, partial_out: torch.Tensor, partial_lse: torch.Tensor, channel: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`partial_out [B, H, D]`, `partial_lse [B, H]` float32, -inf where a row is empty -> this rank's rows of the
        merged out, and their LSE. Temporaries: the gathered LSEs, and the scaled rows.
        """
        nccl = self.nccl(channel)
        mine = partial_lse.contiguous()
        lses = mine.new_empty((self.group.size, *mine.shape))
        nccl._allgather_base(lses.flatten(0, 1), mine).wait()
        scaled, merged_lse = self._scaler(partial_out, lses, channel)
        if self.shape.scatter == "none":
            nccl.allreduce([scaled]).wait()
            return scaled[0], merged_lse
        merged = torch.empty_like(scaled[0])
        nccl._reduce_scatter_base(merged, scaled.flatten(0, 1)).wait()
        return merged, merged_lse
