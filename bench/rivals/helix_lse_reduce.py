"""FlashInfer's fused exchange and reduce, `decode_cp_a2a_lse_reduce`: one kernel over NCCL's symmetric memory."""

from __future__ import annotations

from typing import ClassVar

import torch

from dcpcomm.bench.ranks import ProcessRanks, Ranks
from dcpcomm.bench.rivals.compiled import Compiled
from dcpcomm.bench.rivals.helix_exchange import flashinfer_comm
from dcpcomm.bench.rivals.rival import Rival
from dcpcomm.errors import ShapeError, TransportUnavailable
from dcpcomm.transport import MergeShape

__all__ = ["HelixLseReduce"]


class HelixLseReduce(Rival):
    """Rows and LSEs brought into its order, `[B, H/N, N, D]`, by one compiled kernel; the rest is FlashInfer's. It sums
    in an order of its own.
    """

    name: ClassVar[str] = "helix_lse_reduce"
    needs_processes: ClassVar[bool] = True
    needs: ClassVar[str] = "FlashInfer"

    def __init__(self, ranks: Ranks, shape: MergeShape, device: torch.device) -> None:
        super().__init__(ranks, shape, device)
        if shape.dtype == torch.float32:
            raise ShapeError(f"{self.name}: partials are {shape.dtype}; expected float16 or bfloat16")
        self._workspace: torch.Tensor | None = None

    def prepare(self) -> None:
        assert isinstance(self.ranks, ProcessRanks)
        calls = "decode_cp_a2a_lse_reduce", "decode_cp_a2a_lse_reduce_create_workspace"
        comm = flashinfer_comm(self.ranks, self.name, calls)
        n, shape = self.ranks.size, self.shape
        try:
            self._workspace = comm.decode_cp_a2a_lse_reduce_create_workspace(
                shape.max_tokens, self.heads, n, shape.head_dim, shape.dtype, self.ranks.nccl()
            )
        except Exception as error:  # of a compiler, of torch's symmetric memory, of NCCL: alike on all ranks
            raise TransportUnavailable(f"{self.name}: {type(error).__name__}: {str(error)[:300]}") from error
        self._call = comm.decode_cp_a2a_lse_reduce
        self._base = "base2" if shape.lse_base == "2" else "basee"
        # It takes calls of one stream only, and a capture has one of its own.
        self._stream = torch.cuda.Stream(self.device)

        def ordered(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows, lses = out.unflatten(1, (n, -1)).transpose(1, 2), lse.unflatten(1, (n, -1)).transpose(1, 2)
            return rows.contiguous(), lses.contiguous()

        self._ordered = Compiled(ordered)

    def bring(self, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> None:
        self._ordered.begin()

    def merge(self, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> torch.Tensor:
        rows, lses = self._ordered(partial_out, partial_lse)
        outer = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            merged: torch.Tensor = self._call(
                rows, lses, self._workspace, self.ranks.rank, self.ranks.size, lse_mode=self._base
            )
        outer.wait_stream(self._stream)
        return merged  # each stream waits for the other before it takes memory again

    def close(self) -> None:
        self._workspace = None
