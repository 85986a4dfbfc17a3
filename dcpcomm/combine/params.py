"""How tensors become the fields of the kernels' structs.

Nothing here touches a GPU: addresses and strides are numbers, also those of CPU tensors. A struct keeps no tensor
alive; whoever launches with it does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch

from dcpcomm.combine.structs import CombineParams, Counts, Divisor, PackParams
from dcpcomm.combine.wire import Header
from dcpcomm.errors import ShapeError
from dcpcomm.rows import RowCounts

__all__ = [
    "MOST_ROWS",
    "Wire",
    "WireAt",
    "combine_params",
    "counts_of",
    "divisor",
    "divisor_of",
    "lse_kind",
    "pack_params",
    "pack_unit",
    "record_words",
    "row_unit",
    "strides_of",
    "vectorised",
]

_LSE_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FLOAT32_HALVES = 3
MOST_ROWS = 2**31 - 1


def record_words(world_size: int) -> int:
    """int64 words of a pinned record that fits every kernel: combine's is the longest."""
    return 5 + 4 * world_size


class Wire(Protocol):
    """What is needed of `wire.WireViews`: where block 0 begins, and bytes to the next block, row, and a row's LSE."""

    @property
    def address(self) -> int: ...
    @property
    def block_stride(self) -> int: ...
    @property
    def pitch(self) -> int: ...
    @property
    def lse_at(self) -> int: ...


@dataclass(frozen=True)
class WireAt:
    """A `Wire` that is nothing else."""

    address: int
    block_stride: int
    pitch: int
    lse_at: int


_NO_COUNTS = Counts()


