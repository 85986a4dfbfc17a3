"""The structs of cuda/params.cuh as ctypes sees them, field by field."""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = [
    "AwaitParams",
    "CombineParams",
    "Counts",
    "Divisor",
    "FusedParams",
    "MoveParams",
    "PackParams",
    "ScaleParams",
    "struct_sizes",
]

_U32, _I32, _U64, _I64 = ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64, ctypes.c_int64


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Divisor(ctypes.Structure):
    """`Divisor`: a number to divide by, as a multiplier and a shift."""

    _fields_ = _fields(_U32, "magic shift")


class Counts(ctypes.Structure):
    """`Counts`: which rows are empty on this rank."""

    _fields_ = [
        ("counts", _U64),
        ("counts_step", _I64),
        ("starts", _U64),
        *_fields(_I64, "starts_step token0 token_n"),
        *_fields(_U32, "mode counts_wide starts_wide requests"),
    ]


class PackParams(ctypes.Structure):
    """The argument of pack.cu's kernels."""

    _fields_ = [
        ("rows", _U64),
        *_fields(_I64, "rows_n rows_t rows_h rows_d"),
        ("lse", _U64),
        *_fields(_I64, "lse_n lse_t lse_h"),
        ("send", _U64),
        *_fields(_I64, "block_stride pitch"),
        *_fields(_U64, "ordinal progress"),
        *_fields(_I64, "word1 word2 kind"),
        ("counts", Counts),
        *_fields(_U32, "ranks rank heads row_bytes vectors row_count per_block lse_kind"),
        ("by_block", Divisor),
        ("by_heads", Divisor),
    ]


class CombineParams(ctypes.Structure):
    """The argument of combine.cu's kernels. `columns` is filled at the launch, by the variant."""

    _fields_ = [
        ("rows", _U64),
        *_fields(_I64, "rows_n rows_t rows_h rows_d"),
        ("lse", _U64),
        *_fields(_I64, "lse_n lse_t lse_h"),
        ("own_rows", _U64),
        *_fields(_I64, "own_t own_h own_d"),
        ("own_lse", _U64),
        *_fields(_I64, "own_lse_t own_lse_h"),
        ("out", _U64),
        *_fields(_I64, "out_t out_h out_d"),
        *_fields(_U64, "out_lse headers"),
        ("header_stride", _I64),
        ("ordinal", _U64),
        *_fields(_I64, "word1 word2 word3"),
        *_fields(_U64, "record progress"),
        ("counts", Counts),
        ("ranks", _U32),
        ("own", _I32),
        *_fields(_U32, "heads columns row_count lse_kind own_lse_kind base_two rows_unit own_unit out_unit unused"),
        ("by_heads", Divisor),
    ]
    width: int  # D: a Python attribute, which the kernels count in vectors or elements


class ScaleParams(ctypes.Structure):
    """The argument of scale.cu's kernels. `columns` and `lanes` are filled at the launch, by the variant."""

    _fields_ = [
        ("rows", _U64),
        *_fields(_I64, "rows_n rows_t rows_h rows_d"),
        ("lse", _U64),
        *_fields(_I64, "lse_source lse_n lse_t"),
        *_fields(_U64, "scaled out_lse"),
        *_fields(_U32, "ranks rank slice heads columns row_count per_block base_two rows_unit lanes"),
        ("by_block", Divisor),
        ("by_heads", Divisor),
    ]
    width: int  # D, as in CombineParams


class FusedParams(ctypes.Structure):
    """The argument of fused.cu's kernels."""

    _fields_ = [
        ("rows", _U64),
        *_fields(_I64, "rows_n rows_t rows_h rows_d"),
        ("lse", _U64),
        *_fields(_I64, "lse_n lse_t lse_h"),
        ("out", _U64),
        *_fields(_I64, "out_t out_h out_d"),
        ("out_lse", _U64),
        *_fields(_I64, "slot_stride source_stride lse_offset lse_stride header_offset poison_offset"),
        *_fields(_U64, "epochs ordinal progress headers record table"),
        ("counts", Counts),
        *_fields(_U32, "tag tokens chunk width kind ranks rank heads vectors row_bytes row_count lse_kind base_two"),
        *_fields(_U32, "rows_unit out_unit most_blocks deadline unused"),
        ("by_vectors", Divisor),
        ("by_heads", Divisor),
        ("peer", _U64 * 16),
    ]


class AwaitParams(ctypes.Structure):
    """The argument of signals.cu's `await_signals`."""

    _fields_ = [*_fields(_U64, "words count state record status"), *_fields(_U32, "first ranks rank deadline")]


class MoveParams(ctypes.Structure):
    """The argument of signals.cu's `move_blocks`."""

    _fields_ = [
        *_fields(_U64, "from_ to"),
        *_fields(_I64, "from_stride to_stride"),
        *_fields(_U64, "count state record"),
        *_fields(_U32, "vectors rank"),
    ]


def struct_sizes() -> dict[str, int]:
    """By macro of params.cuh, the bytes that this side counts with."""
    return {
        "KERNEL_PACK_PARAMS_BYTES": ctypes.sizeof(PackParams),
        "KERNEL_COMBINE_PARAMS_BYTES": ctypes.sizeof(CombineParams),
        "KERNEL_SCALE_PARAMS_BYTES": ctypes.sizeof(ScaleParams),
        "KERNEL_FUSED_PARAMS_BYTES": ctypes.sizeof(FusedParams),
        "KERNEL_AWAIT_PARAMS_BYTES": ctypes.sizeof(AwaitParams),
        "KERNEL_MOVE_PARAMS_BYTES": ctypes.sizeof(MoveParams),
    }
