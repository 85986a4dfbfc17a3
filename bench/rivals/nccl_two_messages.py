"""Rows and LSEs in two NCCL all-to-alls, then one compiled merge: what engines' all-to-all back ends do."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist

from dcpcomm.bench.ranks import ProcessRanks
from dcpcomm.bench.rivals.compiled import Compiled
from dcpcomm.bench.rivals.rival import Rival

__all__ = ["NcclTwoMessages"]


class NcclTwoMessages(Rival):
    """Slices brought into order by one compiled kernel each, exchanged, and weighed by another."""

    name: ClassVar[str] = "nccl_two_messages"
    needs_processes: ClassVar[bool] = True

    def prepare(self) -> None:
        assert isinstance(self.ranks, ProcessRanks)
        self._group = self.ranks.nccl()
        n, base_two = self.ranks.size, self.shape.lse_base == "2"

        def split(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            by_destination = out.unflatten(1, (n, -1)).transpose(0, 1), lse.unflatten(1, (n, -1)).transpose(0, 1)
            return by_destination[0].contiguous(), by_destination[1].contiguous()

        def weigh(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
            below = lses - lses.amax(0)
            weight = torch.exp2(below) if base_two else torch.exp(below)
            share = weight / weight.sum(0)
            return (outs.float() * share.unsqueeze(-1)).sum(0).to(outs.dtype)

        self._split, self._weigh = Compiled(split), Compiled(weigh)

    def bring(self, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> None:
        self._split.begin()
        self._weigh.begin()

    def merge(self, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> torch.Tensor:
        out, lse = self._split(partial_out, partial_lse)
        outs, lses = torch.empty_like(out), torch.empty_like(lse)
        dist.all_to_all_single(outs, out, group=self._group)
        dist.all_to_all_single(lses, lse, group=self._group)
        return self._weigh(outs, lses)  # type: ignore[no-any-return]

    def close(self) -> None:
        """The group is the ranks'."""
