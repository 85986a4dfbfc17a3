"""CPU passes for a GPU: the kernels' own source runs on threads, where it waits for other ranks as on a GPU.

Pretended are that the device is a GPU, streams, and that a capture is the step itself. As a plug-in of pytest
(`-p tests.pretend_gpu`, with DCPCOMM_TEST_RIG=cpu) it takes tests/gpu along that path.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcpcomm import rounds, topology
from dcpcomm.combine import cuda_engine
from dcpcomm.combine.gpu import GpuEngine
from tests.emulated import EmulatedKernels


class Replay:
    """In the place of a graph: the step, made again by each replay."""

    def __init__(self, step: Callable[[], Any], device: torch.device) -> None:
        self.replay = step


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """Until `monkeypatch` is undone. The list says for which (dtype, N) kernels were made."""
    made: dict[Any, Any] = {}
    used: list[str] = []

    def kernels_for(device: torch.device, dtype: torch.dtype, world_size: int) -> Any:
        with cuda_engine._one_at_a_time:
            key = dtype, world_size
            if key not in made:
                made[key] = EmulatedKernels(dtype, world_size, folder)
                used.append(f"{dtype} {world_size}")
            return made[key]

    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(topology, "on_gpu", lambda device: True)
    monkeypatch.setattr(cuda_engine, "kernels_for", kernels_for)
    monkeypatch.setattr(rounds, "captured", Replay)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(topology, "current_stream", lambda device: 0)
    monkeypatch.setattr(topology, "current_device_index", lambda: None)
    monkeypatch.setattr(GpuEngine, "finish", lambda engine: None)
    return used


@pytest.fixture(autouse=True)
def _pretended(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    pretend(monkeypatch, tmp_path_factory.getbasetemp())
