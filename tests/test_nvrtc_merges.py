"""Whole merges of the GPU path without a GPU: channels, the CUDA engine, verification under replays; packed, and by the
fused kernel."""

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


@pytest.mark.parametrize(("transport", "n", "every"), [("loopback", 2, 3), ("loopback_peer", 3, 1)])
def test_conformance_of_the_gpu_path(
    transport: str, n: int, every: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    used = pretend(monkeypatch, tmp_path)
    assert LoopbackPeer.capabilities.graph_capturable, "or verification replays nothing"
    cases = [case for case in CASES if case.name not in ELSEWHERE][::every]
    report = run_conformance(transport, ranks=(n,), cases=cases, device="cpu", world="threads")
    failed = {result.case: result.detail[:600] for result in report.results if result.outcome == "failed"}
    assert not failed
    assert used, "the CUDA engine did not run"
