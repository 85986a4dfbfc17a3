"""Rows 1 to 13 of the list of faults: values that a merge has been seen to get wrong."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import dcpcomm
from tests.oracle import INF, LN2, NAN, Case, judge, judge_lse, make_case, merged, same_bits, shares
from tests.steps import Step, merge_steps, step_results
from tests.world import World, merger_for, outcome, rank_of

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def run_steps(world: World, shape: dict, steps: list[Step], delay_seed: int | None = None) -> list[list]:
    return step_results(world.run(merge_steps, shape, steps, None, delay_seed))


def with_lse(*cases: Case) -> list[Step]:
    return [Step(case, {"return_lse": True}) for case in cases]


def test_finite_lse_of_an_empty_rank_gets_no_weight(world: World, rng: torch.Generator) -> None:
    """Row 1: rank without KV returns lse 0.0 and whatever was in its buffer."""
    lengths = torch.tensor([1, 3, 8, 9])
    n = world.n
    counts = torch.stack([dcpcomm.sharding.local_kv_lens(lengths, n, r, 1) for r in range(n)])
    assert counts.sum(0).tolist() == lengths.tolist()
    steps = []
    for dtype in (BF16, F32):
        case = make_case(rng, n, b=4, dtype=dtype)
        case.counts = counts
        case.lses[counts == 0] = 0.0
        steps.append(case)
    for case, shape_dtype in zip(steps, (BF16, F32), strict=True):
        (results,) = run_steps(world, {"dtype": shape_dtype}, with_lse(case))
        judge(results, case)


@pytest.mark.parametrize("counted", [True, False])
def test_rows_empty_everywhere_are_zero_and_rows_empty_on_one_rank_are_right(
    world: World, rng: torch.Generator, counted: bool
) -> None:
    """Row 2: NaN in the payload and in the LSE of empty rows never gets out."""
    n = world.n
    case = make_case(rng, n, b=17)
    empty = torch.zeros(n, 17, dtype=torch.bool)
    empty[:, 0] = True
    for r in range(n):
        empty[r, 1 + r] = True
    case.outs[empty], case.lses[empty] = NAN, NAN
    if counted:
        case.counts = torch.where(empty, 0, 5)
    (results,) = run_steps(world, {}, with_lse(case))
    for out, lse in results:
        assert (out[0] == 0).all()
        assert (lse[0] == -INF).all()
        assert not torch.isnan(out).any()
    judge(results, case)


def test_payload_of_weight_zero_is_not_read(world: World, rng: torch.Generator) -> None:
    """Rows 3 and 4: -inf, NaN and +inf are all "empty here", whatever stands in the payload."""
    n = world.n
    steps = []
    for marker, payload in itertools.product((-INF, INF, NAN), (NAN, INF, -INF)):
        case = make_case(rng, n, b=6)
        for r in range(n):
            case.lses[r, r :: n + 1] = marker  # at N=1 half of the rows are empty everywhere
            case.outs[r, r :: n + 1] = payload
        case.outs.view(torch.int16)[n - 1, n - 1 :: n + 1, ::2] = 0x7FC0
        steps.append(case)
    heads = make_case(rng, n, b=5)  # single heads, not rows
    heads.lses[0, ::2, ::3], heads.outs[0, ::2, ::3] = -INF, NAN
    steps.append(heads)
    for i, results in enumerate(run_steps(world, {}, with_lse(*steps))):
        judge(results, steps[i], what=f"step {i}")


def test_lse_base_is_what_the_caller_said(peers: World, rng: torch.Generator) -> None:
    """Row 5: equal in both bases; and a wrong base shows, so this test can see."""
    n = peers.n
    in_e = make_case(rng, n, dtype=F32)
    in_2 = Case(in_e.outs, in_e.lses / LN2, "2")
    (as_e,) = run_steps(peers, {"dtype": F32}, with_lse(in_e))
    (as_2,) = run_steps(peers, {"dtype": F32, "lse_base": "2"}, with_lse(in_2))
    (wrong,) = run_steps(peers, {"dtype": F32}, with_lse(in_2))
    judge(as_e, in_e)
    judge(as_2, in_2)
    for (out_e, lse_e), (out_2, lse_2), (out_wrong, _) in zip(as_e, as_2, wrong, strict=True):
        torch.testing.assert_close(out_2, out_e, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse_2 * LN2, lse_e, rtol=1e-5, atol=1e-5)
        assert (out_wrong - out_e).abs().max() > 0.01


@pytest.mark.parametrize("base", ["e", "2"])
def test_weight_of_a_short_shard(peers: World, base: str) -> None:
    """Row 6: 64 keys against 3072 weigh 2.04 %, in each base."""
    n = peers.n
    unit = LN2 if base == "2" else 1.0
    outs = torch.full((n, 5, 4 * n, 32), NAN)
    lses = torch.full((n, 5, 4 * n), -INF)
    outs[0], lses[0] = 3.0, math.log(3072) / unit
    outs[n - 1], lses[n - 1] = 4.0, math.log(64) / unit
    (results,) = run_steps(peers, {"dtype": F32, "lse_base": base}, with_lse(Case(outs, lses, base)))
    for out, lse in results:
        torch.testing.assert_close(out, torch.full_like(out, 3 + 64 / 3136), rtol=0, atol=2e-6)
        torch.testing.assert_close(lse * unit, torch.full_like(lse, math.log(3136)), rtol=0, atol=5e-6)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_every_dtype_of_lse_with_every_dtype_of_out(world: World, rng: torch.Generator, dtype: torch.dtype) -> None:
    """Row 7, and 5 and 6 on the way: the oracle on lse.float()."""
    cases = [make_case(rng, world.n, dtype=dtype, lse_dtype=lse_dtype) for lse_dtype in (F32, F16, BF16)]
    for i, results in enumerate(run_steps(world, {"dtype": dtype}, with_lse(*cases))):
        judge(results, cases[i], what=f"lse {cases[i].lses.dtype}")


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_lse_travels_whole(world: World, rng: torch.Generator, dtype: torch.dtype) -> None:
    """Row 7: bits 0x3F800001 survive next to a 2-byte payload, and are not rounded to its dtype."""
    n = world.n
    case = make_case(rng, n, b=n, dtype=dtype)
    bits = torch.tensor(0x3F800001, dtype=torch.int32).view(F32)
    case.lses[:] = -INF
    for r in range(n):
        case.lses[r, r] = bits  # row r lives on rank r alone
    (results,) = run_steps(world, {"dtype": dtype}, with_lse(case))
    out, _ = merged(case)
    for (got, lse), want in zip(results, shares(out, n), strict=True):
        assert same_bits(lse, bits.expand_as(lse)), f"lse {lse.unique()} bits {lse.view(torch.int32).unique()}"
        assert same_bits(got, want.to(dtype)), "the only source has weight 1: its payload arrives as it is"


def float64_lse(group, case: Case):
    rank = rank_of(group)
    with merger_for(group) as merger:
        bad = outcome(merger.merge, case.outs[rank], case.lses[rank].double())
        return bad, merger.merge(case.outs[rank], case.lses[rank])


def test_float64_lse_is_refused_by_name_on_every_rank(world: World, rng: torch.Generator) -> None:
    """Row 8: and nothing was sent, so that the next call works."""
    case = make_case(rng, world.n)
    results = world.run(float64_lse, case)
    for bad, _ in results:
        assert "ShapeError" in bad.kinds
        assert "float64" in bad.text
        assert "partial_lse" in bad.text
    judge([good for _, good in results], case)


def chained(group, case: Case, base: str):
    """Case: N*N partials. Merges N groups of N; then what came out."""
    rank, n = rank_of(group), case.n
    own = None
    with merger_for(
        group, {"dtype": F32, "scatter": "none", "lse_base": base, "num_heads": case.outs.shape[2]}
    ) as merger:
        for k in range(math.isqrt(n)):
            i = k * math.isqrt(n) + rank
            out, lse = merger.merge(case.outs[i], case.lses[i], return_lse=True)
            own = (out, lse) if k == rank else own
        return merger.merge(*own, return_lse=True)


@pytest.mark.parametrize("base", ["e", "2"])
def test_chained_merges_equal_one_merge(peers: World, rng: torch.Generator, base: str) -> None:
    """Row 9: the LSE that is returned is in the base that came in."""
    n = peers.n
    case = make_case(rng, n * n, b=5, h=2 * n, dtype=F32, base=base)
    results = peers.run(chained, case, base)
    out, lse = merged(case)
    for got, got_lse in results:
        torch.testing.assert_close(got.double(), out, rtol=1e-5, atol=1e-5)
        judge_lse(got_lse, lse)


@pytest.mark.parametrize("scatter", ["heads", "none"])
def test_padding_rows_of_a_captured_step_are_zero(world: World, rng: torch.Generator, scatter: str) -> None:
    """Row 10: B=32 of which 17 live; the rest NaN in out and lse, past query_start_loc[-1]."""
    n = world.n
    case = make_case(rng, n, b=32)
    case.outs[:, 17:], case.lses[:, 17:] = NAN, NAN
    counts = torch.randint(0, 9, (n, 17), generator=rng)
    padding = torch.zeros(n, 15, dtype=counts.dtype)
    case.counts = torch.cat([counts, padding], dim=1)
    finite_padding = Case(case.outs.clone(), case.lses.clone(), counts=case.counts)
    finite_padding.outs[:, 17:], finite_padding.lses[:, 17:] = 7.0, 0.5  # of another step, and looks alive
    starts = torch.arange(18)
    steps = [
        Step(
            c,
            {"return_lse": True, "query_start_loc": starts.to(dtype)},
            each=[{"seq_lens": counts[r].to(dtype)} for r in range(n)],
        )
        for c in (case, finite_padding)
        for dtype in (torch.int32, torch.int64)
    ]
    for step, results in zip(steps, run_steps(world, {"scatter": scatter}, steps), strict=True):
        for out, lse in results:
            assert (out[17:] == 0).all()
            assert (lse[17:] == -INF).all()
        judge(results, step.case, scatter)


def test_requests_without_keys_and_requests_without_rows(world: World, rng: torch.Generator) -> None:
    """Row 11: query_start_loc [0,1,4,6,6,6], seq_lens [5,0,3,0,0]: rows 1..3 and 6..9 are empty."""
    n = world.n
    starts = torch.tensor([0, 1, 4, 6, 6, 6])
    same = torch.tensor([[5, 0, 3, 0, 0]]).expand(n, 5)
    mixed = torch.tensor([[5, 0, 3, 0, 0], [0, 2, 3, 1, 0], [1, 0, 0, 0, 9], [0, 0, 2, 0, 0]])[:n]
    steps = []
    for lens in (same, mixed):
        case = make_case(rng, n, b=10)
        per_row = torch.zeros(n, 10, dtype=torch.int64)
        for s in range(5):
            per_row[:, starts[s] : starts[s + 1]] = lens[:, s : s + 1]
        case.counts = per_row
        case.outs[per_row == 0], case.lses[per_row == 0] = NAN, 1.25
        steps.append(
            Step(
                case,
                {"return_lse": True, "query_start_loc": starts},
                each=[{"seq_lens": lens[r].clone()} for r in range(n)],
            )
        )
    for i, results in enumerate(run_steps(world, {}, steps)):
        judge(results, steps[i].case, what=f"step {i}")
    assert (merged(steps[0].case)[1][[1, 2, 3, 6, 7, 8, 9]] == -INF).all()  # the test tests what row 11 says


@pytest.mark.parametrize("interleave", [1, 4])
def test_speculative_rows_see_different_shards(world: World, rng: torch.Generator, interleave: int) -> None:
    """Row 12: a request's first row may be empty on a rank where its last isn't."""
    n = world.n
    queries = torch.tensor([3, 1, 4, 2])
    lengths = torch.tensor([3, 9, 5, 2 * interleave + 1])
    starts = torch.tensor([0, 3, 4, 8, 10])
    counts = torch.stack([dcpcomm.sharding.local_row_counts(lengths, starts, n, r, interleave) for r in range(n)])
    seen = torch.zeros_like(counts)
    for i in range(4):
        for j in range(int(queries[i])):
            for k in range(int(lengths[i] - (queries[i] - 1 - j))):
                seen[(k // interleave) % n, int(starts[i]) + j] += 1
    assert counts.tolist() == seen.tolist()
    if n > 1:  # else this data would not see the fault
        per_request = torch.stack([dcpcomm.sharding.local_kv_lens(lengths, n, r, interleave) for r in range(n)])
        assert ((counts == 0) & (per_request.repeat_interleave(queries, dim=1) > 0)).any()
    case = make_case(rng, n, b=10)
    case.counts = counts
    case.outs[counts == 0], case.lses[counts == 0] = NAN, 0.0
    (results,) = run_steps(world, {}, with_lse(case))
    judge(results, case)


def test_a_hundred_repeats_are_bit_equal(peers: World, rng: torch.Generator, seed: int) -> None:
    """Row 13: the order in which ranks arrive has no say."""
    case = make_case(rng, peers.n, b=5)
    case.lses[0, 0] = -INF
    runs = run_steps(peers, {}, with_lse(*[case] * 100), delay_seed=seed)
    judge(runs[0], case)
    for results in runs[1:]:
        for (out, lse), (first, first_lse) in zip(results, runs[0], strict=True):
            assert same_bits(out, first)
            assert same_bits(lse, first_lse)


def test_largest_finite_values_do_not_overflow_in_the_sum(peers: World) -> None:
    """Section 3: weights are normalised before the sum: thrice the float16 limit is infinite."""
    n = peers.n
    for dtype in (F16, BF16):
        top = torch.finfo(dtype).max
        outs = torch.full((n, 3, 4 * n, 32), top, dtype=dtype)
        lses = torch.full((n, 3, 4 * n), 80.0)  # exp(80) * 65504 is beyond float32 as well
        (results,) = run_steps(peers, {"dtype": dtype}, with_lse(Case(outs, lses)))
        for out, lse in results:
            assert torch.isfinite(out).all()
            assert ((out.double() / top - 1).abs() <= torch.finfo(dtype).eps).all()
            torch.testing.assert_close(lse, torch.full_like(lse, 80 + math.log(n)))


def test_lses_far_from_zero_neither_overflow_nor_vanish(world: World, rng: torch.Generator) -> None:
    """Section 3: the maximum is subtracted first: rows of LSE +-20000 are as good as rows of LSE 0."""
    cases = []
    for offset, base in itertools.product((20000.0, -20000.0, 3.0e38, -3.0e38), ("e", "2")):
        case = make_case(rng, world.n, b=3, dtype=F32, base=base)
        case.lses += offset
        cases.append(case)
    for base in ("e", "2"):
        mine = [case for case in cases if case.base == base]
        for i, results in enumerate(run_steps(world, {"dtype": F32, "lse_base": base}, with_lse(*mine))):
            for (out, lse), want, want_lse in zip(results, *(shares(t, world.n) for t in merged(mine[i])), strict=True):
                torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)
