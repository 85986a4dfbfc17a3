"""LSEs all-gathered, rows scaled by their share, then summed by a reduce-scatter: engines' old default."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist

from dcpcomm.bench.ranks import ProcessRanks
from dcpcomm.bench.rivals.compiled import Compiled
from dcpcomm.bench.rivals.rival import Rival

__all__ = ["AllGatherReduceScatter"]


class AllGatherReduceScatter(Rival):
    """Scaled and brought into the order of the reduce-scatter by one compiled kernel. The sum is NCCL's, of rounded
    terms.
    """

    name: ClassVar[str] = "ag_rs"
    needs_processes: ClassVar[bool] = True
    sums_rounded: ClassVar[bool] = True

    def prepare(self) -> None:
        assert isinstance(self.ranks, ProcessRanks)
        self._group = self.ranks.nccl()
        n, rank, base_two = self.ranks.size, self.ranks.rank, self.shape.lse_base == "2"

        def scale(out: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
            below = lses - lses.amax(0)
            weight = torch.exp2(below) if base_two else torch.exp(below)
            share = weight[rank] / weight.sum(0)
            scaled: torch.Tensor = (out.float() * share.unsqueeze(-1)).to(out.dtype)
            by_rank: torch.Tensor = scaled.unflatten(1, (n, -1)).transpose(0, 1)
            return by_rank.contiguous()

        self._scale = Compiled(scale)

    def bring(self, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> None:
        self._scale.begin()

    def merge(self, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> torch.Tensor:
        tokens = partial_out.shape[0]
        lses = partial_lse.new_empty((self.ranks.size, *partial_lse.shape))
        dist.all_gather_into_tensor(lses.flatten(0, 1), partial_lse, group=self._group)
        scaled = self._scale(partial_out, lses)
        merged = partial_out.new_empty((tokens, self.heads, self.shape.head_dim))
        dist.reduce_scatter_tensor(merged, scaled.flatten(0, 1), group=self._group)
        return merged

    def close(self) -> None:
        """The group is the ranks'."""
