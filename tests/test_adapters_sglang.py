"""SGLang's functions: their bases, and the layouts that its models view them in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcpcomm import adapters
from dcpcomm.adapters import sglang
from tests.engines import adapted
from tests.oracle import NAN, Case, judge, make_case
from tests.world import World, rank_of


def all_three(group: Any, case: Case) -> Any:
    rank = rank_of(group)
    counts = None if case.counts is None else case.counts[rank]
    with adapted(group) as coordinator:
        given = case.outs[rank], case.lses[rank], coordinator
        more = {"valid_counts": counts, "tag": 3}
        if case.base == "2":
            by_head = sglang.cp_lse_ag_out_rs_mla(*given, **more)
            by_row = sglang.dcp_a2a_lse_reduce(*given, False, comm_backend="fi_a2a", **more)
        else:
            by_head = sglang.cp_lse_ag_out_rs_mla(*given, None, True, **more)
            by_row = sglang.dcp_a2a_lse_reduce(*given, cuda_graph_buffers={}, **more)
            mha = sglang.cp_lse_ag_out_rs_mha(*given, return_lse=True, **more)
            assert torch.equal(sglang.cp_lse_ag_out_rs_mha(*given, **more), mha[0])
            assert all(one.is_contiguous() for one in mha)
            assert torch.equal(mha[0], by_row)
        assert by_head.is_contiguous()
        assert by_row.is_contiguous()
        return by_row, by_head.transpose(0, 1), mha if case.base == "e" else by_row


@pytest.mark.parametrize("base", ["e", "2"])
def test_each_is_the_oracles_in_sglangs_layout(peers: World, rng: torch.Generator, base: str) -> None:
    case = make_case(rng, peers.n, b=9, base=base)
    case.counts = torch.ones(peers.n, 9, dtype=torch.int32)
    case.counts[:, 3] = 0  # empty everywhere
    case.counts[0, 4] = 0
    case.outs[case.counts == 0] = NAN
    by_rank = peers.run(all_three, case)
    for form in range(3):
        judge([results[form] for results in by_rank], case, what=f"form {form}")


def test_a_group_of_one_rank_gets_its_partials_back() -> None:
    group: Any = SimpleNamespace(rank_in_group=0, world_size=1, device_group=None)
    out, lse = torch.randn(4, 8, 16), torch.randn(4, 8)
    try:
        assert sglang.dcp_a2a_lse_reduce(out, lse, group) is out
        assert sglang.cp_lse_ag_out_rs_mla(out, lse, group) is out
        assert sglang.cp_lse_ag_out_rs_mha(out, lse, group, True) == (out, lse)
    finally:
        adapters.close_all(group)
