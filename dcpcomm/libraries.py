"""Versions of what merges stand on: as loaded into this process, and as installed, which may not be the same."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

import dcpcomm

__all__ = ["Library", "libraries", "nccl_version", "versions_that_matter"]

#: Distributions that a transport, or a result, may depend on.
_DISTRIBUTIONS = (
    "nvidia-nccl-cu12", "nvidia-nccl-cu13", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nvshmem-cu12",
    "nvidia-nvshmem-cu13", "nvshmem4py-cu12", "nvshmem4py-cu13", "flashinfer-python", "triton",
    "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc", "numpy", "pydantic",
)  # fmt: skip


@dataclass(frozen=True)
class Library:
    """One library. `loaded` is what this process runs, "" where it hasn't loaded it; `installed` what pip knows of."""

    name: str
    loaded: str = ""
    installed: str = ""
    note: str = ""


def libraries() -> list[Library]:
    """All that are there. Imports none of them."""
    found = [
        Library("dcpcomm", dcpcomm.__version__),
        Library("Python", platform.python_version()),
        Library("torch", torch.__version__, _installed("torch")),
        Library("CUDA of torch", torch.version.cuda or "", note="" if torch.version.cuda else "a build for CPU"),
        _nccl(),
    ]
    return found + [Library(name, "", version) for name in _DISTRIBUTIONS if (version := _installed(name))]


def versions_that_matter() -> dict[str, str]:
    """What a measurement depends on, by name: of torch, and on CUDA of CUDA and NCCL."""
    versions = {"torch": str(torch.__version__)}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
        nccl = nccl_version()
        if nccl:
            versions["nccl"] = nccl
    return versions


def nccl_version() -> str:
    """Of the NCCL that torch calls; "" where this build has none."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def _nccl() -> Library:
    """What is loaded is asked itself: torch tells the version it was built with, LD_LIBRARY_PATH may bring another."""
    built = nccl_version()
    loaded = [path for path in _mapped() if os.path.basename(path).startswith("libnccl.so")]
    installed = next((v for n in ("nvidia-nccl-cu12", "nvidia-nccl-cu13") if (v := _installed(n))), "")
    if not loaded:
        return Library("NCCL", "", installed, f"torch was built with {built}" if built else "torch has none")
    number = ctypes.c_int()
    try:
        ctypes.CDLL(loaded[0]).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError) as error:
        return Library("NCCL", "?", installed, f"{loaded[0]} doesn't tell its version: {error}")
    version = f"{number.value // 10_000}.{number.value // 100 % 100}.{number.value % 100}"
    note = f"torch was built with {built}" if built and built != version else ""
    return Library("NCCL", version, installed, note)


def _mapped() -> list[str]:
    """Files that this process has mapped."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if line.count("/")))


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
