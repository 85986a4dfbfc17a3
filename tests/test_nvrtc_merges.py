"""Whole merges of the GPU path without a GPU: channels, the CUDA engine, put and take, verification under replays.

Ranks are threads; the kernels' own source runs on CPU, where it waits for other ranks as on a GPU. What is pretended:
that a device is a GPU, streams, and that a capture is the step itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcpcomm import topology, verify
from dcpcomm.backends.loopback import LoopbackPeer
from dcpcomm.combine import cuda_engine
from dcpcomm.combine.gpu import GpuEngine
from dcpcomm.testing import run_conformance
from dcpcomm.testing.conformance import CASES
from tests.emulated import COMPILER, EmulatedKernels

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernels for the CPU with"),
    pytest.mark.timeout(300),
]
#: Of a real GPU: graphs, and launches that return before their kernels have ended (here, who calls a call off waits for
#: its peers).
ELSEWHERE = ("graph-replay", "wrong-call-on-one-rank")


class Replay:
    """In the place of a graph: the step, made again by each replay."""

    def __init__(self, step: Callable[[], Any], device: torch.device) -> None:
        self.replay = step


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("merges")


@pytest.fixture
def pretended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CPU passes for a GPU; the list says which kernels' engines were made."""
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
    monkeypatch.setattr(verify, "captured", Replay)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(GpuEngine, "finish", lambda engine: None)
    return used


def test_conformance_of_the_gpu_path(pretended: list[str]) -> None:
    assert LoopbackPeer.capabilities.graph_capturable, "or verification replays nothing"
    cases = [case for case in CASES if case.name not in ELSEWHERE]
    report = run_conformance("loopback_peer", ranks=(3,), cases=cases, device="cpu", world="threads")
    failed = {result.case: result.detail[:600] for result in report.results if result.outcome == "failed"}
    assert not failed
    assert pretended, "the CUDA engine did not run"
