"""Facts about this machine and this rank's place in it, gathered locally."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "Facts",
    "current_device_index",
    "current_stream",
    "hardware_queues",
    "host_identity",
    "local_facts",
    "on_device",
    "on_gpu",
]


@dataclass(frozen=True)
class Facts:
    """What a transport's `check` may know. Local to one rank.

    Args:
        rank, world_size: of the group.
        host: identity of this host; equal on two ranks exactly where they share a kernel.
        device: "cpu" or "cuda".
        place: what `Capabilities.proven_on` is matched with: "cpu", "loopback" (ranks that are threads of one
            process), "sm_90", ...
        torch_version: as installed.
    """

    rank: int
    world_size: int
    host: str
    device: str
    place: str
    torch_version: str


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
    """The facts of this rank, for a merger on `device`."""
    if loopback:
        place = "loopback"
    elif device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        place = f"sm_{major}{minor}"
    else:
        place = device.type
    return Facts(
        rank=rank,
        world_size=world_size,
        host=host_identity(),
        device=device.type,
        place=place,
        torch_version=torch.__version__,
    )
