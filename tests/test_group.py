"""Groups as engines have them: coordinators that count their ranks in their own way, and things that are no group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcpcomm
from dcpcomm.group import Group
from tests.world import ProcessPool, World, meet, rank_of, size_of

SHAPE = {"max_tokens": 8, "num_heads": 12, "dtype": torch.float32, "lse_base": "e"}
CONFIG = {"transport": "gloo_a2a", "watchdog": {"timeout_s": 20}}


@dataclass
class Coordinator:
    """What vLLM's and SGLang's group coordinators have in common."""

    rank_in_group: int
    world_size: int
    device_group: Any
    cpu_group: Any = None


def merges_as_a_coordinator(group: Any, outs: torch.Tensor, lses: torch.Tensor, w_uv: torch.Tensor) -> Any:
    """The coordinator's ranks run against those of its process group."""
    n = size_of(group)
    rank = n - 1 - rank_of(group)
    shape = dcpcomm.MergeShape(head_dim=16, v_head_dim=8, **SHAPE)
    results = []
    for order in ("before", "after"):
        coordinator = Coordinator(rank, n, group, group)
        with dcpcomm.DCPMerger(coordinator, shape, {**CONFIG, "projection": order}) as merger:
            weights = merger.gather_w_uv(w_uv.chunk(n)[rank])
            results.append(merger.merge(outs[rank], lses[rank]))
            results.append(merger.merge_and_project(outs[rank], lses[rank], weights))
    meet()
    return rank, results


def test_slices_and_weights_follow_the_coordinators_ranks(pool: ProcessPool, rng: torch.Generator) -> None:
    n = 3
    outs = torch.randn(n, 5, 12, 16, generator=rng)
    lses = torch.randn(n, 5, 12, generator=rng)
    w_uv = torch.randn(12, 16, 8, generator=rng)
    want = dcpcomm.reference.merge_partials(outs, lses, lse_base="e")[0]
    for answer in World("gloo_a2a", n, pool).run(merges_as_a_coordinator, outs, lses, w_uv):
        rank, results = answer
        projected = torch.einsum("bhl,hlv->bhv", want[rank], w_uv.double().chunk(n)[rank])
        for merged, through in zip(results[::2], results[1::2], strict=True):
            torch.testing.assert_close(merged.double(), want[rank], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(through.double(), projected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("what", [7, "world", object()])
def test_what_is_no_group_is_told_what_one_is(what: Any) -> None:
    with pytest.raises(
        dcpcomm.ShapeError, match=f"group is a {type(what).__name__}; expected None, a torch ProcessGroup"
    ):
        Group.of(what)


def test_no_process_group_at_all_says_what_to_call() -> None:
    assert not dist.is_initialized()
    with pytest.raises(dcpcomm.DCPCommError, match="init_process_group"):
        dcpcomm.DCPMerger(None, dcpcomm.MergeShape(head_dim=16, **SHAPE))
