"""What a transport that sums by a reduce-scatter does between its collectives: LSEs of all ranks in, scaled rows out.

On a GPU one launch of cuda/scale.cu; elsewhere, and where the kernels can't be compiled, torch operations. Scaled rows
are rounded to their dtype before anybody adds them, so the sum is near the canonical result, not equal to it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from dcpcomm import topology
from dcpcomm.combine.engine import by_destination
from dcpcomm.combine.params import MOST_ROWS, divisor, row_unit, strides_of
from dcpcomm.combine.structs import ScaleParams
from dcpcomm.errors import ShapeError
from dcpcomm.transport import MergeShape

if TYPE_CHECKING:
    from dcpcomm.combine.driver import Launch
    from dcpcomm.combine.kernels import Kernels

__all__ = ["Scaler", "scale_by_torch", "scale_params"]

_LOG2E = math.log2(math.e)
_LOWEST = torch.finfo(torch.float32).min
_BINDINGS_KEPT = 64


class Scaler:
    """Scales one rank's partials, and merges the LSEs of this rank's slice of the result.

    Called on several channels by several threads at once; not so on one channel.

    Attributes:
        cleans: whether NaN and +inf in an LSE may stand for an empty row, besides -inf.
    """

    def __init__(self, shape: MergeShape, rank: int, world_size: int, device: torch.device) -> None:
        self._shape, self._rank, self._world_size, self._device = shape, rank, world_size, device
        self._kernels: Kernels | None = None
        if topology.on_gpu(device):
            from dcpcomm.combine import cuda_engine

            self._kernels = cuda_engine.kernels_for(device, shape.dtype, world_size)
        self.cleans = self._kernels is not None
        # By channel: two threads must not change the addresses of one binding.
        self._bound: list[dict[tuple[object, ...], tuple[Launch, ScaleParams]]] = [{} for _ in range(shape.channels)]

    def __call__(
        self, partial_out: torch.Tensor, lses: torch.Tensor, channel: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`partial_out [B, H, D]`, any strides, and `lses [N, B, H]` float32, contiguous, the source rank first, -inf
        (see `cleans`) where a row is empty -> scaled rows `[N, t, h, D]`, contiguous, the destination first
        (`[1, B, H, D]` where nothing is scattered), and merged LSEs `[t, h]`. Both freshly allocated; a row of weight 0
        becomes 0.
        """
        if self._kernels is None:
            return scale_by_torch(partial_out, lses, self._rank, self._shape.scatter, self._shape.lse_base)
        b, _, d = partial_out.shape
        t, h = self._shape.result_rows(b, self._world_size)
        m = 1 if self._shape.scatter == "none" else self._world_size
        scaled = torch.empty((m, t, h, d), dtype=partial_out.dtype, device=partial_out.device)
        merged_lse = torch.empty((t, h), dtype=torch.float32, device=partial_out.device)
        rows, bound = partial_out.data_ptr(), self._bound[channel]
        key = partial_out.shape, partial_out.stride(), rows & 15
        found = bound.get(key)
        if found is None:
            if len(bound) >= _BINDINGS_KEPT:
                bound.clear()
            params = scale_params(
                partial_out, lses, scaled, merged_lse, self._rank, self._shape.scatter, self._shape.lse_base
            )
            found = bound[key] = self._kernels.bind_scale(params), params
        launch, params = found
        params.rows, params.lse = rows, lses.data_ptr()
        params.scaled, params.out_lse = scaled.data_ptr(), merged_lse.data_ptr()
        launch(topology.current_stream(self._device))
        return scaled, merged_lse


def scale_params(
    partial_out: torch.Tensor,
    lses: torch.Tensor,
    scaled: torch.Tensor,
    out_lse: torch.Tensor,
    rank: int,
    scatter: str,
    lse_base: str,
) -> ScaleParams:
    """What a scale of these is launched with.

    Args:
        partial_out, lses: as for `Scaler`.
        scaled, out_lse: as it returns them; `scaled` begins at a multiple of 16.
    """
    m, t, h, d = scaled.shape
    size = partial_out.element_size()
    rows = by_destination(partial_out, scatter, m)
    rows_n, rows_t, rows_h, rows_d = strides_of(rows, size)
    lse_n, lse_t, _, _ = strides_of(by_destination(lses[0], scatter, m), 4)
    row_count = m * t * h
    if row_count > MOST_ROWS:
        raise ShapeError(f"{row_count} rows in one exchange; expected at most {MOST_ROWS}")
    params = ScaleParams(
        rows.data_ptr(), rows_n, rows_t, rows_h, rows_d,
        lses.data_ptr(), lses.stride(0) * 4, lse_n, lse_t,
        scaled.data_ptr(), out_lse.data_ptr(),
        len(lses), rank, rank if m > 1 else 0, h, 0, row_count, t * h, lse_base == "2",
        row_unit(rows.data_ptr() | rows_n | rows_t | rows_h, rows_d, d, size), 0,
        divisor(t * h or 1), divisor(h or 1),
    )  # fmt: skip
    params.width = d
    return params


def scale_by_torch(
    partial_out: torch.Tensor, lses: torch.Tensor, rank: int, scatter: str, lse_base: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `Scaler` returns, by torch's operations."""
    n = len(lses)
    top = lses.amax(0).clamp_min_(_LOWEST)  # never -inf, so that -inf - top stays -inf instead of NaN
    weights = lses - top
    if lse_base == "e":
        weights *= _LOG2E
    total = weights.exp2_().sum(0)
    share = weights[rank] / total  # NaN where every rank's row is empty
    # A weight of 0 times a NaN is a NaN: what an empty row holds must not be looked at.
    scaled = torch.where((share > 0).unsqueeze(-1), partial_out * share.unsqueeze(-1), 0.0).to(partial_out.dtype)
    merged_lse = top + (total.log() if lse_base == "e" else total.log2())
    if scatter == "none":
        return scaled.unsqueeze(0), merged_lse
    return by_destination(scaled, scatter, n).contiguous(), by_destination(merged_lse, scatter, n)[rank].contiguous()
