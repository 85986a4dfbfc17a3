"""FlashInfer's exchange as a rival: judged by its bits, or said to be damaged, or not there."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest
import torch

from dcpcomm.bench.checked import Checked
from dcpcomm.bench.measure import Inputs, Settings
from dcpcomm.bench.ranks import Meeting, ThreadRanks
from dcpcomm.bench.rivals import HelixExchange, HelixLseReduce, helix_exchange
from dcpcomm.errors import ShapeError, TransportUnavailable
from dcpcomm.testing import LoopbackWorld
from tests import helix_stand_in
from tests.helix_stand_in import comm
from tests.world import Raised, outcome

CPU = torch.device("cpu")


def on_threads(body: Any) -> list[Any]:
    meeting = Meeting(2)
    return LoopbackWorld(2, device="cpu").run(lambda group: body(ThreadRanks(meeting, group.rank)))


@pytest.mark.parametrize("generation", [10, 9])
def test_the_exchange_alone_is_judged_by_its_bits_where_it_can_be_right(
    generation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", helix_stand_in)
    monkeypatch.setitem(sys.modules, "flashinfer.comm", comm)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (generation, 0))
    monkeypatch.setattr(helix_exchange, "_in_turn", contextlib.nullcontext())  # on a CPU a call waits for its peers

    def body(ranks: ThreadRanks) -> tuple[str, list[int]]:
        settings = Settings((), heads=16, dim=16, rows=(1, 5))
        rival = HelixExchange(ranks, settings.shape(), CPU)
        rival.prepare()
        found = []
        for rows in settings.rows:
            data = Inputs(ranks, settings, rows, CPU)
            rival.bring(data.out, data.lse)
            want = rival.want(data.outs, data.lses)
            checked = Checked(lambda: rival.merge(data.out, data.lse), lambda got: rival.count_wrong(got, want))  # noqa: B023
            found.append(checked.check(ranks.meet, lambda: None))
            assert checked.result is not None
            checked.result.view(-1)[3] += 1
            found.append(checked.judge())
        rival.close()
        return rival.name, found

    expected = ("helix (bare)", [0, 1, 0, 1]) if generation == 10 else ("helix (bare, rows damaged)", [0, 0, 0, 0])
    assert on_threads(body) == [expected] * 2


@pytest.mark.parametrize("there", [False, True])
def test_where_the_library_is_not_there_or_too_old_the_reason_is_told_on_all_ranks(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", helix_stand_in if there else None)
    monkeypatch.setitem(sys.modules, "flashinfer.comm", comm if there else None)
    shape = Settings((), heads=16, dim=16).shape()

    def body(ranks: ThreadRanks) -> Any:
        if there:
            return outcome(helix_exchange.flashinfer_comm, ranks, "one", ("decode_cp_a2a_lse_reduce",))
        return outcome(HelixExchange(ranks, shape, CPU).prepare)

    for one in on_threads(body):
        assert isinstance(one, Raised)
        assert TransportUnavailable.__name__ in one.kinds
        assert ("FlashInfer has no decode_cp_a2a_lse_reduce" if there else "rank 0: ModuleNotFoundError") in one.text


def test_shapes_that_it_does_not_take_are_told() -> None:
    ranks = ThreadRanks(Meeting(2), 0)
    for kind in (HelixExchange, HelixLseReduce):
        with pytest.raises(ShapeError, match=r"float32|2-byte"):
            kind(ranks, Settings((), dtype=torch.float32).shape(), CPU)
    with pytest.raises(ShapeError, match="a multiple of 4 heads"):
        HelixExchange(ranks, Settings((), heads=12).shape(), CPU)
