"""`merge_and_project`: one answer, whether W_UV is applied before or after the merge."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.oracle import INF, NAN, Case, judge_lse, make_case, merged, same_bits, shares, weight_bound
from tests.steps import contiguous, step_results
from tests.world import AT_ONCE_S, Raised, World, meet, merger_for, outcome, rank_of, size_of

BF16, F32 = torch.bfloat16, torch.float32
L, V = 48, 24
ORDERS = ["before", "after"]


def latent_case(rng: torch.Generator, n: int, b: int, dtype: torch.dtype = F32) -> tuple[Case, torch.Tensor]:
    """Partials of width L, some rows empty and poisoned; and W_UV [H, L, V] of all heads."""
    case = make_case(rng, n, b=b, d=L, dtype=dtype)
    case.counts = torch.randint(0, 4, (n, b), generator=rng)
    case.counts[:, 0] = 0
    case.outs[case.counts == 0], case.lses[case.counts == 0] = NAN, 0.5
    case.outs[0, -1], case.lses[0, -1] = INF, -INF
    return case, torch.randn(4 * n, L, V, generator=rng).to(dtype)


def judge_projected(results: list[Any], case: Case, w: torch.Tensor, scatter: str = "heads", what: str = "") -> None:
    out, lse = merged(case)
    want = torch.einsum("bhl,hlv->bhv", out, w.double())
    bound = torch.einsum("bhl,hlv->bhv", weight_bound(case), w.double().abs())
    allowed = {F32: 1e-5, BF16: 2.0**-7}[case.outs.dtype] * bound
    parts = zip(*(shares(t, case.n, scatter) for t in (want, allowed, lse)), strict=True)
    for rank, (want_here, allowed_here, lse_here) in enumerate(parts):
        got = results[rank]
        where = f"{what} rank {rank}"
        if isinstance(got, tuple):
            judge_lse(got[1], lse_here, where)
            got = got[0]
        assert got.shape == want_here.shape, where
        assert got.dtype == case.outs.dtype, where
        assert torch.isfinite(got).all(), f"{where}: NaN or infinity came out of empty rows"
        assert (got[lse_here == -INF] == 0).all(), where
        wrong = (got.double() - want_here).abs() > allowed_here
        assert not wrong.any(), f"{where}: {int(wrong.sum())} of {wrong.numel()} values are wrong"


def projecting(group: Any, order: str, **shape: Any) -> Any:
    return merger_for(group, {"head_dim": L, "v_head_dim": V, **shape}, projection=order)


def project_all_ways(group: Any, order: str, cases: list[tuple[Case, torch.Tensor]], dtype: torch.dtype) -> Any:
    """Two layers' weights in one merger, a refresh in between, every keyword, more rows than max_tokens."""
    rank, n = rank_of(group), size_of(group)
    mine = slice(4 * rank, 4 * rank + 4)
    (first, w1), (second, w2), (many, w3) = cases
    results = []
    with projecting(group, order, dtype=dtype, max_tokens=8, channels=2) as merger:
        layer1, layer2 = merger.gather_w_uv(w1[mine].clone()), merger.gather_w_uv(w2[mine].clone())

        def go(case: Case, w: Any, **kw: Any) -> None:
            counts = case.counts[rank].to(torch.int32)
            partial, before = case.outs[rank].clone(), case.outs[rank]
            results.append(merger.merge_and_project(partial, case.lses[rank], w, valid_counts=counts, **kw))
            assert same_bits(partial, before), "the partials were changed"

        go(first, layer1)
        go(second, layer2, return_lse=True, channel=1, tag=4)
        out = torch.full((4, first.outs.shape[1] + 1, V), NAN, dtype=dtype).transpose(0, 1)[1:]
        go(first, layer1, out=out, return_lse=True)
        assert results[-1][0].data_ptr() == out.data_ptr()
        results[-1] = (contiguous(out), results[-1][1])
        assert layer1.refresh(w3[mine].clone()) in (None, layer1)
        go(first, layer1)
        go(many, layer1, return_lse=True)
        none = merger.merge_and_project(torch.empty(0, 4 * n, L, dtype=dtype), torch.empty(0, 4 * n), layer2)
        assert none.shape == (0, 4, V)
        starts = torch.arange(second.outs.shape[1] + 1)
        lens = second.counts[rank]
        results.append(
            merger.merge_and_project(
                second.outs[rank].transpose(0, 1).contiguous().transpose(0, 1),
                second.lses[rank].T.contiguous().T,
                layer2,
                seq_lens=lens,
                query_start_loc=starts,
            )
        )
    return results


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_projection_before_and_after_equal_the_oracle(
    world: World, rng: torch.Generator, order: str, dtype: torch.dtype
) -> None:
    n = world.n
    cases = [latent_case(rng, n, b, dtype) for b in (5, 8, 19)]
    (first, w1), (second, w2), (many, w3) = cases
    by_rank, _ = world.run_counting_warnings(project_all_ways, order, cases, dtype)
    by_step = step_results(by_rank)
    wanted = [(first, w1), (second, w2), (first, w1), (first, w3), (many, w3), (second, w2)]
    for i, (case, w) in enumerate(wanted):
        judge_projected(by_step[i], case, w, what=f"call {i}, projection {order}")


