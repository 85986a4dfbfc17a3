"""Functions shaped as engines': right in every form, and their mergers built once, when and where they may be."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dcpcomm
from dcpcomm import adapters
from dcpcomm.adapters import mergers, vllm
from dcpcomm.adapters.mergers import MERGERS
from tests.engines import Coordinator, adapted, micro_batch, micro_batches
from tests.oracle import NAN, Case, judge, judge_lse, judge_out, make_case, merged, shares, weight_bound
from tests.world import Raised, World, config_for, in_threads, meet, outcome, rank_of, size_of

FORMS = {
    "dcp_a2a_lse_reduce": "heads",
    "cp_lse_ag_out_rs": "heads",
    "cp_lse_ag_out_ar": "none",
    "dcp_a2a_lse_reduce_token_sharded": "tokens",
}


def every_form(group: Any, case: Case) -> dict[str, Any]:
    rank = rank_of(group)
    with adapted(group) as coordinator:
        given = case.outs[rank], case.lses[rank], coordinator
        results = {}
        for name in FORMS:
            function = getattr(vllm, name)
            results[name] = function(*given, None, True, case.base == "e")
            again = function(*given, is_lse_base_on_e=case.base == "e")
            assert torch.equal(again, results[name][0]), f"{name} without its LSE"
        assert len({id(adapters.warm_up(coordinator, **kind(case, scatter))) for scatter in FORMS.values()}) == (
            3 if size_of(group) > 1 else 1
        )
        return results


def kind(case: Case, scatter: str = "heads") -> dict[str, Any]:
    _, _, heads, width = case.outs.shape
    return {
        "num_heads": heads, "head_dim": width, "dtype": case.outs.dtype, "lse_base": case.base, "scatter": scatter,
        "device": "cpu",
    }  # fmt: skip


@pytest.mark.parametrize("base", ["e", "2"])
def test_every_form_is_the_oracles(world: World, rng: torch.Generator, base: str) -> None:
    case = make_case(rng, world.n, b=12, base=base)
    by_rank = world.run(every_form, case)
    for name, scatter in FORMS.items():
        judge([results[name] for results in by_rank], case, scatter, name)


def with_lengths(group: Any, case: Case, lens: torch.Tensor, starts: torch.Tensor) -> Any:
    rank = rank_of(group)
    with adapted(group) as coordinator:
        return [
            vllm.cp_lse_ag_out_rs(
                case.outs[rank], case.lses[rank], coordinator, return_lse=True, seq_lens=lens[rank],
                query_start_loc=starts,
            ),
            vllm.dcp_a2a_lse_reduce(
                case.outs[rank], case.lses[rank], cp_group=coordinator, return_lse=True,
                valid_counts=None if case.counts is None else case.counts[rank],
            ),
        ]  # fmt: skip


def test_empty_shards_and_padding_rows_have_no_part(some: World, rng: torch.Generator) -> None:
    """As vLLM says them: lengths of this rank's shard and where requests begin, CUDA-graph padding past the end."""
    n, rows = some.n, 11
    case = make_case(rng, n, b=rows)
    starts = torch.tensor([0, 2, 3, 6, 8], dtype=torch.int32)
    lens = torch.randint(0, 3, (n, 4), generator=rng, dtype=torch.int32)
    lens[:, 1] = 0
    per_row = torch.repeat_interleave(lens, starts.diff().long(), dim=1)
    case.counts = torch.cat([per_row, torch.zeros(n, rows - per_row.shape[1], dtype=torch.int32)], dim=1)
    case.outs[case.counts == 0] = NAN
    case.lses[case.counts == 0] = 0.0  # finite: only the lengths say that it is garbage
    by_rank = some.run(with_lengths, case, lens, starts)
    for form in range(2):
        judge([results[form] for results in by_rank], case, what=f"form {form}")


def up_projected(group: Any, case: Case, w_uv: torch.Tensor) -> Any:
    rank, n = rank_of(group), size_of(group)
    counts = None if case.counts is None else case.counts[rank]
    given = case.outs[rank], case.lses[rank]
    with adapted(group) as coordinator:
        gathered = adapters.gather_w_uv(coordinator, torch.zeros_like(w_uv.chunk(n)[rank]))
        gathered.refresh(w_uv.chunk(n)[rank])  # what a weight reload does
        return [
            vllm.dcp_merge_and_v_up_proj(*given, weights, coordinator, counts, return_lse=True)
            for weights in (gathered, w_uv)
        ]


