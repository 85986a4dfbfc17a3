"""The checks of pack and combine: on a GPU by tests/gpu/test_kernels.py, on a CPU by test_nvrtc_emulated.py."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import dcpcomm
from dcpcomm.combine.engine import by_destination
from dcpcomm.combine.params import combine_params, counts_of, pack_params, pack_unit, record_words
from dcpcomm.combine.wire import KIND_CANCELLED
from dcpcomm.rows import RowCounts, clean_lse
from tests.kernel_rig import (
    DTYPES,
    POISON,
    Blocks,
    Findings,
    Rig,
    any_lse,
    bits,
    expected_pack,
    header_for,
    layouts,
    lse_layouts,
    ordinal_on,
)
from tests.oracle import same_bits, ulp

# ---------------------------------------------------------------- pack


def pack_once(rig: Rig, kernels: Any, partial: Any, lse: Any, scatter: str, rank: int, n: int, **given: Any) -> Any:
    """(blocks, header, params) after one pack of `partial` `[B, H, D]` on the rig's device."""
    b, _, d = partial.shape
    rows = by_destination(partial, scatter, n)
    lses = by_destination(lse, scatter, n)
    _, t, h, _ = rows.shape
    blocks = Blocks(rig, n, t, h, d, partial.dtype, gap=given.pop("gap", 0))
    header = header_for(b, d, ordinal=41, kind=given.pop("kind", 0))
    ordinal = ordinal_on(rig, 41)
    before = blocks.on_cpu()
    params = pack_params(
        blocks.wire, rows, lses, rank, header, ordinal.data_ptr(), counts_of(*given.pop("counts", (None,)))
    )
    kernels.bind_pack(params, given.pop("unit", None))(rig.stream)
    rig.sync()
    assert int(ordinal) == 42, "the ordinal is advanced by one"
    blocks.assert_untouched_around()
    return blocks, header, params, before


def check_pack_layouts(rig: Rig, dtype: torch.dtype, ranks: tuple[int, ...], widths: tuple[int, ...]) -> None:
    """Every layout, width and LSE dtype; each variant that may serve gives the bytes that torch_engine gives."""
    findings = Findings()
    for n, d, scatter in itertools.product(ranks, widths, ("heads", "tokens")):
        b, h, rank = 2 * n, 2 * n, n - 1
        values = rig.randn(b, h, d, dtype=dtype)
        for number, (name, partial) in enumerate(layouts(values, rig.device).items()):
            lse_dtype = DTYPES[number % 3]
            lse_cpu = any_lse(rig, b, h, dtype=lse_dtype)
            lse_name, lse = list(lse_layouts(lse_cpu, rig.device).items())[number % 9]
            with findings.case(dtype, f"N={n} D={d}", scatter, name, "lse", lse_dtype, lse_name):
                got, header, params, _ = pack_once(
                    rig, rig.kernels(dtype, n), partial, lse, scatter, rank, n, gap=16 * (number % 2)
                )
                want = expected_pack(got, values, lse_cpu, None, rank, header, scatter)
                view = got.on_cpu()
                own = view.blocks[rank, 1:, : view.lse_at]
                assert bool((own == POISON).all()), "a rank's own payload is not moved"
                assert bool((view.blocks[:, 0, 32:] == POISON).all()), "bytes past a header were written"
                assert torch.equal(view.blocks, want), f"{int((view.blocks != want).sum())} bytes differ"
                widest = pack_unit(params, dtype.itemsize)
                for unit in (8, 4, 2):
                    if unit < widest:
                        again, *_ = pack_once(
                            rig, rig.kernels(dtype, n), partial, lse, scatter, rank, n, gap=16 * (number % 2), unit=unit
                        )
                        assert torch.equal(again.on_cpu().blocks, want), f"loading {unit} bytes at once"
    findings.report()