def project_scattered(group: Any, order: str, case: Case, w: torch.Tensor, scatter: str) -> Any:
    rank = rank_of(group)

    def attempt() -> Any:
        with projecting(group, order, scatter=scatter, dtype=F32) as merger:
            gathered = merger.gather_w_uv(w[4 * rank : 4 * rank + 4].clone())
            return merger.merge_and_project(
                case.outs[rank], case.lses[rank], gathered, valid_counts=case.counts[rank], return_lse=True
            )

    return outcome(attempt)


@pytest.mark.parametrize("scatter", ["tokens", "none"])
@pytest.mark.parametrize("order", ORDERS)
def test_projection_with_other_scatters_is_right_or_refused(
    some: World, rng: torch.Generator, order: str, scatter: str
) -> None:
    """The design gives the result for head scatter; others must be right, or say that they are not done."""
    case, w = latent_case(rng, some.n, 2 * some.n)
    results = some.run(project_scattered, order, case, w, scatter)
    if any(isinstance(r, Raised) for r in results):
        assert all(isinstance(r, Raised) and {"ShapeError", "ConfigError"} & set(r.kinds) for r in results), results
    else:
        judge_projected(results, case, w, scatter)


def wrong_weights(group: Any, case: Case, w: torch.Tensor) -> Any:
    rank = rank_of(group)
    mine = w[4 * rank : 4 * rank + 4]
    counts = case.counts[rank]
    with projecting(group, "after", dtype=F32) as merger:
        bad = {
            "heads": outcome(merger.gather_w_uv, mine[:3]),
            "transposed": outcome(merger.gather_w_uv, mine.transpose(1, 2)),
            "dtype": outcome(merger.gather_w_uv, mine.half()),
            "sparse": outcome(merger.gather_w_uv, mine.to_sparse()),
            "nowhere": outcome(merger.gather_w_uv, torch._efficientzerotensor(tuple(mine.shape))),
        }
        meet()
        gathered = merger.gather_w_uv(mine)
        bad["refresh"] = outcome(gathered.refresh, mine[:, 1:])
        bad["raw tensor"] = outcome(merger.merge_and_project, case.outs[rank], case.lses[rank], mine)
        bad["nothing"] = outcome(merger.merge_and_project, case.outs[rank], case.lses[rank], None)
        bad["width"] = outcome(merger.merge_and_project, case.outs[rank][..., :V], case.lses[rank], gathered)
        good = merger.merge_and_project(case.outs[rank], case.lses[rank], gathered, valid_counts=counts)
    with merger_for(group) as plain:
        bad["no v_head_dim"] = outcome(plain.gather_w_uv, mine)
    return bad, good


def test_wrong_weights_are_refused_before_anything_is_sent(world: World, rng: torch.Generator) -> None:
    case, w = latent_case(rng, world.n, 3)
    by_rank = world.run(wrong_weights, case, w)
    for bad, _ in by_rank:
        for name, error in bad.items():
            assert isinstance(error, Raised), f"{name}: was accepted: {error}"
            assert {"ShapeError", "TypeError"} & set(error.kinds), f"{name}: {error.trace}"
            assert error.seconds < AT_ONCE_S, name
    judge_projected([good for _, good in by_rank], case, w)