def test_latent_partials_are_merged_and_projected(world: World, rng: torch.Generator) -> None:
    n, heads, latent, value = world.n, 2 * world.n, 32, 16
    case = make_case(rng, n, b=5, h=heads, d=latent, dtype=torch.float32)
    if n > 1:  # one rank alone gives back what it was given
        case.counts = torch.ones(n, 5, dtype=torch.int32)
        case.counts[0, 2] = 0
        case.outs[0, 2], case.lses[0, 2] = NAN, 0.0
    w_uv = torch.randn(heads, latent, value, generator=rng)
    out, lse = merged(case)
    want = torch.einsum("bhl,hlv->bhv", out, w_uv.double())
    bound = torch.einsum("bhl,hlv->bhv", weight_bound(case), w_uv.double().abs())
    for rank, results in enumerate(world.run(up_projected, case, w_uv)):
        for got, got_lse in results:
            judge_out(got, shares(want, n)[rank], shares(bound, n)[rank], f"rank {rank}")
            judge_lse(got_lse, shares(lse, n)[rank], f"rank {rank}")


def more_rows_than_planned(group: Any, case: Case) -> Any:
    rank = rank_of(group)
    with adapted(group, max_tokens=8) as coordinator:
        few = vllm.dcp_a2a_lse_reduce(case.outs[rank][:3], case.lses[rank][:3], coordinator)
        merger = adapters.warm_up(coordinator, **kind(case))
        many = vllm.dcp_a2a_lse_reduce(case.outs[rank], case.lses[rank], coordinator)
        assert adapters.warm_up(coordinator, **kind(case)) is merger
        return few, many, merger.shape.max_tokens


def test_a_longer_step_runs_in_chunks_of_the_same_merger(some: World, rng: torch.Generator) -> None:
    case = make_case(rng, some.n, b=21)
    results, heard = some.run_counting_warnings(more_rows_than_planned, case)
    judge([few for few, _, _ in results], Case(case.outs[:, :3], case.lses[:, :3]))
    judge([many for _, many, _ in results], case)
    assert {most for _, _, most in results} == {8}
    assert sum("runs in chunks" in text for text in heard) == some.n


def other_axes(group: Any, case: Case) -> Any:
    rank = rank_of(group)
    with adapted(group) as coordinator:
        out, lse = case.outs[rank], case.lses[rank]
        transposed = lse.t().contiguous().t()  # as FlashAttention returns it
        return [
            vllm.cp_lse_ag_out_rs(out.unsqueeze(1), lse, coordinator),
            vllm.cp_lse_ag_out_rs(out, lse.unsqueeze(-1), coordinator),
            vllm.cp_lse_ag_out_rs(out, transposed, coordinator),
            vllm.cp_lse_ag_out_rs(
                out, lse, coordinator, out=torch.empty(7, 2, case.outs.shape[3] * 2).to(out)[..., ::2]
            ),
            outcome(vllm.cp_lse_ag_out_rs, out.unsqueeze(0), lse, coordinator),
        ]


def test_axes_of_one_that_kernels_return_are_dropped(some: World, rng: torch.Generator) -> None:
    case = make_case(rng, some.n, b=7, h=2 * some.n)
    by_rank = some.run(other_axes, case)
    for form in range(4):
        judge([results[form] for results in by_rank], case, what=f"form {form}")
    for results in by_rank:
        assert isinstance(results[4], Raised)
        assert results[4].names("[1, 7, 6, 32]", "[B, H, D]")


def an_lse_of_other_axes(group: Any, case: Case) -> Any:
    rank = rank_of(group)
    with adapted(group) as coordinator:
        good = case.outs[rank], case.lses[rank], coordinator
        vllm.cp_lse_ag_out_rs(*good)
        bad = case.outs[rank], case.lses[rank].unsqueeze(0) if rank == 1 else case.lses[rank], coordinator
        return outcome(vllm.cp_lse_ag_out_rs, *bad), vllm.cp_lse_ag_out_rs(*good)


def test_the_peers_are_told_of_a_wrong_lse_on_one_rank(some: World, rng: torch.Generator) -> None:
    case = make_case(rng, some.n, b=7)
    by_rank = some.run(an_lse_of_other_axes, case)
    for rank, (raised, _) in enumerate(by_rank):
        assert raised.kinds[0] == ("ShapeError" if rank == 1 else "CallMismatch")
        assert raised.names("rank 1", "partial_lse")
    judge([result for _, result in by_rank], case)


# ---------------------------------------------------------------- micro-batches