def divisor_of(value: int) -> tuple[int, int]:
    """`(magic, shift)` such that `n // value == n * magic >> 32 >> shift` for all 0 <= n < 2^31; magic 0 for 1."""
    if value == 1:
        return 0, 0
    shift = (value - 1).bit_length() - 1
    return -(-(1 << (32 + shift)) // value), shift


@functools.lru_cache(maxsize=4096)
def divisor(value: int) -> Divisor:
    """`divisor_of` as the kernels take it; shared, so not to be written to."""
    return Divisor(*divisor_of(value))


def counts_of(given: RowCounts | None, token0: int = 0, token_n: int = 0) -> Counts:
    """The struct of `given`, or of no counts at all.

    Args:
        token0, token_n: row (n, t) of the rows at hand is row `token0 + n * token_n + t` of the caller's B.
    """
    if given is None:
        return _NO_COUNTS
    valid, lens, starts = given
    if valid is not None:
        wide = valid.dtype == torch.int64
        return Counts(valid.data_ptr(), valid.stride(0) * valid.element_size(), 0, 0, token0, token_n, 1, wide)
    assert lens is not None
    assert starts is not None
    return Counts(
        lens.data_ptr(), lens.stride(0) * lens.element_size(),
        starts.data_ptr(), starts.stride(0) * starts.element_size(),
        token0, token_n, 2, lens.dtype == torch.int64, starts.dtype == torch.int64, lens.numel(),
    )  # fmt: skip


def lse_kind(lse: torch.Tensor, address: int, strides: int) -> int:
    """`LseKind` of an LSE that lies at `address`; `strides`: in bytes, their bits together."""
    kind = _LSE_KINDS[lse.dtype]
    return _FLOAT32_HALVES if kind == 0 and (address | strides) & 3 else kind


def _largest_unit(bits: int) -> int:
    """The widest load that every address and stride whose bits are set in `bits` allows: 16, 8, 4 or 2 bytes."""
    for unit in (16, 8, 4):
        if not bits & (unit - 1):
            return unit
    return 2


def pack_params(
    send: Wire,
    partial_out: torch.Tensor,
    lse: torch.Tensor,
    rank: int,
    header: Header,
    ordinal: int,
    counts: Counts = _NO_COUNTS,
    progress: int = 0,
) -> PackParams:
    """What a pack of these is launched with.

    Args:
        send: where the blocks go; 16-byte aligned.
        partial_out: `[N, t, h, D]`, any strides, of 2 or 4 bytes an element.
        lse: `[N, t, h]`, any strides, float32, bfloat16 or float16.
        header: its ordinal is not looked at.
        ordinal: address of the channel's int64 in device memory.
        progress: address of pinned host memory, int64 `[2]`, for the calls begun and ended; 0: not told.
    """
    n, t, h, d = partial_out.shape
    size = partial_out.element_size()
    rows_n, rows_t, rows_h, rows_d = strides_of(partial_out, size)
    lse_n, lse_t, lse_h, _ = strides_of(lse, lse.element_size())
    lse_at = lse.data_ptr()
    row_count = n * t * h
    if row_count > MOST_ROWS:
        raise ShapeError(f"{row_count} rows in one exchange; expected at most {MOST_ROWS}")
    _, word1, word2, kind = header.words()
    return PackParams(
        partial_out.data_ptr(), rows_n, rows_t, rows_h, rows_d,
        lse_at, lse_n, lse_t, lse_h,
        send.address, send.block_stride, send.pitch, ordinal, progress, word1, word2, kind,
        counts,
        n, rank, h, d * size, send.lse_at // 16, 0 if kind else row_count, t * h,
        lse_kind(lse, lse_at, lse_n | lse_t | lse_h),
        divisor(t * h or 1), divisor(h or 1),
    )  # fmt: skip


def strides_of(tensor: torch.Tensor, itemsize: int) -> tuple[int, int, int, int]:
    """In bytes, filled up with 0. An axis of one index has none: what torch says of it would look unaligned."""
    shape, strides, axes = tensor.shape, tensor.stride(), tensor.dim()
    first = strides[0] * itemsize if shape[0] > 1 else 0
    second = strides[1] * itemsize if shape[1] > 1 else 0
    third = strides[2] * itemsize if axes > 2 and shape[2] > 1 else 0
    return first, second, third, strides[3] * itemsize if axes > 3 and shape[3] > 1 else 0


def pack_unit(params: PackParams, itemsize: int) -> int:
    """Bytes that a pack may load at once: which of its variants serves."""
    if params.rows_d != itemsize and params.row_bytes != itemsize:
        return min(itemsize, _largest_unit(params.rows | params.rows_n | params.rows_t | params.rows_h | params.rows_d))
    return _largest_unit(params.rows | params.rows_n | params.rows_t | params.rows_h | params.row_bytes)


def combine_params(
    rows: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor,
    out_lse: torch.Tensor | None,
    lse_base: str,
    *,
    own: int = -1,
    own_rows: torch.Tensor | None = None,
    own_lse: torch.Tensor | None = None,
    wire: Wire | None = None,
    header: Header | None = None,
    ordinal: int = 0,
    record: int = 0,
    progress: int = 0,
    counts: Counts = _NO_COUNTS,
) -> CombineParams:
    """What a combine of these is launched with.

    Args:
        rows: `[N, t, h, D]`, the source rank first, any strides; what arrived, say `WireViews.payload`.
        lse: `[N, t, h]`, say `WireViews.lse`.
        out: `[t, h, D]` of the same dtype, any strides.
        out_lse: `[t, h]` float32, contiguous, or None.
        own: the source whose rows and LSE are taken from `own_rows` `[t, h, D]` and `own_lse` `[t, h]`; -1: none.
        wire: whose headers must say what `header` and the ordinal at address `ordinal`, less 1, say; None: unchecked.
        record: address of pinned host memory, int64 `[record_words(N)]`, for headers that differ; 0: not kept.
        progress: as for `pack_params`.
        counts: of the rows of `own`, where no pack has looked at them.
    """
    n, t, h, d = rows.shape
    size = rows.element_size()
    rows_n, rows_t, rows_h, rows_d = strides_of(rows, size)
    lse_n, lse_t, lse_h, _ = strides_of(lse, lse.element_size())
    out_t, out_h, out_d, _ = strides_of(out, size)
    rows_at, lse_at, out_at = rows.data_ptr(), lse.data_ptr(), out.data_ptr()
    rows_unit = row_unit(rows_at | rows_n | rows_t | rows_h, rows_d, d, size)
    own_at = own_t = own_h = own_d = own_lse_at = own_lse_t = own_lse_h = own_kind = 0
    own_unit = rows_unit
    if own >= 0:
        assert own_rows is not None
        assert own_lse is not None
        own_at, own_lse_at = own_rows.data_ptr(), own_lse.data_ptr()
        own_t, own_h, own_d, _ = strides_of(own_rows, size)
        own_lse_t, own_lse_h, _, _ = strides_of(own_lse, own_lse.element_size())
        own_kind = lse_kind(own_lse, own_lse_at, own_lse_t | own_lse_h)
        own_unit = row_unit(own_at | own_t | own_h, own_d, d, size)
    word1 = word2 = kind = headers = header_stride = 0
    if wire is not None and header is not None:
        headers, header_stride = wire.address, wire.block_stride
        _, word1, word2, kind = header.words()
    row_count = t * h
    if row_count > MOST_ROWS:
        raise ShapeError(f"{row_count} rows in one combine; expected at most {MOST_ROWS}")
    params = CombineParams(
        rows_at, rows_n, rows_t, rows_h, rows_d,
        lse_at, lse_n, lse_t, lse_h,
        own_at, own_t, own_h, own_d, own_lse_at, own_lse_t, own_lse_h,
        out_at, out_t, out_h, out_d, out_lse.data_ptr() if out_lse is not None else 0,
        headers, header_stride, ordinal, word1, word2, kind, record, progress,
        counts,
        n, own, h, 0, row_count, lse_kind(lse, lse_at, lse_n | lse_t | lse_h), own_kind, lse_base == "2",
        rows_unit, own_unit, row_unit(out_at | out_t | out_h, out_d, d, size), 0,
        divisor(h or 1),
    )  # fmt: skip
    params.width = d
    return params


def row_unit(bits: int, last: int, width: int, itemsize: int) -> int:
    """16 where whole vectors of a row can be moved, else the bytes that make up an element at a time: 4 or 2."""
    if (last == itemsize or width == 1) and not (bits | width * itemsize) & 15:
        return 16
    return min(itemsize, _largest_unit(bits | last))


def vectorised(params: CombineParams) -> bool:
    """Whether the 16-byte variant serves: own rows may be odd all the same, what arrived and the result may not."""
    return bool(params.rows_unit == 16 and params.out_unit == 16)
