"""NVML, NVIDIA's management library, as far as a probe needs it: GPUs, links between them, fabric, driver.

By ctypes, because the library comes with the driver and a binding may not be installed where engines run. It sees all
GPUs of the host that the container was given, whatever CUDA_VISIBLE_DEVICES says, and starts no CUDA context.
"""

from __future__ import annotations

import contextlib
import ctypes
import uuid
from collections.abc import Iterator

from dcpcomm.machine import Fabric, Gpu, Machine, Pair

__all__ = ["LIBRARY", "NvmlAbsent", "machine_by_nvml"]

LIBRARY = "libnvidia-ml.so.1"
_TEXT = 96
_MOST_LINKS = 36
_P2P_READ, _P2P_WRITE, _P2P_NVLINK = 0, 1, 2
_TO_GPU, _TO_SWITCH = 0, 2
#: As `nvidia-smi topo -m` has them, by what lies between two GPUs on PCIe.
_LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_WHY_NO_ACCESS = {
    1: "the chipset doesn't support it",
    2: "the GPU doesn't support it",
    3: "the I/O hub between them doesn't support it",
    4: "it is disabled in the driver's settings",
    5: "it isn't supported between these two",
}
_FABRIC_STATES = {0: "none", 1: "not started", 2: "in progress", 3: "completed"}


class NvmlAbsent(Exception):
    """There is no NVML here, or it doesn't start; with its reason."""


class _PciInfo(ctypes.Structure):
    """nvmlPciInfo_t"""

    _fields_ = [
        ("bus_id_legacy", ctypes.c_char * 16), ("domain", ctypes.c_uint), ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint), ("device_id", ctypes.c_uint), ("subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    ]  # fmt: skip


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t"""

    _fields_ = [
        ("cluster", ctypes.c_ubyte * 16), ("status", ctypes.c_uint), ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    ]  # fmt: skip


class _Refused(Exception):
    """A call of NVML's failed, or this driver hasn't got it."""


class _Nvml:
    """The library, started."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library_string = getattr(library, "nvmlErrorString", None)
        if library_string is not None:
            library_string.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: object) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise _Refused(f"this driver has no {name}")
        status = function(*arguments)
        if status:
            said = self._library.nvmlErrorString(status) or b"?"
            raise _Refused(f"{name}: {said.decode(errors='replace')}")

    def number(self, name: str, *arguments: object) -> int:
        value = ctypes.c_uint()
        self.call(name, *arguments, ctypes.byref(value))
        return value.value

    def text(self, name: str, *arguments: object) -> str:
        value = ctypes.create_string_buffer(_TEXT)
        self.call(name, *arguments, value, ctypes.c_uint(_TEXT))
        return value.value.decode(errors="replace")

    def handle(self, index: int) -> ctypes.c_void_p:
        value = ctypes.c_void_p()
        self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(value))
        return value


def machine_by_nvml(host: str, library: str = LIBRARY) -> Machine:
    """What NVML says of this host: driver, GPUs, what lies between each two of them.

    What a driver is too old to say, or doesn't allow in this container, is left unknown.

    Raises:
        NvmlAbsent: there is no NVML, or it doesn't start.
    """
    with _started(library) as nvml:
        gpus, handles = [], []
        for index in range(nvml.number("nvmlDeviceGetCount_v2")):
            handle = nvml.handle(index)
            handles.append(handle)
            gpus.append(_gpu(nvml, handle, index))
        links = [_links(nvml, handle) for handle in handles]
        pairs = [
            _pair(nvml, (gpus[a], gpus[b]), (handles[a], handles[b]), (links[a], links[b]))
            for a in range(len(gpus))
            for b in range(a + 1, len(gpus))
        ]
        driver = cuda = ""
        with contextlib.suppress(_Refused):
            driver = nvml.text("nvmlSystemGetDriverVersion")
        with contextlib.suppress(_Refused):
            version = nvml.number("nvmlSystemGetCudaDriverVersion_v2")
            cuda = f"{version // 1000}.{version % 1000 // 10}"
        return Machine(host=host, driver=driver, driver_cuda=cuda, gpus=tuple(gpus), pairs=tuple(pairs))


