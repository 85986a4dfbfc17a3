"""Merges as operators of torch on one GPU: captured in a CUDA graph, as they are and compiled, among eager ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dcpcomm.adapters import torch_op
from tests.gpu.rig import (
    NAN,
    ONE_GPU,
    by_call,
    capture,
    finished,
    merger_for,
    mine,
    on_device,
    poisoned,
    room_for,
    together,
)
from tests.gpu.rig import run as run_ranks
from tests.oracle import Case, judge, make_case

# Of torch 2.11's own, when its compiler is first imported.
pytestmark = [*ONE_GPU, pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")]
OPS = torch.ops.dcpcomm


def replayed(group: Any, cases: list[Case], backend: str | None) -> Any:
    """Each case by a replay, by the operator and by the merger; all in turn."""
    torch._dynamo.reset()
    rank = group.rank
    data = mine(cases, rank)
    with merger_for(group, {"num_heads": 2 * group.size}) as merger:
        number = torch_op.handle(merger)
        partial, lse = poisoned(cases[0].outs[rank].shape, cases[0].outs.dtype), on_device(cases[0].lses[rank])
        out, out_lse = room_for(merger, cases[0].outs.shape[1])

        def operator(partial: Any, lse: Any) -> Any:
            return OPS.merge_with_lse(number, partial, lse, tag=3)

        called = operator if backend is None else torch.compile(operator, fullgraph=True, backend=backend)
        together()
        with torch.no_grad():
            called(partial, lse)  # a compiler must not begin within a capture

        def step() -> None:
            with torch.no_grad():
                merged, merged_lse = called(partial, lse)
            out.copy_(merged)
            out_lse.copy_(merged_lse)

        graph = capture(step)
        results = []
        for one in data:
            partial.copy_(one[0])
            lse.copy_(one[1])
            out.fill_(NAN)
            out_lse.fill_(NAN)
            graph.replay()
            results += [
                (out.clone(), out_lse.clone()),
                operator(*one),
                merger.merge(*one, return_lse=True, tag=3),
            ]
        return finished(merger, results)


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_captured_operator_gives_what_the_merger_gives(n: int, backend: str | None, rng: torch.Generator) -> None:
    cases = [make_case(rng, n, b=8, h=2 * n) for _ in range(5)]
    calls = by_call(run_ranks(n, replayed, cases, backend))
    for number, case in enumerate(cases):
        of_case = calls[3 * number : 3 * number + 3]
        judge(of_case[2], case, what=f"merge {number}")
        for how, by_rank in zip(("a replay", "the operator"), of_case, strict=False):
            for rank, (got, want) in enumerate(zip(by_rank, of_case[2], strict=True)):
                assert all(map(torch.equal, got, want)), f"{how}, merge {number}, rank {rank}"
