"""The adapters on a GPU: captured and eager, with lengths, head-major results, and a capture that comes too early."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dcpcomm import adapters
from dcpcomm.adapters import sglang, vllm
from dcpcomm.adapters.mergers import MERGERS
from tests.engines import adapted
from tests.gpu.rig import (
    DEVICE,
    ON_GPU,
    ONE_GPU,
    blank_empty_rows,
    by_call,
    capture,
    finished,
    mine,
    needs_gpu,
    on_device,
    poisoned,
    row_counts,
    run,
    together,
)
from tests.oracle import judge, make_case
from tests.world import Raised, outcome

pytestmark = ONE_GPU
RANKS = pytest.mark.parametrize("n", [2, 4])


def kind(case: Any, device: torch.device) -> dict[str, Any]:
    return {
        "num_heads": case.outs.shape[2], "head_dim": case.outs.shape[3], "dtype": case.outs.dtype, "lse_base": "e",
        "device": device,
    }  # fmt: skip


def captured_and_eager(group: Any, cases: list[Any], lens: torch.Tensor, starts: torch.Tensor) -> Any:
    data = mine(cases, group.rank)
    device = data[0][0].device
    seq_lens, begin = on_device(lens[group.rank]), on_device(starts)
    with adapted(group, require_graph=ON_GPU) as coordinator:
        merger = adapters.warm_up(coordinator, **kind(cases[0], device))
        assert merger is not None
        partial, lse = poisoned(cases[0].outs.shape[1:], cases[0].outs.dtype), on_device(data[0][1])
        into = poisoned((*merger.shape.result_rows(cases[0].outs.shape[1], group.size), 32), cases[0].outs.dtype)

        def step() -> None:
            vllm.cp_lse_ag_out_rs(partial, lse, coordinator, seq_lens=seq_lens, query_start_loc=begin, out=into)

        graph = capture(step)
        results = []
        for i, one in enumerate(data):
            if i % 3 == 2:
                results.append(
                    vllm.dcp_a2a_lse_reduce(*one, coordinator, seq_lens=seq_lens, query_start_loc=begin).clone()
                )
                continue
            partial.copy_(one[0])
            lse.copy_(one[1])
            graph.replay()
            results.append(into.clone())
        found = finished(merger, results)
        adapters.check_all()
        together()
        return found


@RANKS
def test_what_an_engine_captures_replays_with_fresh_data(n: int, rng: torch.Generator) -> None:
    b = 9
    lens, starts = torch.randint(0, 3, (n, 3), generator=rng), torch.tensor([0, 2, 5, 8])
    cases = []
    for _ in range(7):
        case = make_case(rng, n, b=b)
        case.counts = torch.stack([row_counts(lens[rank], starts, b) for rank in range(n)])
        cases.append(blank_empty_rows(case))
    for i, results in enumerate(by_call(run(n, captured_and_eager, cases, lens, starts))):
        judge(results, cases[i], what=f"call {i}")


def heads_first(group: Any, cases: list[Any]) -> Any:
    data = mine(cases, group.rank)
    with adapted(group, require_graph=ON_GPU) as coordinator:
        merger = adapters.warm_up(coordinator, **kind(cases[0], data[0][0].device))
        assert merger is not None
        together()
        results = []
        for one in data:
            by_head = sglang.cp_lse_ag_out_rs_mla(*one, coordinator, is_lse_base_on_e=True)
            assert by_head.is_contiguous()
            results.append(by_head.transpose(0, 1))
        found = finished(merger, results)
        together()
        return found


@RANKS
def test_results_with_heads_first_are_right(n: int, rng: torch.Generator) -> None:
    cases = [make_case(rng, n, b=b) for b in (1, 7, 32, 7)]
    for i, results in enumerate(by_call(run(n, heads_first, cases))):
        judge(results, cases[i], what=f"call {i}")


def too_early(group: Any, case: Any) -> Any:
    (one,) = mine([case], group.rank)
    with adapted(group, require_graph=ON_GPU) as coordinator:
        before = len(MERGERS)
        together()
        raised = outcome(capture, lambda: vllm.dcp_a2a_lse_reduce(*one, coordinator))
        together()
        return raised, len(MERGERS) - before


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # of torch, when the capture is given up
@needs_gpu
def test_a_capture_that_would_have_to_build_raises(rng: torch.Generator) -> None:
    for raised, built in run(2, too_early, make_case(rng, 2)):
        assert isinstance(raised, Raised)
        assert raised.kinds[0] == "DCPCommError"
        assert "dcpcomm.adapters.warm_up(group, num_heads=8, head_dim=32" in raised.text
        assert built == 0
    assert DEVICE.type == "cuda"
