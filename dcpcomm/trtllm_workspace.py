"""Bytes of the workspace that TensorRT-LLM's sparse-MLA kernel needs for a DCP decode step. Pure arithmetic, no torch.

Under DCP the queries of all ranks' heads are gathered before the kernel, and the kernel is asked for the LSE. Its
launcher (behind FlashInfer's `trtllm_batch_decode_with_kv_cache_mla`) then takes a slab of softmax statistics out of
the workspace, one slot for each (head, row, padded query), and has what is left as scratch. A fixed workspace that is
large enough without DCP overflows with it. The idea is that of vLLM PR #48196; docs/trtllm-workspace.md says where each
figure is from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dcpcomm.errors import ShapeError

__all__ = [
    "COUNTER_BYTES",
    "DEFAULT_SCRATCH_BYTES",
    "SparseMLAWorkspace",
    "trtllm_sparse_mla_bytes",
    "trtllm_sparse_mla_max_tokens",
    "trtllm_sparse_mla_parts",
]

MIB = 1 << 20
STATISTICS_BYTES = 8  # of a slot: two float32
QUERY_TILE = 256  # queries of a row are rounded up to whole tiles, one query too
GUARD_BYTES = MIB  # behind the statistics

#: What the launcher's counters take, whatever the step: a part of the scratch.
COUNTER_BYTES = 8 * MIB
#: vLLM's whole workspace where nothing else is said (VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE), counters included. It is
#: enough for the kernel without DCP, so as much is left to it with DCP.
DEFAULT_SCRATCH_BYTES = 394 * MIB


@dataclass(frozen=True)
class SparseMLAWorkspace:
    """What a workspace is made of, in bytes.

    Attributes:
        slab: the softmax statistics and their guard; 0 without DCP, where no LSE is asked for.
        scratch: what is left to the kernel, counters included.
    """

    slab: int
    scratch: int

    @property
    def total(self) -> int:
        return self.slab + self.scratch


def trtllm_sparse_mla_parts(
    *,
    heads_per_rank: int,
    dcp_size: int,
    max_tokens: int,
    max_q_len: int = 1,
    scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
) -> SparseMLAWorkspace:
    """The parts of the workspace of one rank.

    Args:
        heads_per_rank: query heads of one rank before the gathering: H / dcp_size.
        dcp_size: N; 1 is without DCP.
        max_tokens: rows of a launch at the most. Where every scheduled token is a row, prefill included, as in vLLM,
            that is the most tokens of a step (`max_num_batched_tokens`), not of requests.
        max_q_len: query tokens of a row at the most; 1 where every token is a row.
        scratch_bytes: to be left beside the slab, counters included.

    Raises:
        ShapeError: a number below 1, or `scratch_bytes` that doesn't hold the counters.
    """
    _check_positive(
        heads_per_rank=heads_per_rank,
        dcp_size=dcp_size,
        max_tokens=max_tokens,
        max_q_len=max_q_len,
        scratch_bytes=scratch_bytes,
    )
    if scratch_bytes < COUNTER_BYTES:
        raise ShapeError(
            f"scratch_bytes is {scratch_bytes}; expected at least {COUNTER_BYTES} (8 MiB), for the launcher's counters"
        )
    slab = 0
    if dcp_size > 1:
        slab = max_tokens * _row_bytes(heads_per_rank, dcp_size, max_q_len) + GUARD_BYTES
    return SparseMLAWorkspace(slab, scratch_bytes)


def trtllm_sparse_mla_bytes(
    *,
    heads_per_rank: int,
    dcp_size: int,
    max_tokens: int,
    max_q_len: int = 1,
    scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
) -> int:
    """Bytes of the whole workspace of one rank: slab and scratch. Arguments and errors of `trtllm_sparse_mla_parts`."""
    return trtllm_sparse_mla_parts(
        heads_per_rank=heads_per_rank,
        dcp_size=dcp_size,
        max_tokens=max_tokens,
        max_q_len=max_q_len,
        scratch_bytes=scratch_bytes,
    ).total


def trtllm_sparse_mla_max_tokens(
    budget_bytes: int,
    *,
    heads_per_rank: int,
    dcp_size: int,
    max_q_len: int = 1,
    scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
) -> int | None:
    """The most rows whose workspace takes no more than `budget_bytes`: the inverse of `trtllm_sparse_mla_bytes`, exact.

    Returns:
        0 where not even one row fits; None where any number does, as without DCP there is no slab.

    Raises:
        ShapeError: as `trtllm_sparse_mla_parts`.
    """
    _check_positive(budget_bytes=budget_bytes)
    one = trtllm_sparse_mla_parts(
        heads_per_rank=heads_per_rank,
        dcp_size=dcp_size,
        max_tokens=1,
        max_q_len=max_q_len,
        scratch_bytes=scratch_bytes,
    )
    if budget_bytes < one.total:
        return 0
    if not one.slab:
        return None
    return (budget_bytes - scratch_bytes - GUARD_BYTES) // _row_bytes(heads_per_rank, dcp_size, max_q_len)


def _row_bytes(heads_per_rank: int, dcp_size: int, max_q_len: int) -> int:
    """Statistics of one row: the kernel sees the heads of all ranks."""
    return STATISTICS_BYTES * heads_per_rank * dcp_size * (-(-max_q_len // QUERY_TILE) * QUERY_TILE)


def _check_positive(**numbers: Any) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ShapeError(f"{name} is {value!r}; expected an integer of 1 or more")
