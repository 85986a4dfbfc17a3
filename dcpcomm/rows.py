"""Which rows are empty on this rank: from counts per row, or from sequence lengths and where each request's rows
begin.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from dcpcomm.errors import ShapeError

__all__ = ["RowCounts", "clean_lse", "row_counts"]

_COUNT_DTYPES = (torch.int32, torch.int64)


class RowCounts(NamedTuple):
    """How many KV entries each row saw on this rank, in one of two forms.

    Attributes:
        valid_counts: `[B]`, or None.
        seq_lens, query_start_loc: `[S]` and `[S+1]`, or None. Rows at or past the last start are padding, and empty.
    """

    valid_counts: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    query_start_loc: torch.Tensor | None = None

    def empty(self, tokens: int) -> torch.Tensor:
        """`[B]` bool: the rows that saw no entry, whose partial is therefore garbage."""
        if self.valid_counts is not None:
            return self.valid_counts <= 0
        seq_lens, starts = self.seq_lens, self.query_start_loc
        assert seq_lens is not None
        assert starts is not None
        if seq_lens.numel() == 0:
            return torch.ones(tokens, dtype=torch.bool, device=seq_lens.device)
        rows = torch.arange(tokens, device=starts.device, dtype=starts.dtype)
        request = torch.searchsorted(starts.contiguous(), rows, right=True) - 1
        outside = (request < 0) | (request >= seq_lens.numel())
        return outside | (seq_lens[request.clamp(0, seq_lens.numel() - 1)] <= 0)


def clean_lse(partial_lse: torch.Tensor, empty: torch.Tensor | None) -> torch.Tensor:
    """The LSE as float32, -inf wherever the partial must not count: NaN, +inf, or `[B, H]` in an `empty` row, `[B]`."""
    lse = partial_lse.float()
    keep = lse < math.inf  # false for NaN too
    if empty is not None:
        keep &= ~empty.unsqueeze(-1)
    return torch.where(keep, lse, -math.inf)


def row_counts(
    tokens: int,
    device: torch.device,
    valid_counts: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
) -> RowCounts | None:
    """What a merge of `tokens` rows was told of its rows, checked; None where nothing was given: every row counts.

    Raises:
        ShapeError: both forms at once, half of a pair, or a wrong shape, dtype or device.
    """
    if valid_counts is None and seq_lens is None and query_start_loc is None:
        return None
    if valid_counts is not None:
        if seq_lens is not None or query_start_loc is not None:
            raise ShapeError(
                "both valid_counts and seq_lens/query_start_loc were given; expected one form or the other"
            )
        _check("valid_counts", valid_counts, device)
        if valid_counts.shape != (tokens,):
            raise ShapeError(f"valid_counts has shape {tuple(valid_counts.shape)}; expected [B] = [{tokens}]")
        return RowCounts(valid_counts, None, None)
    if seq_lens is None or query_start_loc is None:
        given, missing = ("seq_lens", "query_start_loc") if query_start_loc is None else ("query_start_loc", "seq_lens")
        raise ShapeError(f"{given} was given without {missing}; expected both, or valid_counts")
    _check("seq_lens", seq_lens, device)
    _check("query_start_loc", query_start_loc, device)
    if seq_lens.dim() != 1 or query_start_loc.shape != (seq_lens.numel() + 1,):
        raise ShapeError(
            f"seq_lens has shape {tuple(seq_lens.shape)} and query_start_loc {tuple(query_start_loc.shape)}; expected "
            "[S] and [S+1]"
        )
    return RowCounts(None, seq_lens, query_start_loc)


def _check(name: str, value: torch.Tensor, device: torch.device) -> None:
    if not isinstance(value, torch.Tensor):
        raise ShapeError(f"{name} is a {type(value).__name__}; expected a tensor on {device}")
    if value.dtype not in _COUNT_DTYPES:
        raise ShapeError(f"{name} has dtype {value.dtype}; expected int32 or int64")
    if value.layout != torch.strided or (value.numel() and not value.data_ptr()):
        raise ShapeError(f"{name} is no plain tensor ({type(value).__name__}, {value.layout}); expected a dense one")
    if value.device != device:
        raise ShapeError(f"{name} is on {value.device}; expected {device}, like the partials")
