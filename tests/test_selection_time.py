"""A decision among seven candidates, each connected and verified, by four processes, takes less than three seconds."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

import dcpcomm
from dcpcomm.backends.gloo_a2a import GlooA2A
from dcpcomm.registry import unregister_transport
from tests.world import ProcessPool, World, meet

NAMES = [f"gloo_{letter}" for letter in "bcdefg"]
LIMIT_S = 3.0
#: On a machine that is busy all along: how many constructions with one candidate a decision among seven may last.
CONSTRUCTIONS = 10
ATTEMPTS = 8


def timed(group: Any, wanted: set[str]) -> tuple[float, Any]:
    """How long the slowest rank took to construct a merger, and what was decided."""
    shape = dcpcomm.MergeShape(max_tokens=64, num_heads=64, head_dim=128, dtype=torch.bfloat16, lse_base="e")
    config = {"forbid": [name for name in dcpcomm.registered_transports() if name not in wanted]}
    meet()
    started = time.monotonic()
    with dcpcomm.DCPMerger(group, shape, config) as merger:
        spent = torch.tensor(time.monotonic() - started)
        dist.all_reduce(spent, dist.ReduceOp.MAX, group=group)
        return spent.item(), merger.decision


def decides(group: Any) -> tuple[list[tuple[float, float]], Any]:
    """(seconds among seven, seconds with one) of each attempt, until one is fast enough on all ranks."""
    for name in NAMES:
        dcpcomm.register_transport(name, type(name, (GlooA2A,), {"name": name}))
    attempts: list[tuple[float, float]] = []
    while len(attempts) < ATTEMPTS and not any(map(fast, attempts)):
        among_seven, decision = timed(group, {"gloo_a2a", *NAMES})
        attempts.append((among_seven, timed(group, {"gloo_a2a"})[0]))
    for name in NAMES:
        unregister_transport(name)
    return attempts, decision


def fast(attempt: tuple[float, float]) -> bool:
    among_seven, with_one = attempt
    return among_seven < max(LIMIT_S, CONSTRUCTIONS * with_one)


def test_seven_candidates_are_decided_among_in_time(pool: ProcessPool) -> None:
    for attempts, decision in World("gloo_a2a", 4, pool).run(decides, fresh=True):
        assert len(decision.candidates) == 7
        fell = [name for name, one in decision.fallen.items() if one.stage != "price"]
        assert not fell, "all of them must really have been verified"
        assert fast(attempts[-1]), attempts
