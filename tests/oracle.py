"""What a merge means, written a second time: float64, one head at a time, from the formulas; and the judges.

Shares no code with `dcpcomm.reference`, so that a misreading in one is seen by the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

NAN, INF = math.nan, math.inf
LN2 = math.log(2.0)


@dataclass
class Case:
    """Partials of all ranks: `outs` [N, B, H, D], `lses` [N, B, H] in `base`, `counts` [N, B] or None."""

    outs: torch.Tensor
    lses: torch.Tensor
    base: str = "e"
    counts: torch.Tensor | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return self.outs.shape[0]


def make_case(
    rng: torch.Generator,
    n: int,
    b: int = 17,
    h: int | None = None,
    d: int = 32,
    *,
    dtype: torch.dtype = torch.bfloat16,
    lse_dtype: torch.dtype = torch.float32,
    base: str = "e",
) -> Case:
    h = 4 * n if h is None else h
    lses = torch.randn(n, b, h, generator=rng) * 3 / (LN2 if base == "2" else 1.0)
    return Case(torch.randn(n, b, h, d, generator=rng).to(dtype), lses.to(lse_dtype), base)


def merged(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """All heads, float64: `out` [B, H, D] and `lse` [B, H] in the case's base."""
    n, b_all, h_all, d = case.outs.shape
    unit = LN2 if case.base == "2" else 1.0
    out = torch.zeros(b_all, h_all, d, dtype=torch.float64)
    lse = torch.full((b_all, h_all), -INF, dtype=torch.float64)
    values = case.lses.float().tolist()
    counts = None if case.counts is None else case.counts.tolist()
    partials = case.outs.double()
    for b in range(b_all):
        for h in range(h_all):
            logs = []
            for r in range(n):
                value = values[r][b][h] * unit
                empty = counts is not None and counts[r][b] == 0
                logs.append(-INF if empty or math.isnan(value) or value == INF else value)
            top = max(logs)
            if top == -INF:
                continue
            weights = [math.exp(value - top) for value in logs]
            total = math.fsum(weights)
            for r in range(n):
                if weights[r] > 0:
                    out[b, h] += weights[r] / total * partials[r, b, h]
            lse[b, h] = (top + math.log(total)) / unit
    return out, lse


def shares(whole: torch.Tensor, n: int, scatter: str = "heads") -> list[torch.Tensor]:
    """What each rank gets of `whole` [B, H, ...]: slice r of the scattered axis is rank r's."""
    if scatter == "none":
        return [whole] * n
    return list(whole.chunk(n, dim=1 if scatter == "heads" else 0)) if whole.shape[0] else [whole] * n


def weight_bound(case: Case) -> torch.Tensor:
    """sum of w_r |out_r|, [B, H, D]: what rounding errors are relative to, as sums may cancel."""
    finite = torch.nan_to_num(case.outs.double().abs(), nan=0.0, posinf=0.0)
    return merged(Case(finite, case.lses, case.base, case.counts))[0]


# ---------------------------------------------------------------- judging


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaN included."""
    ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    same_kind = a.shape == b.shape and a.dtype == b.dtype
    return same_kind and torch.equal(a.contiguous().view(ints), b.contiguous().view(ints))


def ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance between neighbours of `dtype` at |x| (float64 in and out)."""
    info = torch.finfo(dtype)
    return torch.exp2(torch.floor(torch.log2(x.abs().clamp_min(info.tiny)))) * info.eps


def judge_out(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor, what: str = "") -> None:
    """`got` is what rounding may make of `want` (float64), given `bound` = sum of w|o| (float64)."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert torch.isfinite(got).all(), f"{what}: {int((~torch.isfinite(got)).sum())} values are NaN or infinite"
    if got.numel() == 0:
        return
    error = (got.double() - want).abs()
    allowed = (1e-5 * want.abs() if got.dtype == torch.float32 else ulp(want, got.dtype)) + 2e-6 * bound
    wrong = error > allowed
    at = tuple(wrong.nonzero()[0].tolist()) if wrong.any() else ()
    assert not wrong.any(), (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} values are wrong; the first at {at}: "
        f"{got[at].item()}, expected {want[at].item()}"
    )
    if got.dtype != torch.float32 and got.numel() >= 500:
        exact = (got == want.to(got.dtype)).double().mean().item()
        assert exact > 0.97, f"{what}: only {exact:.1%} are the nearest {got.dtype}: more than one rounding?"


def judge_lse(got: torch.Tensor, want: torch.Tensor, what: str = "") -> None:
    assert got.dtype == torch.float32, f"{what}: lse is {got.dtype}"
    assert got.shape == want.shape, f"{what}: lse shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert not torch.isnan(got).any(), f"{what}: NaN in the lse"
    empty = want == -INF
    assert torch.equal(got == -INF, empty), f"{what}: -inf in the lse at other places than the empty rows"
    live = ~empty
    torch.testing.assert_close(got.double()[live], want[live], rtol=2e-6, atol=2e-6, msg=lambda m: f"{what}: lse: {m}")


def judge(results: list[Any], case: Case, scatter: str = "heads", what: str = "") -> None:
    """`results` by rank, each `out` or `(out, lse)`, against the oracle."""
    out, lse = merged(case)
    bound = weight_bound(case)
    n = case.n
    assert len(results) == n
    by_rank = zip(shares(out, n, scatter), shares(lse, n, scatter), shares(bound, n, scatter), strict=True)
    for rank, (want, want_lse, tolerance) in enumerate(by_rank):
        got = results[rank]
        where = f"{what} rank {rank}"
        if isinstance(got, tuple):
            judge_lse(got[1], want_lse, where)
            got = got[0]
        assert got.dtype == case.outs.dtype, f"{where}: dtype {got.dtype}, expected {case.outs.dtype}"
        judge_out(got, want, tolerance, where)
