"""`nccl_ag_rs`: NCCL all-gather of the LSEs, scale, reduce-scatter: what engines did first, kept as the yardstick.

Scaled partials are rounded to their dtype before NCCL adds them, in its own order: results are near the canonical ones,
not equal to them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.distributed import distributed_c10d as c10d

from dcpcomm.backends.nccl_groups import NcclTransport, done, on_this_stream
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
        self.cleans = self._scaler.cleans

    def fused_merge(
        self, partial_out: torch.Tensor, partial_lse: torch.Tensor, channel: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`partial_out [B, H, D]`, `partial_lse [B, H]` float32 -> this rank's rows of the merged out, and their LSE.
        Temporaries: the gathered LSEs, and the scaled rows.
        """
        self.notice_capture()
        nccl = self._groups[channel]
        mine = partial_lse.contiguous()
        lses = mine.new_empty((self.group.size, *mine.shape))
        done(nccl._allgather_base(lses.flatten(0, 1), mine, on_this_stream(c10d.AllgatherOptions())))
        scaled, merged_lse = self._scaler(partial_out, lses, channel)
        if self.shape.scatter == "none":
            done(nccl.allreduce([scaled], on_this_stream(c10d.AllreduceOptions())))
            return scaled[0], merged_lse
        merged = torch.empty_like(scaled[0])
        options = on_this_stream(c10d.ReduceScatterOptions())
        done(nccl._reduce_scatter_base(merged, scaled.flatten(0, 1), options))
        return merged, merged_lse
