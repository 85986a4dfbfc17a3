"""The two CPU engines: native.c and torch operations. Each against the oracle, and against each other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import dcpcomm
from dcpcomm.combine import native, torch_engine
from dcpcomm.combine.wire import Header, row_bytes, wire_views
from dcpcomm.testing import LoopbackWorld
from tests.oracle import judge, make_case, same_bits, ulp

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
compiled = pytest.mark.skipif(native.library is None, reason="native.c was not compiled: no C compiler at installation")

ENGINES = [
    pytest.param(native.combine, id="native", marks=compiled),
    pytest.param(torch_engine.combine, id="torch"),
]


def odd_lses(n: int, t: int, h: int, dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    """LSEs with every kind of emptiness, and some far below the others."""
    lses = torch.randn(n, t, h, generator=rng) * 4
    kind = torch.randint(0, 12, lses.shape, generator=rng)
    for value, which in ((torch.nan, 0), (torch.inf, 1), (-torch.inf, 2), (-200.0, 3)):
        lses[kind == which] = value
    lses[:, 0] = -torch.inf  # a row that is empty everywhere
    return lses.to(dtype)


@pytest.mark.parametrize("combine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("base", ["e", "2"])
def test_each_engine_is_the_oracle(combine: Any, dtype: torch.dtype, base: str, rng: torch.Generator) -> None:
    for n, (t, h, d), lse_dtype in itertools.product((1, 2, 3, 8), ((1, 1, 1), (5, 3, 80), (2, 4, 576)), DTYPES):
        outs = torch.randn(n, t, h, d, generator=rng).to(dtype)
        lses = odd_lses(n, t, h, lse_dtype, rng)
        outs[~(lses.float() < torch.inf) | (lses == -torch.inf)] = torch.nan  # what an empty row holds isn't looked at
        got, got_lse = combine(list(outs), list(lses), base, dtype, True)
        want, want_lse = dcpcomm.reference.merge_partials(outs, lses.float(), lse_base=base, scatter="none")
        assert got.dtype == dtype
        assert got.is_contiguous()
        weight = outs.double().nan_to_num().abs().amax(0)
        bound = 1e-6 * weight + (0 if dtype == torch.float32 else ulp(want[0], dtype))
        assert bool(((got.double() - want[0]).abs() <= bound + 1e-30).all())
        assert bool((got[0] == 0).all()), "a row empty everywhere is 0"
        torch.testing.assert_close(got_lse.double(), want_lse[0], rtol=1e-5, atol=1e-5)


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_engines_agree_to_an_ulp(dtype: torch.dtype, rng: torch.Generator) -> None:
    for n in (1, 2, 5):
        outs, lses = torch.randn(n, 7, 4, 64, generator=rng).to(dtype), torch.randn(n, 7, 4, generator=rng)
        one, _ = native.combine(list(outs), list(lses), "e", dtype, False)
        other, _ = torch_engine.combine(list(outs), list(lses), "e", dtype, False)
        bound = 2e-7 * outs.double().abs().amax(0) + (0 if dtype == torch.float32 else ulp(other.double(), dtype))
        assert bool(((one.double() - other.double()).abs() <= bound).all())


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_survives_both_conversions(dtype: torch.dtype) -> None:
    """All 65,536 of them, through a merge of one source: load, times one, store."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(1, 64, 1024)
    got, _ = native.combine([every], [torch.zeros(1, 64)], "e", dtype, False)
    finite = every == every
    # From +0, by a fused multiply-add: the sign of a zero is lost, as the canonical arithmetic loses it.
    assert same_bits(torch.where(every == 0, every.abs(), every)[finite], got[finite])
    assert bool(got[~finite].isnan().all())


@compiled
def test_rounding_to_half_is_to_the_nearest_even(rng: torch.Generator) -> None:
    """Against torch's own conversion, over all exponents, subnormals and overflow included."""
    bits = torch.randint(0, 2**31, (1 << 20,), generator=rng).to(torch.int32)
    wide = torch.where(torch.rand(bits.shape, generator=rng) < 0.5, bits, -bits - 1).view(torch.float32)
    wide = wide[wide.isfinite()][: 1 << 19]
    # A source of weight 1/2 and twice the value gives the value itself, exactly, in float32.
    for dtype in (torch.float16, torch.bfloat16):
        narrow = wide.to(dtype)
        rows = torch.stack([narrow, narrow.roll(1)]).view(2, 1, 1, -1)
        got, _ = native.combine(list(rows), list(torch.zeros(2, 1, 1)), "e", dtype, False)
        want = (rows[0].float() * 0.5 + rows[1].float() * 0.5).to(dtype)
        same = (got == want) | (got.isnan() & want.isnan())
        assert bool(same.all()), (got[~same][:5], want[~same][:5])


