"""The compiled CPU engine (native.c), called through ctypes. `library` is None where it wasn't compiled."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence

import torch

from dcpcomm.combine.wire import Header, WireViews

__all__ = ["can_combine", "can_pack", "combine", "library", "pack"]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_Address, _Int64, _Int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_Words = _Int64 * 4


class _Source(ctypes.Structure):
    """`Source` of native.c: addresses, and strides in bytes."""

    _fields_ = (
        ("rows", _Address),
        ("rows_t", _Int64),
        ("rows_h", _Int64),
        ("lse", _Address),
        ("lse_t", _Int64),
        ("lse_h", _Int64),
        ("lse_dtype", _Int32),
    )


def _load() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("dcpcomm.combine._native")
    if spec is None or spec.origin is None:
        return None
    loaded = ctypes.CDLL(spec.origin)
    loaded.dcpcomm_pack.argtypes = [_Address, ctypes.POINTER(_Source), *[_Int64] * 5, _Words]
    loaded.dcpcomm_combine.argtypes = [
        ctypes.POINTER(_Source), _Int32, *[_Int64] * 3, *[_Int32] * 2, *[_Address] * 3,
    ]  # fmt: skip
    loaded.dcpcomm_pack.restype = loaded.dcpcomm_combine.restype = None
    return loaded


library = _load()


def can_pack(partial_out: torch.Tensor, lse: torch.Tensor) -> bool:
    """Whether `pack` takes these: on CPU, each row's columns side by side."""
    return library is not None and partial_out.is_cpu and partial_out.stride(-1) == 1 and lse.dtype in _DTYPES


def pack(send: WireViews, partial_out: torch.Tensor, lse: torch.Tensor, rank: int, header: Header) -> None:
    """As `torch_engine.pack`: header and rows of every destination but `rank`, in one pass."""
    assert library is not None
    n, t, h, d = partial_out.shape
    rows_n, rows_t, rows_h, _ = (stride * partial_out.element_size() for stride in partial_out.stride())
    lse_n, lse_t, lse_h = (stride * lse.element_size() for stride in lse.stride())
    rows_at, lse_at = partial_out.data_ptr(), lse.data_ptr()
    source = _Source(0, rows_t, rows_h, 0, lse_t, lse_h, _DTYPES[lse.dtype])
    words = _Words(*header.words())
    row_bytes = d * partial_out.element_size()
    for destination in range(n):
        source.rows = rows_at + destination * rows_n
        source.lse = lse_at + destination * lse_n
        block = send.address + destination * send.block_stride
        own = destination == rank  # of which only the header is written
        library.dcpcomm_pack(block, source, 0 if own else t, h, row_bytes, send.pitch, send.lse_at, words)


def can_combine(rows: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> bool:
    """Whether `combine` takes these: on CPU, of dtypes that it knows. Any strides: odd ones are copied first."""
    return library is not None and rows[0].is_cpu and rows[0].dtype in _DTYPES and lses[0].dtype in _DTYPES


def combine(
    rows: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], lse_base: str, dtype: torch.dtype, want_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `torch_engine.combine`, in one pass."""
    assert library is not None
    n = len(rows)
    t, h, d = rows[0].shape
    kept = [one if one.stride(-1) == 1 else one.contiguous() for one in rows]
    sources = (_Source * n)()
    size = dtype.itemsize
    for source, one, lse in zip(sources, kept, lses, strict=True):
        rows_t, rows_h, _ = one.stride()
        lse_t, lse_h = lse.stride()
        lse_size = lse.element_size()
        source.rows, source.rows_t, source.rows_h = one.data_ptr(), rows_t * size, rows_h * size
        source.lse, source.lse_t, source.lse_h = lse.data_ptr(), lse_t * lse_size, lse_h * lse_size
        source.lse_dtype = _DTYPES[lse.dtype]
    out = torch.empty((t, h, d), dtype=dtype)
    out_lse = torch.empty((t, h), dtype=torch.float32) if want_lse else None
    scratch = (ctypes.c_float * (n + d))()
    library.dcpcomm_combine(
        sources, n, t, h, d, _DTYPES[dtype], lse_base == "2", out.data_ptr(),
        out_lse.data_ptr() if out_lse is not None else None, scratch,
    )  # fmt: skip
    return out, out_lse
