"""NVSHMEM by nvshmem4py: all that touches its package. One world of PEs for a process, as the library has it.

Memory, puts and signals are taken from the bindings, which know addresses alone: what nvshmem4py's own objects free
when Python collects them would be a collective call at nobody's bidding.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
from typing import Any

import torch

from dcpcomm.errors import DCPCommError
from dcpcomm.transport import Verdict

__all__ = ["NvshmemLibrary", "installed", "library", "loaded", "remedy"]

_OLDEST = "0.1.3"
_CUDAS = ("12", "13")
_NEEDED = (
    "uniqueid_dtype", "init_status", "my_pe", "n_pes", "malloc", "free", "ptr", "putmem_signal_on_stream",
    "signal_wait_until_on_stream",
)  # fmt: skip
_UP = ("STATUS_IS_INITIALIZED", "STATUS_LIMITED_MPG", "STATUS_FULL_MPG")


def remedy() -> str:
    """What to install, for the CUDA of this torch."""
    here = _cuda()
    return " or ".join(
        f"pip install 'dcpcomm[cu{cuda}]' (nvshmem4py-cu{cuda}, nvidia-nvshmem-cu{cuda})"
        for cuda in (_CUDAS if here not in _CUDAS else (here,))
    )


def installed() -> Verdict:
    """Whether nvshmem4py is there to be imported, and for this CUDA. Imports nothing."""
    if importlib.util.find_spec("nvshmem") is None:
        return Verdict(False, "nvshmem4py isn't installed", remedy())
    here = _cuda()
    others = [cuda for cuda in _CUDAS if cuda != here and _version(f"nvshmem4py-cu{cuda}")]
    if here in _CUDAS and others and not _version(f"nvshmem4py-cu{here}"):
        return Verdict(False, f"nvshmem4py is for CUDA {others[0]}; torch was built for CUDA {here}", remedy())
    return Verdict(True)


def loaded() -> Verdict:
    """Import it, and have it load NVSHMEM itself."""
    try:
        library()
    except Exception as error:  # its loaders raise errors of packages that may not be there to be named
        return Verdict(False, f"NVSHMEM can't be used: {type(error).__name__}: {error}", remedy())
    return Verdict(True)


def _cuda() -> str:
    return (torch.version.cuda or "").split(".")[0]


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def library() -> NvshmemLibrary:
    """The one of this process.

    Raises:
        ImportError, DCPCommError: it isn't installed, or is too old; whatever its loader raises.
    """
    return NvshmemLibrary(importlib.import_module("nvshmem.core"), importlib.import_module("nvshmem.bindings"))


class NvshmemLibrary:
    """nvshmem4py's modules, in the terms of this project. Streams are handles.

    Attributes:
        version: of the library that was loaded.
        name: of the world that this process made here; "" where somebody else made it, or nobody.
    """

    def __init__(self, core: Any, bindings: Any) -> None:
        self._core, self._bindings = core, bindings
        missing = [name for name in _NEEDED if not hasattr(bindings, name)]
        versions = core.get_version()  # loads the library itself, which the bindings don't
        if missing:
            raise DCPCommError(
                f"nvshmem4py {versions.nvshmem4py_version} has no {', '.join(missing)}; expected {_OLDEST} or later"
            )
        self.version = str(versions.libnvshmem_version)
        self.name = ""
        self._add = int(bindings.Signal_op.SIGNAL_ADD)
        self._at_least = int(bindings.Cmp_type.CMP_GE)
        self._without_waits = int(bindings.Init_status.STATUS_LIMITED_MPG)
        self._up = tuple(int(getattr(bindings.Init_status, name)) for name in _UP)

    def world(self) -> tuple[int, int] | None:
        """(this process's PE, how many there are); None where NVSHMEM is not initialised."""
        if int(self._bindings.init_status()) not in self._up:
            return None
        return int(self._bindings.my_pe()), int(self._bindings.n_pes())

    @property
    def waits_missing(self) -> bool:
        """Whether PEs share this GPU in a way for which NVSHMEM has no waits on the stream."""
        return int(self._bindings.init_status()) == self._without_waits

    def unique_id(self) -> bytes:
        """What the PEs of a world to come meet by, made by one of them."""
        uid = self._core.get_unique_id()
        return ctypes.string_at(uid.ptr, self._bindings.uniqueid_dtype.itemsize)

    def initialise(self, unique_id: bytes, pe: int, pes: int) -> None:
        """Make the world, on the current device. Collective over its PEs."""
        uid = self._core.get_unique_id(empty=True)
        ctypes.memmove(uid.ptr, unique_id, self._bindings.uniqueid_dtype.itemsize)
        self._core.init(uid=uid, rank=pe, nranks=pes, initializer_method="uid")
        self.name = hashlib.sha256(unique_id).hexdigest()

    def allocate(self, nbytes: int) -> int:
        """The address of symmetric memory. Collective over all PEs, with the same size.

        Raises:
            DCPCommError: there is not so much left.
        """
        address = int(self._bindings.malloc(nbytes) or 0)
        if not address:
            raise DCPCommError(
                f"NVSHMEM has no {nbytes} bytes of symmetric memory left; set NVSHMEM_SYMMETRIC_SIZE to more, on all "
                "ranks, before it is initialised"
            )
        return address

    def free(self, address: int) -> None:
        """Collective over all PEs."""
        self._bindings.free(address)

    def reach(self, address: int, pe: int) -> int:
        """Where this process's own loads and stores find `address` of `pe`; 0: nowhere."""
        return int(self._bindings.ptr(address, pe) or 0)

    def put(self, to: int, source: int, nbytes: int, signal: int, pe: int, stream: int) -> None:
        """See `PutLibrary`. `source` may be written again when the stream has come past this."""
        self._bindings.putmem_signal_on_stream(to, source, nbytes, signal, 1, self._add, pe, stream)

    def settle(self, signal: int, stream: int) -> None:
        """See `PutLibrary`. A wait that is over at once: what NVSHMEM does behind a wait is what is wanted."""
        self._bindings.signal_wait_until_on_stream(signal, self._at_least, 0, stream)