@contextlib.contextmanager
def _started(library: str) -> Iterator[_Nvml]:
    try:
        nvml = _Nvml(ctypes.CDLL(library))
    except OSError as error:
        raise NvmlAbsent(f"no NVIDIA driver is to be seen here: {error}") from None
    try:
        nvml.call("nvmlInit_v2")
    except _Refused as refused:
        raise NvmlAbsent(f"NVML doesn't start: {refused}") from None
    try:
        yield nvml
    except _Refused as refused:
        raise NvmlAbsent(f"NVML stopped answering: {refused}") from None
    finally:
        with contextlib.suppress(_Refused):
            nvml.call("nvmlShutdown")


def _gpu(nvml: _Nvml, handle: ctypes.c_void_p, index: int) -> Gpu:
    major, minor, pci = ctypes.c_int(), ctypes.c_int(), _PciInfo()
    nvml.call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
    nvml.call("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci))
    return Gpu(
        index=index,
        name=nvml.text("nvmlDeviceGetName", handle),
        uuid=nvml.text("nvmlDeviceGetUUID", handle).removeprefix("GPU-"),  # as CUDA has it
        architecture=f"sm_{major.value}{minor.value}",
        pci=pci.bus_id.decode().lower(),
        fabric=_fabric(nvml, handle),
    )


def _fabric(nvml: _Nvml, handle: ctypes.c_void_p) -> Fabric | None:
    info = _FabricInfo()
    try:
        nvml.call("nvmlDeviceGetGpuFabricInfo", handle, ctypes.byref(info))
    except _Refused:
        return None
    state = _FABRIC_STATES.get(info.state, f"state {info.state}")
    if state == "completed" and info.status:
        state = f"failed with status {info.status}"
    cluster = uuid.UUID(bytes=bytes(info.cluster))
    return Fabric(state, str(cluster) if cluster.int else "", info.clique)


def _links(nvml: _Nvml, handle: ctypes.c_void_p) -> list[str]:
    """Of each active NVLink, where it leads: "switch", a PCI address, or "" where that isn't told."""
    ends = []
    for link in range(_MOST_LINKS):
        number = ctypes.c_uint(link)
        try:
            if not nvml.number("nvmlDeviceGetNvLinkState", handle, number):
                continue
        except _Refused:
            continue  # not there, or not for this container to see
        end = ""
        with contextlib.suppress(_Refused):
            kind = nvml.number("nvmlDeviceGetNvLinkRemoteDeviceType", handle, number)
            end = "switch" if kind == _TO_SWITCH else ""
            if kind == _TO_GPU:
                pci = _PciInfo()
                nvml.call("nvmlDeviceGetNvLinkRemotePciInfo_v2", handle, number, ctypes.byref(pci))
                end = pci.bus_id.decode().lower()
        ends.append(end)
    return ends


def _pair(
    nvml: _Nvml,
    gpus: tuple[Gpu, Gpu],
    handles: tuple[ctypes.c_void_p, ctypes.c_void_p],
    links: tuple[list[str], list[str]],
) -> Pair:
    access: bool | None = None
    reason = ""
    with contextlib.suppress(_Refused):
        for kind in (_P2P_READ, _P2P_WRITE):
            status = nvml.number("nvmlDeviceGetP2PStatus", *handles, ctypes.c_int(kind))
            if status:
                access, reason = False, _WHY_NO_ACCESS.get(status, f"the driver says status {status}")
                break
        else:
            access = True
    lanes = 0
    with contextlib.suppress(_Refused):
        if nvml.number("nvmlDeviceGetP2PStatus", *handles, ctypes.c_int(_P2P_NVLINK)) == 0:
            direct = sum(end == gpus[1].pci for end in links[0])
            # Through a switch every link of one leads to every link of the other.
            lanes = direct or min(sum(end in ("switch", "") for end in ends) for ends in links)
    if lanes:
        return Pair(gpus[0].uuid, gpus[1].uuid, f"NV{lanes}", access, reason)
    link = "?"
    with contextlib.suppress(_Refused):
        level = nvml.number("nvmlDeviceGetTopologyCommonAncestor", *handles)
        link = _LEVELS.get(level, "?")
    return Pair(gpus[0].uuid, gpus[1].uuid, link, access, reason)
