"""Transports that return memory of their own from an exchange, another in every call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

import dcpcomm
from dcpcomm.backends.loopback import Loopback
from dcpcomm.registry import register_transport, unregister_transport
from dcpcomm.testing import LoopbackWorld
from tests.oracle import judge, make_case

CALLS = 40


class Fresh(Loopback):
    """What comes is a new tensor each time."""

    name: ClassVar[str] = "fresh"

    def exchange(self, send: torch.Tensor, channel: int, recv: Any = None) -> torch.Tensor:
        fresh = super().exchange(send, channel, recv).clone()
        self.group.loopback.world.returned.append(weakref.ref(fresh))
        return fresh


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register_transport("fresh", Fresh)
    yield
    unregister_transport("fresh")


def merges(group: Any, case: Any) -> Any:
    shape = dcpcomm.MergeShape(max_tokens=8, num_heads=8, head_dim=32, dtype=torch.float32, lse_base=case.base)
    with dcpcomm.DCPMerger(group, shape, {"transport": "fresh", "verify": {"level": "off"}}) as merger:
        results = [merger.merge(case.outs[group.rank], case.lses[group.rank], return_lse=True) for _ in range(CALLS)]
        gc.collect()
        alive = sum(one() is not None for one in group.world.returned)
        return results, alive


def test_they_are_right_and_not_kept(rng: torch.Generator) -> None:
    case = make_case(rng, 2, b=5, h=8, d=32, dtype=torch.float32)
    world: Any = LoopbackWorld(2)
    world.returned = []
    answers = world.run(merges, case)
    for results in zip(*(results for results, _ in answers), strict=True):
        judge(list(results), case)
    assert len(world.returned) == 2 * CALLS
    assert max(alive for _, alive in answers) < CALLS, "each call's memory is kept alive"