def count_forms(rig: Rig, b: int) -> dict[str, RowCounts]:
    """Every way to say which of `b` rows are empty, on the rig's device."""
    some = rig.randint(-1, 3, (b,))
    starts = torch.sort(rig.randint(0, b + 1, (6,))).values
    late = starts.clone()
    late[-1] = max(1, b - 2)
    late = torch.sort(late).values
    lens = rig.randint(0, 3, (5,))
    none = torch.zeros(0, dtype=torch.int64)
    forms: dict[str, RowCounts] = {}
    for one, other in itertools.product((torch.int32, torch.int64), repeat=2):
        name = f"{one} {other}".replace("torch.", "")
        forms[f"per request {name}"] = RowCounts(None, lens.to(one), starts.to(other))
        forms[f"padded {name}"] = RowCounts(None, lens.to(one), late.to(other))
        forms[f"per row {name}"] = RowCounts(some.to(one))
        forms[f"no requests {name}"] = RowCounts(None, none.to(one), torch.zeros(1, dtype=other))
    forms["strided"] = RowCounts(some.repeat_interleave(2)[::2])
    forms["whole"] = RowCounts(None, torch.ones(3, dtype=torch.int32), torch.tensor([0, 1, 1, b]))
    return forms


def on(rig: Rig, counts: RowCounts) -> RowCounts:
    def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        moved = tensor.to(rig.device)
        return moved.repeat_interleave(2)[::2] if tensor.stride(0) == 2 else moved

    return RowCounts(move(counts.valid_counts), move(counts.seq_lens), move(counts.query_start_loc))


def check_pack_counts(rig: Rig, dtype: torch.dtype, n: int) -> None:
    """Every form of counts says the rows empty that rows.py says, in both scatters; what they hold may be NaN."""
    findings = Findings()
    d, h = 24, 2 * n
    for scatter, b in (("heads", 19), ("tokens", 5 * n), ("none", 7)):
        for name, counts in count_forms(rig, b).items():
            values, lse = rig.randn(b, h, d, dtype=dtype), rig.randn(b, h)
            empty = counts.empty(b)
            values[empty] = torch.nan
            with findings.case(dtype, scatter, name):
                given = on(rig, counts), 0, b // n if scatter == "tokens" else 0
                got, header, *_ = pack_once(
                    rig, rig.kernels(dtype, n), values.to(rig.device), lse.to(rig.device), scatter, 0, n, counts=given
                )
                want = expected_pack(got, values, lse, empty, 0, header, scatter)
                assert torch.equal(got.on_cpu().blocks, want)
    findings.report()


def check_cancelled(rig: Rig, dtype: torch.dtype, n: int) -> None:
    """A call that is called off writes headers and nothing else."""
    values, lse = rig.randn(n, n, 32, dtype=dtype).to(rig.device), rig.randn(n, n).to(rig.device)
    got, header, _, before = pack_once(rig, rig.kernels(dtype, n), values, lse, "heads", 0, n, kind=KIND_CANCELLED)
    before.words[:] = header.words()
    assert torch.equal(got.on_cpu().blocks, before.blocks)


def check_big_pack(rig: Rig, dtype: torch.dtype, n: int, b: int, d: int) -> None:
    """More rows than one grid holds: the kernel loops."""
    values, lse = rig.randn(b, 8 * n, d, dtype=dtype), any_lse(rig, b, 8 * n)
    got, header, *_ = pack_once(rig, rig.kernels(dtype, n), values.to(rig.device), lse.to(rig.device), "heads", 1, n)
    assert torch.equal(got.on_cpu().blocks, expected_pack(got, values, lse, None, 1, header, "heads"))


# ---------------------------------------------------------------- combine


