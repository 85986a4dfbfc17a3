"""Rivals that exchange by collectives merge rightly: over Gloo, on CPU, with nothing compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dcpcomm.bench.checked import Checked
from dcpcomm.bench.measure import Inputs, Settings
from dcpcomm.bench.ranks import ProcessRanks
from dcpcomm.bench.rivals import RIVALS
from dcpcomm.bench.rivals.compiled import Compiled
from dcpcomm.launch import LocalRanks

CPU = torch.device("cpu")
BY_COLLECTIVES = [kind for kind in RIVALS if kind.needs_processes and not kind.needs]


class PlainRanks(ProcessRanks):
    def nccl(self) -> Any:
        return None  # the default group


def wrong_elements(which: int, dtype: torch.dtype, base: str) -> list[int]:
    Compiled.begin = lambda self: setattr(self, "_compiled", self._fn)  # type: ignore[method-assign]
    ranks = PlainRanks()
    settings = Settings((), dtype=dtype, heads=6, dim=16, rows=(1, 5), lse_base=base)  # type: ignore[arg-type]
    rival = BY_COLLECTIVES[which](ranks, settings.shape(), CPU)
    rival.prepare()
    found = []
    for rows in settings.rows:
        data = Inputs(ranks, settings, rows, CPU)
        rival.bring(data.out, data.lse)
        want = rival.want(data.outs, data.lses)
        checked = Checked(lambda: rival.merge(data.out, data.lse), lambda got: rival.count_wrong(got, want))  # noqa: B023
        found.append(checked.check(ranks.meet, lambda: None))
        spoilt = checked.result
        assert spoilt is not None
        spoilt.view(torch.uint8).flatten()[:4] ^= 0x7F
        found.append(-checked.judge())
    rival.close()
    return found


@pytest.fixture(scope="module")
def three() -> Any:
    with LocalRanks(3) as ranks:
        yield ranks


@pytest.mark.parametrize(("dtype", "base"), [(torch.bfloat16, "e"), (torch.float32, "2")], ids=str)
@pytest.mark.parametrize("which", range(len(BY_COLLECTIVES)), ids=lambda which: BY_COLLECTIVES[which].name)
def test_a_rival_is_right_and_its_judge_sees_what_is_not(
    which: int, dtype: torch.dtype, base: str, three: LocalRanks
) -> None:
    for found in three.run(wrong_elements, which, dtype, base):
        assert found[0::2] == [0, 0]
        assert all(spoilt < 0 for spoilt in found[1::2])
