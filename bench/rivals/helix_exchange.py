"""FlashInfer's exchange alone, `decode_cp_a2a_alltoall` on views of the partials. No combine: not a merge.

What a merge over `flashinfer_helix` takes beyond this is what dcpcomm adds to it.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from typing import Any, ClassVar

import torch

from dcpcomm.bench.ranks import Ranks
from dcpcomm.bench.rivals.rival import Rival
from dcpcomm.errors import ShapeError, TransportUnavailable
from dcpcomm.transport import MergeShape

__all__ = ["HelixExchange", "flashinfer_comm"]

_HOPPER = 9
_in_turn = threading.Lock()  # for threads of one process: its host code keeps tables without a lock


class HelixExchange(Rival):
    """Judged by its bits; not on Hopper, where rows are known to come damaged: its name says so there."""

    name: ClassVar[str] = "helix (bare)"
    needs: ClassVar[str] = "FlashInfer"

    def __init__(self, ranks: Ranks, shape: MergeShape, device: torch.device) -> None:
        super().__init__(ranks, shape, device)
        if shape.dtype == torch.float32 or self.heads % 4 or self.heads * shape.head_dim * 2 % 16:
            raise ShapeError(
                f"{self.name}: H/N={self.heads} of {shape.dtype}; expected 2-byte elements and a multiple of 4 heads"
            )
        self._workspace: torch.Tensor | None = None
        self._judged = True

    def prepare(self) -> None:
        comm = flashinfer_comm(self.ranks, self.name, ("decode_cp_a2a_alltoall",))
        self._judged = torch.cuda.get_device_capability(self.device)[0] != _HOPPER
        if not self._judged:
            self.name = "helix (bare, rows damaged)"  # type: ignore[misc]
        n, rank = self.ranks.size, self.ranks.rank
        with _in_turn:  # it compiles here
            words = -(-comm.decode_cp_a2a_workspace_size(n) // 8)
        if self.ranks.on_this_gpu > 1:
            own = torch.empty((n, words), dtype=torch.int64, device=self.device) if rank == 0 else None
            self._workspace = self.ranks.gather(own)[0]
        else:
            config = comm.mnnvl.MnnvlConfig(comm_backend=comm.mnnvl.TorchDistBackend())
            mapping = comm.Mapping(world_size=n, rank=rank, gpus_per_node=n, cp_size=n)
            self._workspace = comm.decode_cp_a2a_allocate_mnnvl_workspace(mapping, mnnvl_config=config)
        comm.decode_cp_a2a_init_workspace(self._workspace, rank, n)
        self._call = comm.decode_cp_a2a_alltoall
        self.ranks.meet()

    def bring(self, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> None:
        self._arrived = tuple(torch.empty_like(one) for one in self._views(partial_out, partial_lse))

    def _views(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n = self.ranks.size
        return out.view(len(out), n, -1), lse.view(len(lse), n, -1)

    def merge(self, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> torch.Tensor:
        views = self._views(partial_out, partial_lse)
        with _in_turn if self.ranks.on_this_gpu > 1 else contextlib.nullcontext():
            self._call(*views, self._workspace, self.ranks.rank, self.ranks.size, out=self._arrived)
        return self._arrived[0]

    def want(self, outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
        own = slice(self.ranks.rank * self.heads, (self.ranks.rank + 1) * self.heads)
        return outs[:, :, own].flatten(2).transpose(0, 1)

    def count_wrong(self, got: torch.Tensor, want: torch.Tensor) -> int:
        if not self._judged:
            return 0
        return int((got.cpu().contiguous().view(torch.int16) != want.contiguous().view(torch.int16)).sum())

    def close(self) -> None:
        """FlashInfer keeps the workspace to the end of the process."""
        self._workspace = None


def flashinfer_comm(ranks: Ranks, name: str, calls: tuple[str, ...]) -> Any:
    """The module with FlashInfer's collectives, on all ranks or on none. Collective.

    Raises:
        TransportUnavailable: some rank hasn't got it, or it lacks one of `calls`.
    """
    reason, comm = "", None
    try:
        comm = importlib.import_module("flashinfer.comm")
        reason = ", ".join(f"FlashInfer has no {call}" for call in calls if not hasattr(comm, call))
    except Exception as error:  # its imports end in drivers and bindings, which raise whatever they like
        reason = f"{type(error).__name__}: {error}"
    for rank, said in enumerate(ranks.gather(reason)):
        if said:
            raise TransportUnavailable(f"{name}: rank {rank}: {said}")
    return comm
