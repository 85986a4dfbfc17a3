"""NCCL's own sends and receives, over a communicator that torch has made: a fraction of what torch's cost the host."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from dcpcomm import topology
from dcpcomm.errors import DCPCommError

__all__ = ["PeerExchange", "communicator", "library"]

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
        self._waiting, quick = found
        self._comm, self._device, size = comm, device, len(send)
        begin, one_send, one_recv = quick.ncclGroupStart, quick.ncclSend, quick.ncclRecv
        # As ctypes objects, for functions without argtypes: half the time of converting them at each call.
        handle, nbytes = _Address(comm), ctypes.c_size_t(send[0].numel())
        self._begin, self._end = begin, self._waiting.ncclGroupEnd
        self._calls: list[tuple[Any, tuple[Any, ...]]] = []
        for step in range(1, size):
            to, source = (rank + step) % size, (rank - step) % size
            self._calls.append((one_send, (_Address(send[to].data_ptr()), nbytes, _UINT8, to, handle)))
            self._calls.append((one_recv, (_Address(recv[source].data_ptr()), nbytes, _UINT8, source, handle)))

    def __call__(self) -> None:
        """On the current stream.

        Raises:
            DCPCommError: NCCL refused.
        """
        where = _Address(topology.current_stream(self._device))
        status = self._begin()
        for call, arguments in self._calls:
            status = status or call(*arguments, where)
        status = self._end() or status
        if status:
            name = self._waiting.ncclGetErrorString(status).decode()
            more = (self._waiting.ncclGetLastError(self._comm) or b"").decode()
            raise DCPCommError(f"NCCL could not exchange rows: {name}: {more}")
