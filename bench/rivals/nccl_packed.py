"""The bare exchange: one NCCL all-to-all of as many bytes as a packed merge sends. No pack, no combine: not a merge.

What a merge over NCCL takes beyond this is what dcpcomm adds to it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist

from dcpcomm.bench.ranks import ProcessRanks
from dcpcomm.bench.rivals.rival import Rival
from dcpcomm.combine.wire import block_bytes

__all__ = ["NcclPacked"]


class NcclPacked(Rival):
    """Blocks of bytes out, blocks of bytes in; judged by their bits."""

    name: ClassVar[str] = "nccl_packed (bare)"
    needs_processes: ClassVar[bool] = True

    def prepare(self) -> None:
        assert isinstance(self.ranks, ProcessRanks)
        self._group = self.ranks.nccl()
        self._seed: int = self.ranks.gather(torch.randint(2**30, ()).item())[0]

    def bring(self, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> None:
        n, itemsize = self.ranks.size, self.shape.dtype.itemsize
        self._block = block_bytes(partial_out.shape[0] * self.heads, self.shape.head_dim, itemsize)
        blocks = [self._bytes(self.ranks.rank, other) for other in range(n)]
        self._send = torch.stack(blocks).to(self.device)
        self._recv = torch.empty_like(self._send)

    def _bytes(self, source: int, destination: int) -> torch.Tensor:
        """uint8, on CPU: what `source` sends to `destination`."""
        generator = torch.Generator().manual_seed(self._seed + source * self.ranks.size + destination)
        return torch.randint(0, 256, (self._block,), dtype=torch.uint8, generator=generator)

    def merge(self, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> torch.Tensor:
        dist.all_to_all_single(self._recv, self._send, group=self._group)
        return self._recv

    def want(self, outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._bytes(other, self.ranks.rank) for other in range(self.ranks.size)])

    def count_wrong(self, got: torch.Tensor, want: torch.Tensor) -> int:
        return int((got.cpu() != want).sum())

    def close(self) -> None:
        """The group is the ranks'."""
