"""The CUDA driver through ctypes: modules from memory, and launches with as little Python as can be.

Everything happens in the primary context of a device, the one that torch uses.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from dcpcomm.combine.nvrtc import KernelsUnavailable
from dcpcomm.errors import DCPCommError

__all__ = ["Context", "Launch", "Module"]

_Address, _Int = ctypes.c_void_p, ctypes.c_int
_Argument = _Address * 1
_INVALID_CONTEXT = 201
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelsUnavailable(f"the CUDA driver can't be loaded: {error}; install NVIDIA's driver") from error
    library.cuModuleLoadData.argtypes = [ctypes.POINTER(_Address), _Address]
    library.cuModuleGetFunction.argtypes = [ctypes.POINTER(_Address), _Address, ctypes.c_char_p]
    for one in (library.cuModuleUnload, library.cuCtxSetCurrent, library.cuCtxPushCurrent_v2):
        one.argtypes = [_Address]
    library.cuCtxPopCurrent_v2.argtypes = [ctypes.POINTER(_Address)]
    library.cuDeviceGet.argtypes = [ctypes.POINTER(_Int), _Int]
    library.cuDevicePrimaryCtxRetain.argtypes = [ctypes.POINTER(_Address), _Int]
    library.cuDevicePrimaryCtxRelease_v2.argtypes = [_Int]
    library.cuOccupancyMaxActiveBlocksPerMultiprocessor.argtypes = [
        ctypes.POINTER(_Int), _Address, _Int, ctypes.c_size_t,
    ]  # fmt: skip
    text = ctypes.POINTER(ctypes.c_char_p)
    library.cuGetErrorName.argtypes = library.cuGetErrorString.argtypes = [_Int, text]
    return library


def _check(status: int, what: str) -> None:
    if status:
        name, words = ctypes.c_char_p(), ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        _driver().cuGetErrorString(status, ctypes.byref(words))
        said = f"{(name.value or b'an unknown error').decode()} ({status}): {(words.value or b'').decode()}"
        raise DCPCommError(f"{what} failed with {said}")


class Context:
    """A device's primary context, held until `release`. In a `with` it is this thread's current one."""

    def __init__(self, device: torch.device) -> None:
        torch.zeros(1, device=device)  # torch makes the context, with its own flags, before anybody else can
        driver, index, handle = _driver(), _Int(), _Address()
        ordinal = torch.cuda.current_device() if device.index is None else device.index
        _check(driver.cuDeviceGet(ctypes.byref(index), ordinal), "cuDeviceGet")
        _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(handle), index), "cuDevicePrimaryCtxRetain")
        self._device, self._handle = index.value, handle.value

    def __enter__(self) -> None:
        _check(_driver().cuCtxPushCurrent_v2(self._handle), "cuCtxPushCurrent")

    def __exit__(self, *raised: object) -> None:
        before = _Address()
        _check(_driver().cuCtxPopCurrent_v2(ctypes.byref(before)), "cuCtxPopCurrent")

    def make_current(self) -> None:
        """On this thread. Torch does so only on threads that have used it."""
        _check(_driver().cuCtxSetCurrent(self._handle), "cuCtxSetCurrent")

    def release(self) -> None:
        """Safe twice."""
        if self._handle is not None:
            self._handle = None
            _check(_driver().cuDevicePrimaryCtxRelease_v2(self._device), "cuDevicePrimaryCtxRelease")


class Module:
    """Kernels loaded into `context` from a CUBIN, or PTX ending in a 0 byte."""

    def __init__(self, context: Context, image: bytes) -> None:
        handle = _Address()
        with context:
            _check(_driver().cuModuleLoadData(ctypes.byref(handle), image), "cuModuleLoadData")
        self._handle, self._context = handle.value, context

    def function(self, name: str) -> int:
        """The kernel of that name."""
        function = _Address()
        with self._context:
            status = _driver().cuModuleGetFunction(ctypes.byref(function), self._handle, name.encode())
            _check(status, f"cuModuleGetFunction of {name}")
        assert function.value is not None
        return function.value

    def resident_blocks(self, function: int, threads: int) -> int:
        """Blocks of `threads` threads that one multiprocessor holds at once."""
        blocks = _Int()
        with self._context:
            status = _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(blocks), function, threads, 0)
            _check(status, "cuOccupancyMaxActiveBlocksPerMultiprocessor")
        return blocks.value

    def unload(self) -> None:
        """Safe twice. No launch of its kernels, captured ones included, may be left."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            with self._context:
                _check(_driver().cuModuleUnload(handle), "cuModuleUnload")


class _Attribute(ctypes.Structure):
    """`CUlaunchAttribute`: an id, and a union of 64 bytes."""

    _fields_ = [("id", _Int), ("gap", ctypes.c_char * 4), ("value", _Int), ("rest", ctypes.c_char * 60)]


class _Configuration(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", _Address),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


class Launch:
    """One kernel with its grid and its parameter struct, made once and launched often, on the current device. Not for
    two threads at once.

    The struct is read at each launch: its addresses may be changed in between, as long as they stay as aligned as they
    were.

    Args:
        grid: blocks across and down, threads across and down.
        programmatic: it may begin before the kernel in front of it on the stream has ended, and waits for that one
            itself (`griddepcontrol.wait`) before it touches memory. Compute capability 9.0 and above.
    """

    __slots__ = ("_argument", "_attribute", "_configuration", "_context", "_launch", "_what", "grid", "name", "params")

    def __init__(
        self,
        context: Context,
        function: int,
        name: str,
        grid: tuple[int, int, int, int],
        params: ctypes.Structure,
        *,
        programmatic: bool = False,
    ) -> None:
        across, down, wide, tall = grid
        self._argument = _Argument(ctypes.addressof(params))
        self._attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, b"", 1, b"")
        self._configuration = _Configuration(
            across, down, 1, wide, tall, 1, 0, None, ctypes.pointer(self._attribute), int(programmatic)
        )
        # As ctypes objects, for a function without argtypes: half the time of converting them at each launch.
        argument = _Address(ctypes.addressof(self._argument))
        self._what = ctypes.byref(self._configuration), _Address(function), argument, None
        self._launch, self._context = _driver().cuLaunchKernelEx, context
        self.name, self.grid, self.params = name, grid, params

    def __call__(self, stream: int) -> None:
        """On `stream`, a CUDA stream's handle; 0 is the default stream."""
        self._configuration.stream = stream
        status = self._launch(*self._what)
        if status == _INVALID_CONTEXT:  # this thread has not used CUDA yet
            self._context.make_current()
            status = self._launch(*self._what)
        if status:
            _check(status, f"launching {self.name} with grid {self.grid}")
