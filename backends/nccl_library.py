"""NCCL's own sends and receives, over a communicator that torch has made: a fraction of what torch's cost the host."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from dcpcomm import topology
from dcpcomm.combine import native
from dcpcomm.errors import DCPCommError

__all__ = ["PeerExchange", "abort", "communicator", "library"]

_Address, _UINT8 = ctypes.c_void_p, 1


@functools.cache
def library() -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    """NCCL as torch has loaded it, with and without the interpreter's lock while it works; None where it can't be told
    which that is.
    """
    try:
        waiting, quick = ctypes.CDLL("libnccl.so.2"), ctypes.PyDLL("libnccl.so.2")
        version = ctypes.c_int()
        waiting.ncclGetVersion(ctypes.byref(version))
        waiting.ncclGetErrorString.restype = ctypes.c_char_p
        waiting.ncclGetLastError.restype, waiting.ncclGetLastError.argtypes = ctypes.c_char_p, [_Address]
    except (OSError, AttributeError):
        return None
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return (waiting, quick) if version.value == major * 10_000 + minor * 100 + patch else None


def communicator(group: Any) -> int | None:
    """The address of the communicator behind a `ProcessGroupNCCL` that has made its first call; None where this torch
    doesn't tell, or where NCCL can't be called.
    """
    address = getattr(group, "_comm_ptr", None)
    return int(address()) if address is not None and library() is not None else None


def abort(comm: int) -> None:
    """End a communicator, and the kernels that wait in it, without waiting for that.

    On a thread that Python knows nothing of: NCCL waits there for the graphs that hold calls of this communicator, and
    they may live as long as the process.
    """
    found = library()
    assert found is not None
    start, thread, system = ctypes.cast(found[0].ncclCommAbort, _Address), ctypes.c_ulong(), ctypes.CDLL(None)
    if system.pthread_create(ctypes.byref(thread), None, start, _Address(comm)) == 0:
        system.pthread_detach(thread)


class _Message(ctypes.Structure):
    """`Message` of native.c."""

    _fields_ = [("transfer", _Address), ("buffer", _Address), ("nbytes", ctypes.c_int64), ("peer", ctypes.c_int32)]


class _Transfers(ctypes.Structure):
    """`Transfers` of native.c."""

    _fields_ = [
        ("begin", _Address),
        ("end", _Address),
        ("comm", _Address),
        ("messages", ctypes.POINTER(_Message)),
        ("count", ctypes.c_int32),
        ("type", ctypes.c_int32),
    ]


class PeerExchange:
    """Block i of `send` to rank i, and rank i's into block i of `recv`, but for this rank's own, which nobody reads.

    Args:
        comm: from `communicator`.
        device: the current one in every call.
        send, recv: uint8 `[N, 1 + R, W]`, dense within a block.
    """

    def __init__(self, comm: int, rank: int, device: torch.device, send: torch.Tensor, recv: torch.Tensor) -> None:
        found = library()
        assert found is not None
        self._nccl, self._comm, self._device, size = found, comm, device, len(send)
        waiting, _ = found
        outward, inward = (ctypes.cast(one, _Address) for one in (waiting.ncclSend, waiting.ncclRecv))
        messages = []
        for step in range(1, size):
            to, source = (rank + step) % size, (rank - step) % size
            messages.append(_Message(outward, send[to].data_ptr(), send[to].numel(), to))
            messages.append(_Message(inward, recv[source].data_ptr(), recv[source].numel(), source))
        begin, end = (ctypes.cast(one, _Address) for one in (waiting.ncclGroupStart, waiting.ncclGroupEnd))
        self._messages = (_Message * len(messages))(*messages)
        self._all = _Transfers(begin, end, comm, self._messages, len(messages), _UINT8)
        self._make: Callable[[ctypes.c_void_p], int] = self._one_by_one
        if native.library is not None:
            self._make = functools.partial(native.library.dcpcomm_transfer, ctypes.byref(self._all))

    def __call__(self) -> None:
        """On the current stream.

        Raises:
            DCPCommError: NCCL refused.
        """
        status = self._make(_Address(topology.current_stream(self._device)))
        if status:
            waiting, _ = self._nccl
            name = waiting.ncclGetErrorString(status).decode()
            more = (waiting.ncclGetLastError(self._comm) or b"").decode()
            raise DCPCommError(f"NCCL could not exchange rows: {name}: {more}")

    def _one_by_one(self, stream: ctypes.c_void_p) -> int:
        """As `dcpcomm_transfer` of native.c, where that wasn't compiled."""
        waiting, quick = self._nccl
        status: int = quick.ncclGroupStart()
        if status:
            return status
        handle = _Address(self._comm)
        for index, one in enumerate(self._messages):
            transfer = quick.ncclRecv if index % 2 else quick.ncclSend
            buffer, nbytes = _Address(one.buffer), ctypes.c_size_t(one.nbytes)
            status = status or transfer(buffer, nbytes, _UINT8, one.peer, handle, stream)
        ended: int = waiting.ncclGroupEnd()
        return status or ended
