"""Facts about this machine and this rank's place in it, gathered locally."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dcpcomm.machine import Card, Gpu, Machine, Pair
from dcpcomm.nvml import NvmlAbsent, machine_by_nvml

__all__ = [
    "Facts",
    "current_device_index",
    "current_stream",
    "hardware_queues",
    "host_identity",
    "local_facts",
    "on_device",
    "on_gpu",
    "this_machine",
]

_IMEX_CHANNELS = Path("/dev/nvidia-caps-imex-channels")


@dataclass(frozen=True)
class Facts:
    """What a transport's `check` may know. Local to one rank, but for `ranks`.

    Args:
        rank, world_size: of the group.
        host: identity of this host; equal on two ranks exactly where they share a kernel.
        device: "cpu" or "cuda".
        place: what `Capabilities.proven_on` is matched with: "cpu", "loopback" (ranks that are threads of one
            process), "sm_90", ...
        torch_version: as installed.
        machine: this host's GPUs and what lies between them; None where nobody has looked.
        ranks: of each rank its host and GPU; none before the ranks have met.
    """

    rank: int
    world_size: int
    host: str
    device: str
    place: str
    torch_version: str
    machine: Machine | None = None
    ranks: tuple[Card, ...] = ()

    @property
    def hosts(self) -> int:
        """How many hosts the group spans, as far as it is known."""
        return len({rank.host for rank in self.ranks}) or 1

    def cut_off(self) -> str:
        """Which two GPUs of the group on this host can't reach each other's memory, and why; "" where none is known."""
        gpus = list(dict.fromkeys(rank.gpu for rank in self.ranks if rank.host == self.host and rank.gpu))
        found = self.machine.cut_off(gpus) if self.machine is not None else None
        if found is None:
            return ""
        a, b, pair = found
        why = f": {pair.reason}" if pair.reason else ""
        return f"GPU {a.index} and GPU {b.index} ({pair.link}) have no access to each other's memory{why}"


def host_identity() -> str:
    """Differs between hosts, and between boots of one host; equal in all containers on it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else f"{socket.gethostname()}/{platform.machine()}"


def on_gpu(device: torch.device) -> bool:
    """Whether what is done on `device` has not been done when the call returns."""
    return device.type == "cuda"


def hardware_queues() -> int:
    """How many queues of a GPU its streams share: a kernel that waits holds up what stands behind it in its own."""
    return int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8"))


def current_stream(device: torch.device) -> int:
    """The handle of the current stream of `device`, which has an index."""
    return _raw_stream(device.index)


def _slow_raw_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


#: Of this thread's current device, where there is a GPU.
current_device_index: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
#: Without the object that torch makes of a stream: it costs more than a launch.
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _slow_raw_stream)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Kernels are launched, and libraries set themselves up, on the current device: this one inside of the block."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def local_facts(rank: int, world_size: int, device: torch.device, loopback: bool) -> Facts:
    """The facts of this rank, for a merger on `device`; that it is alone, until the ranks have met."""
    machine = this_machine()
    card = machine.card("")
    if loopback:
        place = "loopback"
    elif device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        place = f"sm_{major}{minor}"
    else:
        place = device.type
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        card = machine.card(str(properties.uuid))
        card = replace(card, name=card.name or properties.name)  # a part of a GPU (MIG) has a UUID of its own
    return Facts(
        rank=rank,
        world_size=world_size,
        host=machine.host,
        device=device.type,
        place=place,
        torch_version=torch.__version__,
        machine=machine,
        ranks=(card,),
    )


def this_machine() -> Machine:
    """This host: its driver, GPUs and links, by NVML or else by CUDA. Looked at once in a process."""
    return replace(_seen(), host=host_identity())


@functools.cache
def _seen() -> Machine:
    try:
        machine = machine_by_nvml("")
    except NvmlAbsent as absent:
        machine = replace(_machine_by_cuda(), gaps=(f"{absent}; neither links nor fabric are known",))
    imex = tuple(sorted(one.name for one in _IMEX_CHANNELS.iterdir())) if _IMEX_CHANNELS.is_dir() else ()
    return replace(machine, device=_processor(), imex=imex)


def _machine_by_cuda() -> Machine:
    """As far as CUDA tells: the GPUs that are visible to this process, and whether one can reach another."""
    if not torch.cuda.is_available():
        return Machine("")
    gpus, pairs = [], []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        architecture = f"sm_{properties.major}{properties.minor}"
        gpus.append(Gpu(index, properties.name, str(properties.uuid), architecture))
    for a in gpus:
        for b in gpus[a.index + 1 :]:
            access = torch.cuda.can_device_access_peer(a.index, b.index)
            pairs.append(Pair(a.uuid, b.uuid, "?", access, "" if access else "CUDA says so"))
    return Machine("", gpus=tuple(gpus), pairs=tuple(pairs))


def _processor() -> str:
    """ "cpu AMD EPYC x2": what CPU merges are timed on."""
    name = platform.machine()
    with contextlib.suppress(OSError):
        named = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
        name = named[1].strip() if named else name
    return f"cpu {name} x{os.cpu_count()}"
