"""The benchmark's own kernels: `cuda/*.cu`, compiled and kept as the merges' are, one instance for each rank."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from dcpcomm.combine.driver import Context, Launch, Module
from dcpcomm.combine.nvrtc import Binary, compile_kernels
from dcpcomm.combine.structs import struct_sizes

__all__ = ["FOLDER", "KernelFile", "build"]

_one_at_a_time = threading.Lock()
FOLDER = Path(__file__).resolve().parent / "cuda"


def build(name: str, defines: Mapping[str, int], capability: tuple[int, int]) -> Binary:
    """Kernel file `name` ("limits.cu") for a GPU of compute capability `capability`."""
    with _one_at_a_time:  # ranks that are threads: the first compiles, the others find it on disk
        return compile_kernels(FOLDER / name, {**struct_sizes(), **defines}, capability)


class KernelFile:
    """One file's kernels, loaded.

    Raises:
        KernelsUnavailable: nothing to compile them with, or no driver.
    """

    def __init__(self, name: str, defines: Mapping[str, int], device: torch.device) -> None:
        binary = build(name, defines, torch.cuda.get_device_capability(device))
        self._context = Context(device)
        self._module = Module(self._context, binary.image)

    def bind(
        self, name: str, grid: tuple[int, int, int, int], params: ctypes.Structure, *, programmatic: bool = False
    ) -> Launch:
        """Kernel `name` with its grid (grid x and y, block x and y) and its parameters."""
        return Launch(self._context, self._module.function(name), name, grid, params, programmatic=programmatic)

    def close(self) -> None:
        """Safe twice. No launch, captured ones included, may be left."""
        self._module.unload()
        self._context.release()