def two_micro_batches(group: Any, cases: list[Case]) -> Any:
    rank = rank_of(group)

    def computes(number: int) -> Any:
        with micro_batch(number):
            given = cases[number].outs[rank], cases[number].lses[rank], coordinator
            for _ in range(10):
                result = vllm.dcp_a2a_lse_reduce(*given, tag=number)
            return result

    with micro_batches(), adapted(group, channels=2) as coordinator:
        adapters.warm_up(coordinator, **kind(cases[0]))
        return in_threads(lambda: computes(0), lambda: computes(1))


def test_the_engines_micro_batch_picks_the_channel(some: World, rng: torch.Generator) -> None:
    """On one channel the two threads' calls would meet each other's: their tags differ."""
    cases = [make_case(rng, some.n, b=5), make_case(rng, some.n, b=9)]
    by_rank = some.run(two_micro_batches, cases)
    for number, case in enumerate(cases):
        judge([results[number] for results in by_rank], case, what=f"micro-batch {number}")


def one_channel_too_few(group: Any, case: Case) -> Any:
    rank = rank_of(group)
    with adapted(group) as coordinator, micro_batches(), micro_batch(1):
        return outcome(vllm.dcp_a2a_lse_reduce, case.outs[rank], case.lses[rank], coordinator)


def test_a_micro_batch_without_a_channel_says_what_to_configure(pool: Any, rng: torch.Generator) -> None:
    for rank, raised in enumerate(World("gloo_a2a", 2, pool).run(one_channel_too_few, make_case(rng, 2))):
        assert raised.kinds[0] == "ShapeError"
        assert raised.names(f"rank {rank}", "micro-batch 1", "1 channels", "DCPCOMM_CHANNELS=2")
        assert "configure(channels=2)" in raised.text


