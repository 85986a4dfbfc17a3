"""Which KV entries lie on which rank: interleaved shards, as vLLM and SGLang lay them out.

Entry k of a sequence lies on rank `(k // interleave) % dcp_size`. The lengths that follow belong to the *local* shard,
which is what `merge(seq_lens=...)` and `merge(valid_counts=...)` take.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dcpcomm.errors import ShapeError

__all__ = ["local_kv_lens", "local_row_counts"]


def local_kv_lens(
    global_lens: torch.Tensor | Sequence[int], dcp_size: int, rank: int, interleave: int = 1
) -> torch.Tensor:
    """Entries of each sequence that lie on `rank`.

    Args:
        global_lens: `[S]`, lengths of the whole sequences.

    Returns:
        `[S]` int32 on the same device.

    Raises:
        ShapeError: `rank` outside the group, or a size that isn't positive.
    """
    _check(dcp_size, rank, interleave)
    lens = torch.as_tensor(global_lens).to(torch.int64)
    period = dcp_size * interleave
    full = lens // period * interleave
    rest = (lens % period - rank * interleave).clamp(0, interleave)
    return (full + rest).to(torch.int32)


def local_row_counts(
    global_lens: torch.Tensor | Sequence[int],
    query_start_loc: torch.Tensor | Sequence[int],
    dcp_size: int,
    rank: int,
    interleave: int = 1,
    *,
    num_rows: int | None = None,
) -> torch.Tensor:
    """KV entries that each query row sees on `rank`: the `valid_counts` of a causal, possibly speculative step.

    Request i has rows `query_start_loc[i] .. query_start_loc[i+1]`; the last of them sees all `global_lens[i]`
    entries, the row before it one less, and so on. Counting per row matters: local(G - k) is not local(G) - k.

    Args:
        global_lens: `[S]`, lengths of the whole sequences, this step's rows included.
        query_start_loc: `[S+1]`, where each request's rows begin.
        num_rows: rows of the step with its padding, whose counts are 0. Default `query_start_loc[-1]`, which is read
            on the host: state it under CUDA-graph capture.

    Returns:
        `[num_rows]` int32 on the device of `global_lens`.

    Raises:
        ShapeError: lengths that don't pair up, `rank` outside the group, or a size that isn't positive.
    """
    lens = torch.as_tensor(global_lens).to(torch.int64)
    starts = torch.as_tensor(query_start_loc, device=lens.device).to(torch.int64)
    if lens.dim() != 1 or starts.dim() != 1 or starts.numel() != lens.numel() + 1:
        raise ShapeError(
            f"query_start_loc has shape {tuple(starts.shape)} and global_lens {tuple(lens.shape)}; expected [S+1] and "
            "[S]"
        )
    if num_rows is None:
        num_rows = int(starts[-1])
    rows = torch.arange(num_rows, device=lens.device)
    request = torch.searchsorted(starts, rows, right=True) - 1
    live = (request >= 0) & (request < lens.numel())
    request = request.clamp(0, max(lens.numel() - 1, 0))
    if lens.numel() == 0:
        return torch.zeros(num_rows, dtype=torch.int32, device=lens.device)
    visible = lens[request] - (starts[request + 1] - 1 - rows)
    visible = torch.where(live, visible, 0).clamp_min(0)
    return local_kv_lens(visible, dcp_size, rank, interleave)


def _check(dcp_size: int, rank: int, interleave: int) -> None:
    if dcp_size < 1 or interleave < 1:
        raise ShapeError(f"dcp_size={dcp_size} and interleave={interleave}; expected at least 1 of each")
    if not 0 <= rank < dcp_size:
        raise ShapeError(f"rank={rank}; expected 0 to {dcp_size - 1} for dcp_size={dcp_size}")