def weights_go_on_elsewhere(group: Any, order: str, case: Case, w: torch.Tensor, w2: torch.Tensor) -> Any:
    rank = rank_of(group)
    mine = w[4 * rank : 4 * rank + 4].clone()
    counts = case.counts[rank]
    with projecting(group, order, dtype=F32) as merger:
        gathered = merger.gather_w_uv(mine.transpose(1, 2).contiguous().transpose(1, 2))
        kept = merger.merge_and_project(case.outs[rank], case.lses[rank], gathered, valid_counts=counts)
        copy = kept.clone()
        gathered.refresh(w2[4 * rank : 4 * rank + 4])
        new = merger.merge_and_project(case.outs[rank], case.lses[rank], gathered, valid_counts=counts)
        assert same_bits(kept, copy), "a later projection changed an earlier result"
    return kept, new


@pytest.mark.parametrize("order", ORDERS)
def test_refresh_takes_the_new_weights_and_keeps_old_results(some: World, rng: torch.Generator, order: str) -> None:
    case, w = latent_case(rng, some.n, 6)
    w2 = torch.randn(w.shape, generator=rng)
    old, new = step_results(some.run(weights_go_on_elsewhere, order, case, w, w2))
    judge_projected(old, case, w)
    judge_projected(new, case, w2)


def one_rank_wrong(group: Any, order: str, case: Case, w: torch.Tensor, culprit: int) -> Any:
    """What every rank meets where `culprit` alone gathers, refreshes or projects wrongly; then all do it rightly."""
    rank = rank_of(group)
    mine, counts = w[4 * rank : 4 * rank + 4].clone(), case.counts[rank]
    wrong = mine[:, 1:] if rank == culprit else mine
    met = {}
    with projecting(group, order, dtype=F32) as merger:
        met["gather"] = outcome(merger.gather_w_uv, wrong)
        meet()
        met["gather what is sparse"] = outcome(merger.gather_w_uv, mine.to_sparse() if rank == culprit else mine)
        meet()
        gathered = merger.gather_w_uv(mine)
        met["refresh"] = outcome(gathered.refresh, wrong)
        meet()
        gathered.refresh(mine)
        weights = mine if rank == culprit else gathered  # a plain tensor is not what gather_w_uv returned
        met["project"] = outcome(merger.merge_and_project, case.outs[rank], case.lses[rank], weights)
        good = merger.merge_and_project(case.outs[rank], case.lses[rank], gathered, valid_counts=counts)
    return {what: error if isinstance(error, Raised) else "went on" for what, error in met.items()}, good


@pytest.mark.parametrize("order", ORDERS)
def test_weights_wrong_on_one_rank_alone_leave_nobody_waiting(peers: World, rng: torch.Generator, order: str) -> None:
    """Section 5: what is wrong on one rank only is told to its peers; what needs no peer may simply succeed."""
    case, w = latent_case(rng, peers.n, 3)
    culprit = peers.n - 1
    by_rank = peers.run(one_rank_wrong, order, case, w, culprit)
    for rank, (met, _) in enumerate(by_rank):
        for what, error in met.items():
            where = f"{what}, rank {rank}"
            if rank == culprit:
                assert isinstance(error, Raised), f"{where}: was accepted"
                assert "ShapeError" in error.kinds, f"{where}: {error.trace}"
            elif what == "project" or order == "before":
                assert isinstance(error, Raised), f"{where}: went on without rank {culprit}"
                assert "DCPCommError" in error.kinds, f"{where}: {error.trace}"
                assert "TransportTimeout" not in error.kinds, f"{where}: waited for its deadline"
                assert error.names(culprit), f"{where}: rank {culprit} is not named: {error.text}"
            if isinstance(error, Raised):
                assert error.seconds < AT_ONCE_S, where
    judge_projected([good for _, good in by_rank], case, w)