class Arrived:
    """What N ranks sent to this one: a wire buffer whose own block holds nothing, and the own rows beside it."""

    def __init__(self, rig: Rig, dtype: torch.dtype, n: int, t: int, h: int, d: int, own: int, **given: Any) -> None:
        self.rig, self.dtype, self.own = rig, dtype, own
        self.n, self.t, self.h, self.d = n, t, h, d
        self.rows = rig.randn(n, t, h, d, dtype=dtype)
        self.lse = any_lse(rig, n, t, h)
        if t > 1:
            self.lse[:, 0] = -torch.inf  # a row that is empty everywhere
        own_lse_dtype = given.get("own_lse_dtype", torch.float32)
        self.lse[own] = self.lse[own].to(own_lse_dtype).float()
        self.rows[~(self.lse < torch.inf) | (self.lse == -torch.inf)] = torch.nan
        self.blocks = Blocks(rig, n, t, h, d, dtype, gap=given.get("gap", 0))
        self.header = header_for(t, d, ordinal=9)
        views = self.blocks.on_cpu()
        views.payload.copy_(self.rows)
        views.lse.copy_(clean_lse(self.lse, None))
        views.blocks[own, 1:] = 0xFF
        views.words[:] = self.header.words()
        views.words[own] = -1
        self.blocks.fill(views)
        self.own_rows = layouts(self.rows[own], rig.device)[given.get("layout", "contiguous")]
        self.own_lse = lse_layouts(self.lse[own].to(own_lse_dtype), rig.device)[given.get("lse_layout", "contiguous")]
        self.ordinal = ordinal_on(rig, 10)
        self.record = rig.pinned(record_words(n))

    def merge(self, base: str = "e", vectors: bool | None = None, generic: bool = False, rows: int = 0) -> Any:
        """(out, LSE) on CPU, from buffers that were poisoned before; `rows`: only the first so many."""
        t = rows or self.t
        out = self.rig.poisoned((t, self.h, self.d), self.dtype)
        return self.merge_into(out, base, vectors, generic, True)

    def merge_into(self, out: Any, base: str, vectors: bool | None, generic: bool, want_lse: bool) -> Any:
        t = out.shape[0]
        out_lse = self.rig.poisoned((t, self.h), torch.float32)
        params = combine_params(
            self.blocks.payload[:, :t], self.blocks.lse[:, :t], out, out_lse if want_lse else None, base,
            own=self.own, own_rows=self.own_rows[:t], own_lse=self.own_lse[:t], wire=self.blocks.wire,
            header=self.header, ordinal=self.ordinal.data_ptr(), record=self.record.data_ptr(),
        )  # fmt: skip
        self.rig.kernels(self.dtype, self.n, generic).bind_combine(params, vectors)(self.rig.stream)
        self.rig.sync()
        return out.cpu(), out_lse.cpu()

    def judge(self, out: torch.Tensor, lse: torch.Tensor, base: str) -> None:
        t = out.shape[0]
        want, want_lse = dcpcomm.reference.merge_partials(
            self.rows[:, :t], self.lse[:, :t], lse_base=base, scatter="none"
        )
        bound = 1e-6 * self.rows[:, :t].double().nan_to_num().abs().amax(0)
        bound = bound + (1e-30 if self.dtype == torch.float32 else ulp(want[0], self.dtype))
        wrong = ~((out.double() - want[0]).abs() <= bound)
        assert not bool(wrong.any()), f"{int(wrong.sum())} of {wrong.numel()} values are wrong"
        torch.testing.assert_close(lse.double(), want_lse[0], rtol=3e-6, atol=3e-6)
        dead = want_lse[0] == -torch.inf
        assert bool((bits(out)[dead] == 0).all()), "a row empty everywhere is +0"