# ---------------------------------------------------------------- when mergers are built


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the adapters, the device is a GPU, and a graph is being captured on it."""
    monkeypatch.setattr(mergers, "topology", SimpleNamespace(on_gpu=lambda device: True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


class Elsewhere:
    """A coordinator that must not be talked to."""

    rank_in_group, world_size = 1, 2

    @property
    def device_group(self) -> Any:
        raise AssertionError("a merger was being built")


def test_a_capture_that_would_have_to_build_says_where_to_warm_up(capturing: None) -> None:
    before = len(MERGERS)
    out, lse = torch.randn(4, 8, 16), torch.randn(4, 8)
    with pytest.raises(dcpcomm.DCPCommError, match=r"^rank 1: a CUDA graph is being captured") as caught:
        vllm.cp_lse_ag_out_ar(out, lse, Elsewhere(), is_lse_base_on_e=False)
    assert len(MERGERS) == before
    text = str(caught.value)
    (said,) = [part for part in text.split("dcpcomm.adapters.") if part.startswith("warm_up(")]
    call = ast.parse(said[: said.index(")") + 1], mode="eval").body
    assert isinstance(call, ast.Call)
    assert {one.arg: ast.unparse(one.value) for one in call.keywords} == {
        "num_heads": "8", "head_dim": "16", "dtype": "torch.float32", "lse_base": "'2'", "scatter": "'none'",
    }  # fmt: skip


def warm_then_captured(group: Any, case: Case) -> Any:
    rank = rank_of(group)
    with adapted(group, require_graph=False) as coordinator:
        with pytest.MonkeyPatch.context() as patched:
            adapters.warm_up(coordinator, **kind(case))
            meet()
            patched.setattr(mergers, "topology", SimpleNamespace(on_gpu=lambda device: True))
            patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            meet()
            given = case.outs[rank], case.lses[rank], coordinator
            result = vllm.dcp_a2a_lse_reduce(*given)
            other = outcome(vllm.dcp_a2a_lse_reduce, *given, is_lse_base_on_e=False)
            meet()
        return result, other


def test_what_was_warmed_up_is_merged_in_a_capture(pool: Any, rng: torch.Generator) -> None:
    case = make_case(rng, 2)
    by_rank = World("gloo_a2a", 2, pool).run(warm_then_captured, case)
    judge([result for result, _ in by_rank], case)
    assert all("is being captured" in other.text for _, other in by_rank)


def built_after_a_failure(group: Any, case: Case) -> Any:
    rank = rank_of(group)
    with adapted(group) as coordinator:
        given = case.outs[rank], case.lses[rank], coordinator
        odd = outcome(vllm.dcp_a2a_lse_reduce, given[0][:, :-1], given[1][:, :-1], coordinator)
        first = vllm.dcp_a2a_lse_reduce(*given)
        merger = adapters.warm_up(coordinator, **kind(case))
        assert merger in adapters.live_mergers()
        adapters.close_all(coordinator)
        assert merger not in adapters.live_mergers()
        return odd, first, vllm.dcp_a2a_lse_reduce(*given), merger is adapters.warm_up(coordinator, **kind(case))


def test_what_could_not_be_built_is_built_later_and_what_was_closed_again(some: World, rng: torch.Generator) -> None:
    case = make_case(rng, some.n)
    by_rank = some.run(built_after_a_failure, case)
    for odd, _, _, same in by_rank:
        assert odd.kinds[0] == "ShapeError"
        assert odd.names("num_heads=11", some.n)
        assert not same
    judge([first for _, first, _, _ in by_rank], case)
    judge([second for _, _, second, _ in by_rank], case)


def another_number_of_rows(group: Any, case: Case) -> Any:
    rank = rank_of(group)
    with adapted(group) as coordinator:
        adapters.check_all()
        rows = 5 + rank
        raised = outcome(vllm.dcp_a2a_lse_reduce, case.outs[rank][:rows], case.lses[rank][:rows], coordinator)
        return raised, outcome(adapters.check_all)


def test_check_all_raises_what_a_merger_has_to_say(pool: Any, rng: torch.Generator) -> None:
    for raised, checked in World("gloo_a2a", 2, pool).run(another_number_of_rows, make_case(rng, 2), fresh=True):
        assert raised.kinds[0] == "CallMismatch"
        assert isinstance(checked, Raised)
        assert checked.kinds[0] == "CallMismatch"


def one_with_another_dtype(group: Any, case: Case) -> Any:
    rank = rank_of(group)
    with adapted(group, config=config_for(group, watchdog={"timeout_s": 2})) as coordinator:
        out, lse = case.outs[rank], case.lses[rank]
        vllm.dcp_a2a_lse_reduce(out, lse, coordinator)
        raised = outcome(vllm.dcp_a2a_lse_reduce, out.float() if rank == 1 else out, lse, coordinator)
        return raised, [merger.shape.dtype for merger in adapters.live_mergers()]


def test_a_rank_that_alone_goes_to_build_is_named_and_names_who_did_not_come(pool: Any, rng: torch.Generator) -> None:
    first, second = World("gloo_a2a", 2, pool).run(one_with_another_dtype, make_case(rng, 2), fresh=True)
    for (raised, built), other in ((first, 1), (second, 0)):
        assert raised.kinds[0] == "TransportTimeout"
        assert raised.names(f"rank {other}")
        assert raised.ranks == (other,)
        assert built == [torch.bfloat16]


def test_a_group_of_one_rank_gets_its_partials_back() -> None:
    group: Any = SimpleNamespace(rank_in_group=0, world_size=1, device_group=None)
    out, lse = torch.randn(4, 8, 16), torch.randn(4, 8)
    try:
        for name in FORMS:
            function = getattr(vllm, name)
            assert function(out, lse, group) is out
            assert function(out, lse, group, return_lse=True) == (out, lse)
            into = torch.empty_like(out)
            assert function(out, lse, group, out=into) is into
            assert torch.equal(into, out)
        assert adapters.warm_up(group, num_heads=8, head_dim=16, dtype=out.dtype, lse_base="e", device="cpu") is None
    finally:
        adapters.close_all(group)


def test_what_is_no_group_is_told_what_one_is() -> None:
    with pytest.raises(dcpcomm.ShapeError, match="cp_group is a str; expected an engine's coordinator"):
        vllm.dcp_a2a_lse_reduce(torch.randn(4, 8, 16), torch.randn(4, 8), "world")


def test_w_uv_of_too_few_heads_is_told() -> None:
    group: Any = SimpleNamespace(rank_in_group=0, world_size=2, device_group=None)
    with pytest.raises(dcpcomm.ShapeError, match=r"\[4, 16, 8\]; expected \[H, L, V\] = \[8, 16, 'V'\] of all 2"):
        vllm.dcp_merge_and_v_up_proj(torch.randn(4, 8, 16), torch.randn(4, 8), torch.randn(4, 16, 8), group)


def test_coordinators_of_these_tests_cannot_be_hashed() -> None:
    """Else the mergers might be found by a coordinator's own idea of equality."""
    with pytest.raises(TypeError):
        hash(Coordinator.__new__(Coordinator))
