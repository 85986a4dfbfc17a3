"""`dcpcomm.bench.host_time` but for the GPU: every rank is timed in turn, the others keep up, wrong results tell."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dcpcomm.bench import host_time
from dcpcomm.bench.host_time import Found, Plan
from dcpcomm.bench.ranks import Meeting, ThreadRanks
from dcpcomm.merger import DCPMerger
from dcpcomm.testing import LoopbackWorld
from tests.pretend_gpu import Replay

MERGES = ["merge(out=)", "merge", "merge(return_lse=True)", "merge(valid_counts=, out=)"]


@pytest.fixture(autouse=True)
def _without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_time, "captured", Replay)


def run(plan: Plan, n: int = 2, empty: Callable[[], Any] | None = None) -> list[Found]:
    meeting, cpu = Meeting(n), torch.device("cpu")
    found: list[Found] = LoopbackWorld(n, "cpu").run(
        lambda group: host_time.run(group, ThreadRanks(meeting, group.rank), cpu, plan, empty)
    )
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_each_rank_is_timed_and_its_results_are_right(n: int) -> None:
    launched: list[int] = []
    for found in run(Plan("loopback_peer", 3, 12, 32, rounds=2), n, lambda: launched.append(1)):
        assert list(found.us) == ["torch: x.add_(1)", "an empty kernel", *MERGES]
        assert found.wrong == 0
        for p50, p90, least in found.us.values():
            assert 0 < least <= p50 <= p90
    assert len(launched) == n * (1 + 2 * host_time._DEPTH)


def test_wrong_results_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    real = DCPMerger.merge

    def spoilt(self: DCPMerger, *args: Any, **keywords: Any) -> Any:
        got = real(self, *args, **keywords)
        if self.group.rank == 1 and isinstance(got, torch.Tensor):
            got[0, 0, :2] += 1
        return got

    monkeypatch.setattr(DCPMerger, "merge", spoilt)
    assert [found.wrong for found in run(Plan("loopback", 3, 12, 32, rounds=1))] == [0, 2]


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("here is a GPU")
    words = [sys.executable, "-m", "dcpcomm.bench.host_time", "--transport", "loopback_peer"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr.strip()) == (2, "this needs a CUDA GPU, and torch sees none")
