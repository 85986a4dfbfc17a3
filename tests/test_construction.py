"""Constructions that come out right wherever they are made, and wrong ones that keep the ranks in step."""

from __future__ import annotations

from typing import Any

import torch

import dcpcomm
from dcpcomm.testing import LoopbackWorld
from tests.oracle import Case, judge, make_case
from tests.world import Raised, outcome

CONFIG = {"transport": "loopback", "watchdog": {"timeout_s": 10}}


def shape_of(**changes: Any) -> dcpcomm.MergeShape:
    given = {"max_tokens": 8, "num_heads": 8, "head_dim": 32, "dtype": torch.float32, "lse_base": "e"}
    return dcpcomm.MergeShape(**{**given, **changes})


def merger_for(group: Any, **changes: Any) -> dcpcomm.DCPMerger:
    return dcpcomm.DCPMerger(group, shape_of(**changes), CONFIG, device="cpu")


def under_another_default(group: Any, case: Case) -> Any:
    """As an engine that builds its model under the device of the model."""
    with torch.device("meta"):
        merger = merger_for(group)
        first = merger.merge(case.outs[group.rank], case.lses[group.rank], return_lse=True)
        merger.reset()
        again = merger.merge(case.outs[group.rank], case.lses[group.rank], return_lse=True)
    merger.close()
    return first, again


def test_another_default_device_changes_nothing(rng: torch.Generator) -> None:
    case = make_case(rng, 2, b=5, h=8, d=32, dtype=torch.float32)
    for results in zip(*LoopbackWorld(2, "cpu").run(under_another_default, case), strict=True):
        judge(list(results), case)


def no_shape_on_rank_0(group: Any, case: Case) -> Any:
    wrong = outcome(dcpcomm.DCPMerger, group, None if group.rank == 0 else shape_of(), CONFIG, device="cpu")
    with merger_for(group) as merger:
        return wrong, merger.merge(case.outs[group.rank], case.lses[group.rank], return_lse=True)


def test_what_is_no_shape_on_one_rank_is_told_to_the_others(rng: torch.Generator) -> None:
    case = make_case(rng, 2, b=5, h=8, d=32, dtype=torch.float32)
    (own, mine), (told, theirs) = LoopbackWorld(2, "cpu").run(no_shape_on_rank_0, case)
    assert isinstance(own, Raised)
    assert "ShapeError" in own.kinds
    assert isinstance(told, Raised)
    assert "SelectionMismatch" in told.kinds
    assert told.names(0), told.text
    assert "expected a MergeShape" in told.text
    judge([mine, theirs], case)


def one_column(group: Any, w: torch.Tensor) -> Any:
    config = {**CONFIG, "projection": "before"}
    with dcpcomm.DCPMerger(group, shape_of(v_head_dim=1, dtype=w.dtype), config, device="cpu") as merger:
        mine = w[4 * group.rank : 4 * group.rank + 4].as_strided((4, 32, 1), (32, 1, 7), 128 * group.rank)
        assert mine.is_contiguous(), "of one index, an axis has no stride that matters"
        return merger.gather_w_uv(mine).full


def test_weights_of_one_column_are_gathered_whatever_their_strides(rng: torch.Generator) -> None:
    w = torch.randn(8, 32, 1, generator=rng).bfloat16()
    for full in LoopbackWorld(2, "cpu").run(one_column, w):
        assert torch.equal(full, w)