def layouts(rng: torch.Generator, n: int, t: int, h: int, d: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    whole = torch.randn(n, t, h, d, generator=rng).to(dtype)
    padded = torch.randn(n, t, h + 3, d, generator=rng).to(dtype)
    padded[:, :, :h] = whole
    wide = torch.randn(n, t, h, 2 * d, generator=rng).to(dtype)
    wide[..., ::2] = whole
    return {
        "contiguous": whole,
        "padded heads": padded[:, :, :h],
        "head-major": whole.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        "destination inside": whole.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3),
        "last stride 2": wide[..., ::2],
        "one row for all": whole[:, :1].expand(n, t, h, d),
    }


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_pack_the_same_bytes_whatever_the_strides(dtype: torch.dtype, rng: torch.Generator) -> None:
    n, t, h, d, rank = 3, 4, 2, 24, 1
    lse = torch.randn(n, t, h + 1, generator=rng).to(torch.bfloat16)[:, :, :h]
    header = Header(ordinal=3, tag=-5, tokens=4, chunk=0, width=d)
    for name, partial in layouts(rng, n, t, h, d, dtype).items():
        images = []
        for engine in (native, torch_engine):
            if engine is native and not native.can_pack(partial, lse):
                assert name == "last stride 2"
                continue
            region = torch.zeros(n * (1 + t * h) * row_bytes(d, dtype.itemsize), dtype=torch.uint8)
            send, _ = wire_views(region, region, n, t, h, d, dtype, False)
            engine.pack(send, partial, lse, rank, header)
            assert tuple(send.words[0]) == tuple(send.words[2]) == header.words()
            assert same_bits(send.payload[0].contiguous(), partial[0].contiguous())
            others = torch.cat([send.blocks[0].flatten(), send.blocks[2].flatten()])
            images.append(others)
        assert all(torch.equal(image, images[0]) for image in images), name


@pytest.mark.parametrize("combine", ENGINES)
def test_combine_takes_any_strides(combine: Any, rng: torch.Generator) -> None:
    by_name = layouts(rng, 2, 4, 2, 24, torch.bfloat16)
    lses = torch.randn(2, 4, 2, generator=rng)
    want, _ = combine(list(by_name["contiguous"]), list(lses), "2", torch.bfloat16, False)
    for name, outs in by_name.items():
        if name != "one row for all":
            got, _ = combine(list(outs), list(lses), "2", torch.bfloat16, False)
            assert same_bits(got, want), name


@pytest.mark.parametrize("combine", ENGINES)
def test_a_row_depends_on_nothing_but_itself(combine: Any, rng: torch.Generator) -> None:
    """Batch invariance: what other rows hold, empty ones included, changes no bit of this one."""
    outs, lses = torch.randn(3, 6, 2, 64, generator=rng), torch.randn(3, 6, 2, generator=rng)
    alone, _ = combine([one[:1] for one in outs], [one[:1] for one in lses], "e", torch.float32, False)
    lses[1, 3:], outs[1, 3:] = -torch.inf, torch.nan
    together, _ = combine(list(outs), list(lses), "e", torch.float32, False)
    assert same_bits(alone[0], together[0])


def merges(group: Any, case: Any) -> Any:
    shape = dcpcomm.MergeShape(max_tokens=8, num_heads=8, head_dim=32, dtype=torch.bfloat16, lse_base="e")
    with dcpcomm.DCPMerger(group, shape, {"transport": "loopback"}) as merger:
        said = merger.explain()
        merged = merger.merge(case.outs[group.rank], case.lses[group.rank], return_lse=True)
        return said, merged


def test_without_a_compiler_torch_serves_and_explain_says_so(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "library", None)
    case = make_case(rng, 2, b=11)
    answers = LoopbackWorld(2).run(merges, case)
    assert all("torch operations (native.c was not compiled)" in said for said, _ in answers)
    judge([merged for _, merged in answers], case)
