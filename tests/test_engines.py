"""The two CPU engines: native.c and torch operations. Each against the oracle, and against each other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import dcpcomm
from dcpcomm.combine import native, torch_engine
from dcpcomm.combine.engine import Engine, Layout, Partials
from dcpcomm.combine.wire import Header, row_bytes, wire_views
from dcpcomm.testing import LoopbackWorld
from tests.oracle import judge, make_case, same_bits, ulp

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
compiled = pytest.mark.skipif(native.library is None, reason="native.c was not compiled: no C compiler at installation")

ENGINES = [
    pytest.param(native.NativeEngine, id="native", marks=compiled),
    pytest.param(torch_engine.TorchEngine, id="torch"),
]


def combined(
    engine: type[Engine], outs: torch.Tensor, lses: torch.Tensor, base: Any, want_lse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`outs [N, t, h, D]` and `lses [N, t, h]` merged by `engine` into poisoned memory."""
    n, t, h, d = outs.shape
    shape = dcpcomm.MergeShape(max_tokens=t, num_heads=h, head_dim=d, dtype=outs.dtype, lse_base=base, scatter="none")
    out = torch.full((t, h, d), torch.nan, dtype=outs.dtype)
    out_lse = torch.full((t, h), torch.nan)
    engine(shape, 0, n).combine(outs, lses, out, out_lse if want_lse else None)
    return out, out_lse


