"""The checks of scale: on a GPU by tests/gpu/test_scale.py, on a CPU by test_nvrtc_scale.py."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from dcpcomm.combine.engine import by_destination
from dcpcomm.combine.scale import scale_by_torch, scale_params
from dcpcomm.rows import clean_lse
from tests.kernel_rig import DTYPES, POISON, Findings, Rig, any_lse, bits, layouts
from tests.oracle import LN2, Case, judge_lse, merged, same_bits, ulp

SCATTERS = ("heads", "tokens", "none")
_AROUND = 128


class Room:
    """A contiguous tensor on the rig's device full of poison, with poison on both sides of it."""

    def __init__(self, rig: Rig, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        self._whole = rig.poisoned((2 * _AROUND + nbytes,), torch.uint8)
        self.tensor = self._whole[_AROUND : _AROUND + nbytes].view(dtype).view(shape)

    def on_cpu(self) -> torch.Tensor:
        """A copy; nothing around it was written."""
        whole = self._whole.cpu()
        before, after = whole[:_AROUND], whole[len(whole) - _AROUND :]
        assert bool((before == POISON).all() and (after == POISON).all()), "bytes around a result were written"
        return self.tensor.cpu()


def scale_once(
    rig: Rig,
    partial: torch.Tensor,
    lses: torch.Tensor,
    rank: int,
    scatter: str = "none",
    base: str = "e",
    vectors: bool | None = None,
    generic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scaled, LSE) on CPU, of `partial [B, H, D]` on the rig's device and `lses [N, B, H]`."""
    n, b, h = lses.shape
    m = 1 if scatter == "none" else n
    t, heads = (b, h // n) if scatter == "heads" else (b // m, h)
    scaled = Room(rig, (m, t, heads, partial.shape[2]), partial.dtype)
    out_lse = Room(rig, (t, heads), torch.float32)
    there = lses.to(rig.device)
    params = scale_params(partial, there, scaled.tensor, out_lse.tensor, rank, scatter, base)
    rig.kernels(partial.dtype, n, generic).bind_scale(params, vectors)(rig.stream)
    rig.sync()
    return scaled.on_cpu(), out_lse.on_cpu()


def any_case(rig: Rig, dtype: torch.dtype, n: int, b: int, h: int, d: int, rank: int) -> tuple[Any, Any]:
    """(rows `[B, H, D]`, LSEs `[N, B, H]`) on CPU: some rows empty here, some everywhere, their payload NaN or inf."""
    lses = clean_lse(any_lse(rig, n, b, h), None)
    lses[:, 0, 0] = -torch.inf
    lses[rank, -1, -1] = 3.0  # whatever else is drawn, one row counts
    values = rig.randn(b, h, d, dtype=dtype)
    dead = lses[rank] == -torch.inf
    values[dead] = torch.nan
    values[dead & (rig.randint(0, 2, (b, h)) == 0)] = torch.inf
    return values, lses


def judge(case: tuple[Any, Any], rank: int, scatter: str, base: str, scaled: Any, lse: Any) -> None:
    """Against float64, and against torch's operations."""
    values, lses = case
    n, dtype = len(lses), values.dtype
    unit = LN2 if base == "2" else 1.0
    share = torch.softmax(lses.double() * unit, 0)[rank].nan_to_num().unsqueeze(-1)  # NaN where it is empty everywhere
    clean = torch.where(share > 0, values.double(), 0.0)
    m = 1 if scatter == "none" else n
    want, size = (by_destination(one, scatter, m) for one in (share * clean, clean.abs()))
    by_torch, lse_by_torch = scale_by_torch(values, lses, rank, scatter, base)
    for what, other in (("float64", want), ("torch", by_torch.double())):
        bound = 1e-6 * size + (1e-30 if dtype == torch.float32 else ulp(other, dtype))
        wrong = ~((scaled.double() - other).abs() <= bound)
        assert not bool(wrong.any()), f"{int(wrong.sum())} of {wrong.numel()} values are wrong, says {what}"
    if dtype != torch.float32 and scaled.numel() >= 500:
        exact = (scaled == want.to(dtype)).double().mean().item()
        assert exact > 0.97, f"only {exact:.1%} are the nearest {dtype}: more than one rounding?"
    weightless = by_destination(lses[rank] == -torch.inf, scatter, m)
    assert bool((bits(scaled)[weightless] == 0).all()), "a row without weight is +0"
    _, whole = merged(Case(values[None, :, :, :0].expand(n, -1, -1, -1), lses, base))
    place = rank if m > 1 else 0
    judge_lse(lse, by_destination(whole, scatter, m)[place])
    torch.testing.assert_close(lse, lse_by_torch, rtol=3e-6, atol=3e-6)


def check_scale(rig: Rig, dtype: torch.dtype, n: int, widths: tuple[int, ...]) -> None:
    """Every layout of the rows, scatter and base, from every variant the same bits."""
    findings = Findings()
    names = list(layouts(torch.zeros(1, 1, 1), torch.device("cpu")))
    for number, (d, scatter, name) in enumerate(itertools.product(widths, SCATTERS, names)):
        base, rank = "e2"[number % 2], number % n
        b = {"heads": 3, "tokens": n if n > 4 else 2 * n, "none": 4}[scatter]
        h = {"heads": n if n > 4 else 2 * n, "tokens": 3, "none": 5}[scatter]
        with findings.case(dtype, f"N={n} D={d} base {base} rank", rank, scatter, name):
            case = any_case(rig, dtype, n, b, h, d, rank)
            partial = layouts(case[0], rig.device)[name]
            scaled, lse = scale_once(rig, partial, case[1], rank, scatter, base)
            judge(case, rank, scatter, base, scaled, lse)
            for vectors, generic in ((None, True), (False, False)):
                again, again_lse = scale_once(rig, partial, case[1], rank, scatter, base, vectors, generic)
                assert same_bits(again, scaled), f"other bits with vectors={vectors} generic={generic}"
                assert same_bits(again_lse, lse), f"other LSE bits with vectors={vectors} generic={generic}"
            if scatter != "tokens":
                fewer, fewer_lse = scale_once(rig, partial[:2], case[1][:, :2].contiguous(), rank, scatter, base)
                assert same_bits(fewer, scaled[:, :2]), "a row's bits depend on B"
                assert same_bits(fewer_lse, lse[:2])
    findings.report()


def check_scale_rounding(rig: Rig, dtype: torch.dtype) -> None:
    """All 65,536 halves, times 1 and times 1/2: shares without an error of their own."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(64, 1, 1024)
    for others, share in ((-torch.inf, 1.0), (0.0, 0.5)):
        lses = torch.zeros(2, 64, 1)
        lses[1] = others
        for vectors in (True, False):
            scaled, _ = scale_once(rig, every.to(rig.device), lses, 0, vectors=vectors)
            want = (every.float() * share + 0.0).to(dtype)  # as a sum has it, -0 is +0
            same = (bits(scaled[0]) == bits(want)) | (scaled[0].isnan() & want.isnan())
            assert bool(same.all()), f"{int((~same).sum())} halves are rounded otherwise, share {share} {vectors}"


def check_scale_extremes(rig: Rig) -> None:
    """LSEs at the ends of float32, weights that underflow, rows near the float16 limit, and NaN where it counts."""
    top = torch.finfo(torch.float32).max
    lses = torch.tensor([[top, -top], [-top, -top], [0.0, -200.0], [88.0, 88.0], [-torch.inf] * 2, [5e-39, 0.0]]).T
    lses = lses.reshape(2, 6, 1).contiguous()
    rows = torch.full((6, 1, 8), 65504.0, dtype=torch.float16)
    for vectors in (True, False):
        for rank, shares in ((0, (1, 0.5, 1, 0.5, 0, 0.5)), (1, (0, 0.5, 0, 0.5, 0, 0.5))):
            scaled, lse = scale_once(rig, rows.to(rig.device), lses, rank, vectors=vectors)
            want = torch.tensor(shares).view(1, 6, 1, 1) * rows.float()
            assert same_bits(scaled, want.to(torch.float16))
            judge_lse(lse, merged(Case(rows.expand(2, -1, -1, -1), lses))[1])
        poor = rows.clone()
        poor[0] = poor[2] = poor[4] = torch.nan  # of a weight that underflows, or empty everywhere: not looked at
        poor[3] = torch.nan  # as heavy as the other: the result is NaN, not a number made up
        scaled, _ = scale_once(rig, poor.to(rig.device), lses, 1, vectors=vectors)
        assert bool((bits(scaled[0])[[0, 2, 4]] == 0).all())
        assert bool(scaled[0, 3].isnan().all())


def check_big_scale(rig: Rig, dtype: torch.dtype, n: int, b: int, h: int, d: int) -> None:
    """More rows than one grid holds: the kernel loops, and a row has the bits that it has alone."""
    for scatter in SCATTERS:
        case = any_case(rig, dtype, n, b, h, d, 1)
        partial = case[0].to(rig.device)
        scaled, lse = scale_once(rig, partial, case[1], 1, scatter)
        last = (slice(None), -1) if scatter == "heads" else (-1, -1)  # of the rows in the order of `scaled`
        alone, _ = scale_once(rig, partial[-1:], case[1][:, -1:].contiguous(), 1)
        assert same_bits(scaled[last].flatten(), alone.flatten()), f"{scatter}: a row depends on the rows beside it"
        by_torch, lse_by_torch = scale_by_torch(*case, 1, scatter, "e")
        bound = 1e-6 * by_torch.double().abs() + (1e-30 if dtype == torch.float32 else ulp(by_torch.double(), dtype))
        wrong = ~((scaled.double() - by_torch.double()).abs() <= bound)
        assert not bool(wrong.any()), f"{scatter}: {int(wrong.sum())} of {wrong.numel()} values are wrong"
        torch.testing.assert_close(lse, lse_by_torch, rtol=3e-6, atol=3e-6)


def check_scale_of_odd_float32(rig: Rig) -> None:
    """float32 rows at an address that is only a multiple of 2, which torch can't make but a C++ engine can."""
    values, lses = any_case(rig, torch.float32, 2, 4, 2, 20, 0)
    raw = torch.nn.functional.pad(values.contiguous().view(torch.uint8).flatten(), (2, 2)).to(rig.device)
    there, lses_there = values.to(rig.device), lses.to(rig.device)
    results = []
    for odd in (False, True):
        scaled, lse = Room(rig, (2, 2, 2, 20), torch.float32), Room(rig, (2, 2), torch.float32)
        params = scale_params(there, lses_there, scaled.tensor, lse.tensor, 0, "tokens", "e")
        assert params.rows_unit == 16
        if odd:
            params.rows, params.rows_unit = raw.data_ptr() + 2, 2
        rig.kernels(torch.float32, 2).scale(rig.stream, params)
        rig.sync()
        results.append((scaled.on_cpu(), lse.on_cpu()))
    assert same_bits(results[0][0], results[1][0])
    assert same_bits(results[0][1], results[1][1])


def check_scaler(rig: Rig, scaler: Any, shape: Any, rank: int, n: int) -> None:
    """A `Scaler` of `shape` call after call: other B, layouts, alignments and addresses, bound before or not."""
    findings, kept = Findings(), []  # kept, so that no two calls come with the same addresses
    for number in range(60):
        b = n * int(rig.randint(1, 4, ()))
        d = shape.widths[number % len(shape.widths)]
        values, lses = any_case(rig, shape.dtype, n, b, shape.num_heads, d, rank)
        name, partial = list(layouts(values, rig.device).items())[number % 9]
        with findings.case(number, f"B={b} D={d}", name):
            kept.append((partial, lses.to(rig.device)))
            scaled, lse = scaler(*kept[-1], number % shape.channels)
            rig.sync()
            judge((values, lses), rank, shape.scatter, shape.lse_base, scaled.cpu(), lse.cpu())
    findings.report()


__all__ = [
    "DTYPES", "SCATTERS", "check_big_scale", "check_scale", "check_scale_extremes", "check_scale_of_odd_float32",
    "check_scale_rounding", "check_scaler", "judge", "scale_once",
]  # fmt: skip