def check_combine(rig: Rig, dtype: torch.dtype, n: int, widths: tuple[int, ...]) -> None:
    """Against the oracle, in every layout of the own rows; and one set of bits from every variant."""
    findings = Findings()
    names = list(layouts(torch.zeros(1, 1, 1), torch.device("cpu")))
    for number, (d, base, layout) in enumerate(itertools.product(widths, ("e", "2"), names)):
        lse_layout, own, lse_dtype = names[(number * 4 + 1) % 9], number % n, DTYPES[number % 3]
        with findings.case(dtype, f"N={n} D={d} base {base} own", own, layout, "lse", lse_dtype, lse_layout):
            case = Arrived(
                rig, dtype, n, 5, 3, d, own, layout=layout, lse_layout=lse_layout, own_lse_dtype=lse_dtype,
                gap=48 * (number % 2),
            )  # fmt: skip
            out, lse = case.merge(base)
            assert not case.record.any(), "headers are equal, but a record was written"
            case.judge(out, lse, base)
            for vectors, generic in ((None, True), (False, False), (False, True)):
                again, again_lse = case.merge(base, vectors, generic)
                assert same_bits(again, out), f"other bits with vectors={vectors} generic={generic}"
                assert same_bits(again_lse, lse), f"other LSE bits with vectors={vectors} generic={generic}"
            for rows in (1, 2, 4):
                fewer, fewer_lse = case.merge(base, rows=rows)
                assert same_bits(fewer, out[:rows]), f"a row's bits depend on B (B={rows})"
                assert same_bits(fewer_lse, lse[:rows])
            views = layouts(torch.zeros(5, 3, d, dtype=dtype), rig.device) if layout == names[number // 9 % 9] else {}
            for name, view in views.items():
                strided, _ = case.merge_into(view, base, None, False, False)
                assert same_bits(strided, out), f"into a result that is {name}"
    findings.report()


def check_combine_counts(rig: Rig, dtype: torch.dtype) -> None:
    """A group of one: no pack has looked at the counts, so combine does."""
    findings = Findings()
    t, h, d = 19, 2, 32
    for name, counts in count_forms(rig, t).items():
        values, lse = rig.randn(1, t, h, d, dtype=dtype), rig.randn(1, t, h)
        empty = counts.empty(t)
        values[0, empty] = torch.nan
        with findings.case(dtype, name):
            rows, lses = values.to(rig.device), lse.to(rig.device)
            out, out_lse = rig.poisoned((t, h, d), dtype), rig.poisoned((t, h), torch.float32)
            given = on(rig, counts)  # kept: params hold addresses alone
            params = combine_params(
                rows, lses, out, out_lse, "e", own=0, own_rows=rows[0], own_lse=lses[0], counts=counts_of(given)
            )
            rig.kernels(dtype, 1).combine(rig.stream, params)
            rig.sync()
            assert same_bits(out.cpu(), torch.where(empty.view(-1, 1, 1), 0.0, values[0]).to(dtype))
            assert torch.equal(out_lse.cpu(), torch.where(empty.view(-1, 1), -torch.inf, lse[0]))
    findings.report()


def check_headers(rig: Rig, dtype: torch.dtype, n: int, t: int = 9) -> None:
    """Each word of each source's header: where it differs, all of the result is NaN, and the first record stays."""
    findings = Findings()
    for source, word, vectors in itertools.product({0, n - 1}, range(4), (True, False)):
        own = 1 % n if source != 1 % n else 0
        if source == own:
            continue
        with findings.case(dtype, f"N={n} source {source} word {word} vectors={vectors}"):
            case = Arrived(rig, dtype, n, t, 4, 64, own)
            views = case.blocks.on_cpu()
            views.words[source, word] ^= 1 << 5
            case.blocks.fill(views)
            out, lse = case.merge("e", vectors)
            assert bool((bits(out) == -1).all()), "not all of the result is NaN"
            assert bool(lse.isnan().all())
            mine = list(case.header.words())
            assert case.record[:5].tolist() == [1, *mine], case.record[:5].tolist()
            came = case.record[5:].view(n, 4)
            want = torch.tensor(mine).repeat(n, 1)
            want[source, word] ^= 1 << 5
            assert torch.equal(came, want), came.tolist()
            case.record[1:] = 5
            case.merge("e", vectors)
            assert bool((case.record[1:] == 5).all()), "a record not yet read was overwritten"
    findings.report()


def check_halves(rig: Rig, dtype: torch.dtype) -> None:
    """All 65,536 halves survive both conversions; rounding is to the nearest even, as torch has it."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(1, 64, 1, 1024)
    got, _ = plain_merge(rig, every, torch.zeros(1, 64, 1), dtype)
    finite = every[0] == every[0]
    # From +0, by a fused multiply-add: the sign of a zero is lost.
    assert same_bits(torch.where(every[0] == 0, every[0].abs(), every[0])[finite], got[finite])
    assert bool(got[~finite].isnan().all())
    rows = torch.stack([every[0], every[0].flatten()[torch.randperm(1 << 16, generator=rig.rng)].view(64, 1, 1024)])
    for vectors in (True, False):
        got, _ = plain_merge(rig, rows, torch.zeros(2, 64, 1), dtype, vectors)
        want = (rows[0].float() * 0.5 + rows[1].float() * 0.5).to(dtype)
        same = (got == want) | (got.isnan() & want.isnan())
        assert bool(same.all()), f"{int((~same).sum())} halves are rounded otherwise, vectors={vectors}"


def plain_merge(rig: Rig, rows: Any, lses: Any, dtype: torch.dtype, vectors: bool | None = None) -> Any:
    """(out, LSE) on CPU of `[N, t, h, D]` with neither wire nor own rows."""
    n, t, h, d = rows.shape
    there, lses = rows.to(rig.device), lses.to(rig.device)
    out, out_lse = rig.poisoned((t, h, d), dtype), rig.poisoned((t, h), torch.float32)
    rig.kernels(dtype, n).bind_combine(combine_params(there, lses, out, out_lse, "e"), vectors)(rig.stream)
    rig.sync()
    return out.cpu(), out_lse.cpu()


def check_big_combine(rig: Rig, dtype: torch.dtype, n: int, t: int, h: int, d: int) -> None:
    """More rows than one grid holds, and the same bits as each of them alone."""
    rows, lses = rig.randn(n, t, h, d, dtype=dtype), any_lse(rig, n, t, h)
    out, lse = plain_merge(rig, rows, lses, dtype)
    for at in (0, t // 2, t - 1):
        alone, alone_lse = plain_merge(rig, rows[:, at : at + 1], lses[:, at : at + 1], dtype)
        assert same_bits(alone[0], out[at]), f"row {at} depends on the rows beside it"
        assert same_bits(alone_lse[0], lse[at])
    want, want_lse = dcpcomm.reference.merge_partials(rows, lses, lse_base="e", scatter="none")
    bound = 1e-6 * rows.double().abs().amax(0) + (0 if dtype == torch.float32 else ulp(want[0], dtype))
    assert bool(((out.double() - want[0]).abs() <= bound + 1e-30).all())
    torch.testing.assert_close(lse.double(), want_lse[0], rtol=3e-6, atol=3e-6)


def check_extremes(rig: Rig) -> None:
    """LSEs at the ends of float32, weights that underflow, rows near the float16 limit, and NaN where it counts."""
    top = torch.finfo(torch.float32).max
    lses = torch.tensor([[top, -top], [-top, -top], [0.0, -200.0], [88.0, 88.0], [-1e30, -1e30], [5e-39, 0.0]]).T
    lses = lses.reshape(2, 6, 1).contiguous()
    rows = torch.full((2, 6, 1, 8), 65504.0, dtype=torch.float16)
    out, lse = plain_merge(rig, rows, lses, torch.float16)
    assert bool((out == 65504.0).all()), "a sum overflowed before it was normalised"
    _, want_lse = dcpcomm.reference.merge_partials(rows, lses, lse_base="e", scatter="none")
    torch.testing.assert_close(lse.double(), want_lse[0], rtol=3e-6, atol=3e-6)
    rows[1, 2] = torch.nan  # 200 below: its weight underflows, so it must not be looked at
    rows[1, 3] = torch.nan  # as heavy as the other: the result is NaN, not a number made up
    out, _ = plain_merge(rig, rows, lses, torch.float16)
    assert bool((out[2] == 65504.0).all())
    assert bool(out[3].isnan().all())


def check_halved_float32(rig: Rig) -> None:
    """float32 rows and LSEs at addresses that are only multiples of 2, which torch can't make but a C++ engine can."""
    n, t, h, d = 2, 3, 2, 20
    values, lse = rig.randn(n, t, h, d), any_lse(rig, n, t, h)
    values[~(lse < torch.inf) | (lse == -torch.inf)] = torch.nan

    def two_bytes_in(tensor: torch.Tensor) -> torch.Tensor:
        raw = tensor.contiguous().view(torch.uint8).flatten()
        return torch.cat([torch.zeros(2, dtype=torch.uint8), raw, torch.zeros(2, dtype=torch.uint8)]).to(rig.device)

    odd_values, odd_lse = two_bytes_in(values), two_bytes_in(lse)
    there, lse_there = values.to(rig.device), lse.to(rig.device)
    images = []
    for odd in (False, True):
        blocks, header, ordinal = Blocks(rig, n, t, h, d, torch.float32), header_for(t, d), ordinal_on(rig, 0)
        params = pack_params(blocks.wire, there, lse_there, 1, header, ordinal.data_ptr())
        if odd:
            params.rows, params.lse, params.lse_kind = odd_values.data_ptr() + 2, odd_lse.data_ptr() + 2, 3
            assert pack_unit(params, 4) == 2
        rig.kernels(torch.float32, n).pack(rig.stream, params)
        rig.sync()
        images.append(blocks.on_cpu().blocks)
    assert torch.equal(*images)

    merged = []
    for odd in (False, True):
        out, out_lse = rig.poisoned((t, h, d), torch.float32), rig.poisoned((t, h), torch.float32)
        room = rig.poisoned((t * h * d + 1,), torch.float32)
        params = combine_params(there, lse_there, out, out_lse, "e")
        if odd:
            params.rows, params.lse, params.lse_kind = odd_values.data_ptr() + 2, odd_lse.data_ptr() + 2, 3
            params.out = room.data_ptr() + 2
            params.rows_unit = params.out_unit = 2
        rig.kernels(torch.float32, n).combine(rig.stream, params)
        rig.sync()
        raw = (room if odd else out).cpu().flatten().view(torch.uint8)
        merged.append((raw[2:-2] if odd else raw, out_lse.cpu()))
    assert torch.equal(merged[0][0], merged[1][0])
    assert same_bits(merged[0][1], merged[1][1])
