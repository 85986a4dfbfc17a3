"""The compiled CPU engine (native.c), called through ctypes. `library` is None where it wasn't compiled."""

from __future__ import annotations

import ctypes
import importlib.util

import torch

from dcpcomm.combine.engine import Engine, Layout, PackedCall, Partials
from dcpcomm.combine.wire import Header, WireViews

__all__ = ["WORDS", "NativeEngine", "library"]

WORDS = "native code"
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


class _Call(ctypes.Structure):
    """`Call` of native.c."""

    _fields_ = (
        *((name, _Int64) for name in ("n", "rank", "t", "h", "d")),
        *((name, _Int64) for name in ("rows_n", "rows_t", "rows_h", "lse_n", "lse_t", "lse_h")),
        ("send", _Address),
        ("recv", _Address),
        *((name, _Int64) for name in ("send_block", "recv_block", "pitch", "lse_at")),
        *((name, _Int32) for name in ("dtype", "lse_dtype", "base_two")),
    )


def _load() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("dcpcomm.combine._native")
    if spec is None or spec.origin is None:
        return None
    loaded = ctypes.CDLL(spec.origin)
    loaded.dcpcomm_pack.argtypes = [ctypes.POINTER(_Call), _Address, _Address, _Words]
    loaded.dcpcomm_combine.argtypes = [
        ctypes.POINTER(_Source), _Int32, *[_Int64] * 3, *[_Int32] * 2, _Address, *[_Int64] * 2, *[_Address] * 2,
    ]  # fmt: skip
    loaded.dcpcomm_combine_packed.argtypes = [
        ctypes.POINTER(_Call), _Address, _Address, _Words, _Address, *[_Int64] * 2, *[_Address] * 3,
    ]  # fmt: skip
    loaded.dcpcomm_transfer.restype = ctypes.c_int
    loaded.dcpcomm_pack.restype = loaded.dcpcomm_combine.restype = None
    return loaded


library = _load()


class NativeEngine(Engine):
    """One pass over the rows on either side of the exchange."""

    @property
    def words(self) -> str:
        return WORDS

    def packed_call(self, channel: int, layout: Layout, send: WireViews, recv: WireViews) -> PackedCall:
        if layout.out[-1] == 1:
            return _NativeCall(self, layout, send, recv)
        heads, width = self.shape.num_heads, layout.width
        return _CopiedCall(_NativeCall(self, layout._replace(out=(heads * width, width, 1)), send, recv))

    def combine(self, rows: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, out_lse: torch.Tensor | None) -> None:
        assert library is not None
        n, t, h, d = rows.shape
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        into = out if out.stride(-1) == 1 or d == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
        size, lse_size = rows.element_size(), lses.element_size()
        rows_n, rows_t, rows_h, _ = (stride * size for stride in rows.stride())
        lse_n, lse_t, lse_h = (stride * lse_size for stride in lses.stride())
        sources = (_Source * n)()
        for index, source in enumerate(sources):
            source.rows, source.rows_t, source.rows_h = rows.data_ptr() + index * rows_n, rows_t, rows_h
            source.lse, source.lse_t, source.lse_h = lses.data_ptr() + index * lse_n, lse_t, lse_h
            source.lse_dtype = _DTYPES[lses.dtype]
        out_t, out_h, _ = into.stride()
        library.dcpcomm_combine(
            sources, n, t, h, d, _DTYPES[rows.dtype], self.shape.lse_base == "2",
            into.data_ptr(), out_t * size, out_h * size,
            None if out_lse is None else out_lse.data_ptr(), (ctypes.c_float * (n + d))(),
        )  # fmt: skip
        if into is not out:
            out.copy_(into)


class _NativeCall(PackedCall):
    """All that native.c must be told, filled in once."""

    def __init__(self, engine: NativeEngine, layout: Layout, send: WireViews, recv: WireViews) -> None:
        shape, n = engine.shape, engine.world_size
        size, lse_size = shape.dtype.itemsize, layout.lse_dtype.itemsize
        rows, lse = layout.strides(shape, n)
        self._row_bytes, self._lse_bytes = rows[1] * size, lse[1] * lse_size  # from one t to the next
        _, t, h, d = send.payload.shape
        self._call = _Call(
            n, engine.rank, t, h, d,
            *(stride * size for stride in rows[:3]), *(stride * lse_size for stride in lse),
            send.address, recv.address, send.block_stride, recv.block_stride, send.pitch, send.lse_at,
            _DTYPES[shape.dtype], _DTYPES[layout.lse_dtype], shape.lse_base == "2",
        )  # fmt: skip
        self._size = size
        self._sources, self._share = (_Source * n)(), (ctypes.c_float * (n + d))()
        self._alive = send, recv  # the addresses are theirs

    def pack(self, partials: Partials, start: int, header: Header) -> None:
        assert library is not None
        library.dcpcomm_pack(
            self._call,
            partials.out.data_ptr() + start * self._row_bytes,
            partials.lse.data_ptr() + start * self._lse_bytes,
            _Words(*header.words()),
        )

    def call_off(self, header: Header) -> None:
        self._alive[0].words[:] = header.words()

    def combine(
        self, partials: Partials, start: int, header: Header, out: torch.Tensor, out_lse: torch.Tensor | None
    ) -> bool:
        assert library is not None
        out_t, out_h, out_d = out.stride()
        if out_d != 1:
            dense = torch.empty(out.shape, dtype=out.dtype)
            same = self.combine(partials, start, header, dense, out_lse)
            if same:
                out.copy_(dense)
            return same
        return bool(
            library.dcpcomm_combine_packed(
                self._call,
                partials.out.data_ptr() + start * self._row_bytes,
                partials.lse.data_ptr() + start * self._lse_bytes,
                _Words(*header.words()),
                out.data_ptr(), out_t * self._size, out_h * self._size,
                None if out_lse is None else out_lse.data_ptr(),
                self._sources, self._share,
            )
        )  # fmt: skip


class _CopiedCall(PackedCall):
    """For partials whose columns don't lie side by side, as native.c wants them: of a copy that is contiguous."""

    def __init__(self, call: PackedCall) -> None:
        self._call = call

    def pack(self, partials: Partials, start: int, header: Header) -> None:
        self._call.pack(partials._replace(out=partials.out.contiguous()), start, header)

    def call_off(self, header: Header) -> None:
        self._call.call_off(header)

    def combine(
        self, partials: Partials, start: int, header: Header, out: torch.Tensor, out_lse: torch.Tensor | None
    ) -> bool:
        return self._call.combine(partials._replace(out=partials.out.contiguous()), start, header, out, out_lse)
