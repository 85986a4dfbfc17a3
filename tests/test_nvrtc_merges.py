"""Whole merges of the GPU path without a GPU: channels, the CUDA engine, verification under replays, over put and take
and over the fused kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcpcomm.backends.loopback import LoopbackPeer
from dcpcomm.testing import run_conformance
from dcpcomm.testing.conformance import CASES
from tests.emulated import COMPILER
from tests.pretend_gpu import pretend

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernels for the CPU with"),
    pytest.mark.timeout(300),
]
#: Of a real GPU: graphs, and launches that return before their kernels have ended (here, who calls a call off waits for
#: its peers).
ELSEWHERE = ("graph-replay", "wrong-call-on-one-rank")


@pytest.mark.parametrize(("kernel", "n", "every"), [("put", 2, 3), ("fused", 3, 1)])
def test_conformance_of_the_gpu_path(
    kernel: str, n: int, every: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of put and take, which passed all of it on a GPU, every third case."""
    used = pretend(monkeypatch, tmp_path)
    assert LoopbackPeer.capabilities.graph_capturable, "or verification replays nothing"
    cases = [case for case in CASES if case.name not in ELSEWHERE][::every]
    config = {"options": {"loopback_peer": {"kernel": kernel}}}
    report = run_conformance("loopback_peer", ranks=(n,), cases=cases, config=config, device="cpu", world="threads")
    failed = {result.case: result.detail[:600] for result in report.results if result.outcome == "failed"}
    assert not failed
    assert used, "the CUDA engine did not run"
