"""The library's oracle against the tests' own; and the tests' judges against results that are wrong."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import dcpcomm
from tests.oracle import INF, NAN, Case, judge, judge_out, make_case, merged, same_bits, shares, ulp

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("scatter", ["heads", "tokens", "none"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_reference_equals_the_formula(rng: torch.Generator, n: int, scatter: str) -> None:
    for dtype, lse_dtype, base in itertools.product((BF16, F16, F32), (F32, BF16), ("e", "2")):
        case = make_case(rng, n, b=2 * n, h=2 * n, d=5, dtype=dtype, lse_dtype=lse_dtype, base=base)
        case.counts = torch.randint(0, 3, (n, 2 * n), generator=rng)
        case.outs[case.counts == 0], case.lses[case.counts == 0] = NAN, 1.0
        case.lses[0, 0], case.outs[0, 0] = INF, INF
        case.lses[n - 1, 1, ::2], case.outs[n - 1, 1, ::2] = NAN, -INF
        case.lses[0, -1] -= 150
        for counts in (case.counts, None):
            if counts is None:
                case = Case(torch.nan_to_num(case.outs), case.lses, base)
            outs, lses = dcpcomm.reference.merge_partials(
                case.outs, case.lses, lse_base=base, valid_counts=counts, scatter=scatter
            )
            assert (outs.dtype, lses.dtype) == (torch.float64, torch.float64)
            want, want_lse = (torch.stack(shares(t, n, scatter)) for t in merged(case))
            torch.testing.assert_close(outs, want, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(lses, want_lse, rtol=1e-12, atol=1e-12)


def test_reference_leaves_its_arguments_alone(rng: torch.Generator) -> None:
    case = make_case(rng, 3)
    case.lses[0, 0], case.outs[0, 0] = NAN, NAN
    outs, lses = case.outs.clone(), case.lses.clone()
    dcpcomm.reference.merge_partials(case.outs, case.lses, lse_base="e", valid_counts=torch.zeros(3, 17))
    assert same_bits(case.outs, outs)
    assert same_bits(case.lses, lses)


def test_reference_needs_the_base(rng: torch.Generator) -> None:
    case = make_case(rng, 2)
    with pytest.raises(TypeError):
        dcpcomm.reference.merge_partials(case.outs, case.lses)
    with pytest.raises(ValueError, match="10"):
        dcpcomm.reference.merge_partials(case.outs, case.lses, lse_base="10")


# ---------------------------------------------------------------- a judge must also be able to say no


def right_results(case: Case) -> list[Any]:
    out, lse = merged(case)
    parts = zip(shares(out, case.n), shares(lse, case.n), strict=True)
    return [(o.to(case.outs.dtype), s.float()) for o, s in parts]


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_judge_accepts_the_truth_and_sees_each_fault(rng: torch.Generator, dtype: torch.dtype) -> None:
    case = make_case(rng, 3, dtype=dtype)
    case.lses[:, 0], case.outs[:, 0] = -INF, NAN
    judge(right_results(case), case)

    def broken(change: Any) -> list[Any]:
        results = right_results(case)
        change(results)
        return results

    def nan(r: list[Any]) -> None:
        r[0][0][0, 0, 0] = NAN

    def one_value(r: list[Any]) -> None:
        r[2][0][3, 1, 7] += 3 * float(ulp(r[2][0][3, 1, 7].double(), dtype)) + 1e-4

    def heads_swapped(r: list[Any]) -> None:
        r[1] = (r[1][0].flip(1), r[1][1])

    def ranks_swapped(r: list[Any]) -> None:
        r[0], r[1] = r[1], r[0]

    def lse_off(r: list[Any]) -> None:
        r[1][1][4, 2] += 1e-3

    def empty_lse_finite(r: list[Any]) -> None:
        r[0][1][0, 0] = -1e30

    def lse_in_half(r: list[Any]) -> None:
        r[0] = (r[0][0], r[0][1].half())

    def double_rounding(r: list[Any]) -> None:
        r[0] = ((r[0][0].double() * (1 + 2 * torch.finfo(dtype).eps)).to(dtype), r[0][1])

    faults = [nan, one_value, heads_swapped, ranks_swapped, lse_off, empty_lse_finite, lse_in_half]
    faults += [double_rounding] if dtype != F32 else []
    for fault in faults:
        with pytest.raises(AssertionError):
            judge(broken(fault), case)


def test_ulp_is_the_distance_to_the_next_value() -> None:
    for dtype in (BF16, F16):
        x = torch.tensor([1.0, 1.5, 0.37, -3.0, 100.0]).to(dtype)
        step = (x.view(torch.int16) + 1).view(dtype).double() - x.double()
        assert torch.equal(step.abs(), ulp(x.double(), dtype))


def test_judge_needs_correct_rounding_most_of_the_time(rng: torch.Generator) -> None:
    want = torch.randn(2000, dtype=torch.float64, generator=rng)
    judge_out(want.to(BF16), want, want.abs())
    beside = (want.to(BF16).view(torch.int16) + (torch.arange(2000) % 4 == 0)).to(torch.int16).view(BF16)
    within_an_ulp = torch.where((beside.double() - want).abs() < ulp(want, BF16), beside, want.to(BF16))
    with pytest.raises(AssertionError, match="nearest"):
        judge_out(within_an_ulp, want, want.abs())
