"""`dcpcomm.bench.replays` but for the GPU: its data change, right merges are found right, wrong bits are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dcpcomm.bench import replays
from dcpcomm.bench.ranks import Meeting, ThreadRanks
from dcpcomm.bench.replays import Plan, Tally
from dcpcomm.merger import DCPMerger
from dcpcomm.testing import LoopbackWorld
from tests.pretend_gpu import Replay

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "captured", Replay)
    monkeypatch.setattr(replays, "_EAGER_EVERY", 10)


def run(plan: Plan, n: int = 2) -> list[Tally]:
    meeting = Meeting(n)
    found: list[Tally] = LoopbackWorld(n).run(
        lambda group: replays.run(group, ThreadRanks(meeting, group.rank), CPU, plan, lambda text: None)
    )
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_right_merges_are_found_right(dtype: str, seed: int) -> None:
    plan = Plan("loopback_peer", 20, (1, 4), 8, 32, dtype, seed % 65536)
    for tally in run(plan):
        assert (tally.merges, tally.wrong) == (2 * (2 + 20 + 2), 0)
        assert tally.words == (2 + 20 + 2) * (1 + 4) * 4 * (32 + 1)


@pytest.mark.parametrize("how", ["a bit", "a call late"])
def test_wrong_bits_are_counted(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = DCPMerger.merge, {0: 0, 1: 0}
    before: dict[Any, Any] = {}

    def spoilt(self: DCPMerger, out: torch.Tensor, lse: torch.Tensor, **keywords: Any) -> Any:
        got, got_lse = real(self, out, lse, **keywords)
        rank = self.group.rank
        calls[rank] += 1
        if rank == 1 and calls[rank] == 17:
            if how == "a bit":
                got.view(torch.int16)[0, 0, 0] ^= 1
            else:
                got = before[rank]
        before[rank] = got
        return got, got_lse

    monkeypatch.setattr(DCPMerger, "merge", spoilt)
    tallies = run(Plan("loopback_peer", 30, (2,), 8, 32))
    assert tallies[0].wrong == 0
    assert tallies[1].wrong == 1 if how == "a bit" else tallies[1].wrong > 100


def test_no_two_calls_are_alike() -> None:
    plan = Plan("loopback_peer", 1, (3,), 4, 64)
    merges = [replays._Merge(plan, number, 3, 2, CPU) for number in range(2)]
    made = [one.partials(torch.tensor([count], dtype=torch.int32)) for one in merges for count in (1, 2)]
    for outs, lses in made:
        assert bool(torch.isfinite(outs).all())
        assert bool((outs != 0).all())
        assert 0 < int((lses == -torch.inf).sum()) < lses.numel()
    outs = [outs.view(torch.int16).flatten(1) for outs, _ in made]
    rows = torch.cat(outs)
    same = (rows.unsqueeze(0) == rows.unsqueeze(1)).double().mean(-1)
    assert bool((same - torch.eye(len(rows)) < 0.1).all()), "ranks, calls or merges share data"