def odd_lses(n: int, t: int, h: int, dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    """LSEs with every kind of emptiness, and some far below the others."""
    lses = torch.randn(n, t, h, generator=rng) * 4
    kind = torch.randint(0, 12, lses.shape, generator=rng)
    for value, which in ((torch.nan, 0), (torch.inf, 1), (-torch.inf, 2), (-200.0, 3)):
        lses[kind == which] = value
    lses[:, 0] = -torch.inf  # a row that is empty everywhere
    return lses.to(dtype)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("base", ["e", "2"])
def test_each_engine_is_the_oracle(engine: type[Engine], dtype: torch.dtype, base: str, rng: torch.Generator) -> None:
    for n, (t, h, d), lse_dtype in itertools.product((1, 2, 3, 8), ((1, 1, 1), (5, 3, 80), (2, 4, 576)), DTYPES):
        outs = torch.randn(n, t, h, d, generator=rng).to(dtype)
        lses = odd_lses(n, t, h, lse_dtype, rng)
        outs[~(lses.float() < torch.inf) | (lses == -torch.inf)] = torch.nan  # what an empty row holds isn't looked at
        got, got_lse = combined(engine, outs, lses, base, want_lse=True)
        want, want_lse = dcpcomm.reference.merge_partials(outs, lses.float(), lse_base=base, scatter="none")
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
        one, _ = combined(native.NativeEngine, outs, lses, "e")
        other, _ = combined(torch_engine.TorchEngine, outs, lses, "e")
        # Their exp2 differ by a unit in the last place each way; the sums of these, the reciprocal and the product by
        # one more each: five units of sum w|out|. Of 4,500 merges the worst came to 2.8.
        weighted = (lses.double().softmax(0)[..., None] * outs.double().abs()).sum(0)
        bound = 5 * 2.0**-23 * weighted + (0 if dtype == torch.float32 else ulp(other.double(), dtype))
        assert bool(((one.double() - other.double()).abs() <= bound).all())


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_survives_both_conversions(dtype: torch.dtype) -> None:
    """All 65,536 of them, through a merge of one source: load, times one, store."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(1, 64, 1024)
    got, _ = combined(native.NativeEngine, every.unsqueeze(0), torch.zeros(1, 1, 64), "e")
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
        got, _ = combined(native.NativeEngine, rows, torch.zeros(2, 1, 1), "e")
        want = (rows[0].float() * 0.5 + rows[1].float() * 0.5).to(dtype)
        same = (got == want) | (got.isnan() & want.isnan())
        assert bool(same.all()), (got[~same][:5], want[~same][:5])


def layouts(rng: torch.Generator, b: int, heads: int, d: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same `[B, H, D]`, laid out in several ways."""
    whole = torch.randn(b, heads, d, generator=rng).to(dtype)
    padded = torch.randn(b, heads + 3, d, generator=rng).to(dtype)
    padded[:, :heads] = whole
    wide = torch.randn(b, heads, 2 * d, generator=rng).to(dtype)
    wide[..., ::2] = whole
    odd = torch.randn(b * heads * d + 1, generator=rng).to(dtype)
    odd[1:] = whole.flatten()
    return {
        "contiguous": whole,
        "padded heads": padded[:, :heads],
        "head-major": whole.transpose(0, 1).contiguous().transpose(0, 1),
        "columns outside": whole.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "last stride 2": wide[..., ::2],
        "odd offset": odd[1:].view(b, heads, d),
    }


@pytest.mark.parametrize("scatter", ["heads", "tokens", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_pack_the_same_bytes_whatever_the_strides(scatter: Any, dtype: torch.dtype, rng: torch.Generator) -> None:
    n, b, heads, d, rank = 3, 6, 6, 24, 1
    shape = dcpcomm.MergeShape(max_tokens=b, num_heads=heads, head_dim=d, dtype=dtype, lse_base="e", scatter=scatter)
    t, h = shape.result_rows(b, n)
    lse = torch.randn(b, heads + 1, generator=rng).to(torch.bfloat16)[:, :heads]
    start, part = 1, t - 1  # a chunk
    header = Header(ordinal=3, tag=-5, tokens=b, chunk=0, width=d)
    images = []
    for name, partial in layouts(rng, b, heads, d, dtype).items():
        partials = Partials(partial, lse, None)
        want, want_lse = partials.part(scatter, n, start, part)
        for engine in (native.NativeEngine, torch_engine.TorchEngine):
            if engine is native.NativeEngine and native.library is None:
                continue
            region = torch.zeros(n * (1 + part * h) * row_bytes(d, dtype.itemsize), dtype=torch.uint8)
            send, _ = wire_views(region, region, n, part, h, d, dtype, False)
            layout = Layout(b, part, d, partial.stride(), lse.stride(), lse.dtype)
            engine(shape, rank, n).packed_call(0, layout, send, send).pack(partials, start, header)
            for other in (0, 2):
                assert tuple(send.words[other]) == header.words()
                assert same_bits(send.payload[other].contiguous(), want[other].contiguous()), name
                assert torch.equal(send.lse[other], want_lse[other].float()), name
        images.append(torch.cat([send.blocks[0].flatten(), send.blocks[2].flatten()]))
    assert len(images) == 6
    assert all(same_bits(image, images[0]) for image in images)


@pytest.mark.parametrize("engine", ENGINES)
def test_combine_takes_and_fills_any_strides(engine: type[Engine], rng: torch.Generator) -> None:
    n, t, h, d = 2, 4, 3, 24
    lses = torch.randn(n, t, h, generator=rng)
    shape = dcpcomm.MergeShape(
        max_tokens=t, num_heads=h, head_dim=d, dtype=torch.bfloat16, lse_base="2", scatter="none"
    )
    by_name = layouts(rng, n * t, h, d, torch.bfloat16)
    want, _ = combined(engine, by_name["contiguous"].view(n, t, h, d), lses, "2")
    for name, outs in by_name.items():
        got, _ = combined(engine, outs.unflatten(0, (n, t)), lses, "2")
        assert same_bits(got, want), name
    for name, into in layouts(rng, t, h, d, torch.bfloat16).items():
        engine(shape, 0, n).combine(by_name["contiguous"].view(n, t, h, d), lses, into, None)
        assert same_bits(into.contiguous(), want), name


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_depends_on_nothing_but_itself(engine: type[Engine], rng: torch.Generator) -> None:
    """Batch invariance: what other rows hold, empty ones included, changes no bit of this one. Torch's exp2 rounds the
    last numbers of a tensor by another routine, so there it may change the last bit.
    """
    outs, lses = torch.randn(3, 6, 2, 64, generator=rng), torch.randn(3, 6, 2, generator=rng)
    alone, _ = combined(engine, outs[:, :1], lses[:, :1], "e")
    lses[1, 3:], outs[1, 3:] = -torch.inf, torch.nan
    together, _ = combined(engine, outs, lses, "e")
    if engine is torch_engine.TorchEngine:
        torch.testing.assert_close(alone[0], together[0], rtol=1e-6, atol=1e-6)
    else:
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
    assert all("torch operations" in said for said, _ in answers)
    judge([merged for _, merged in answers], case)
