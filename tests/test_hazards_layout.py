"""Rows 14 to 17 and 20 of the list of faults: where values lie in memory, and whose memory it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.oracle import NAN, Case, judge, make_case, same_bits, shares
from tests.steps import LAYOUTS, Step, contiguous, merge_steps, step_results
from tests.world import AT_ONCE_S, World, merger_for, outcome, rank_of, size_of

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(("dtype", "d"), [(BF16, 40), (F16, 32), (F32, 33), (BF16, 33)], ids=str)
def test_any_layout_gives_the_same_bits(world: World, rng: torch.Generator, dtype: torch.dtype, d: int) -> None:
    """Row 14: every layout of out and of LSE, another one on each rank; the wire knows nothing of them."""
    n, names = world.n, list(LAYOUTS)
    case = make_case(rng, n, b=7, d=d, dtype=dtype)
    case.outs[0, 3], case.lses[0, 3] = NAN, -torch.inf
    steps = [Step(case, {"return_lse": True})]
    for i in range(len(names)):
        mixed = [names[(i + r) % len(names)] for r in range(n)]
        lse = [names[(3 * i + 2 * r + 1) % len(names)] for r in range(n)]
        steps.append(Step(case, {"return_lse": True}, layouts=mixed, lse_layouts=lse))
    first, *others = step_results(world.run(merge_steps, {"dtype": dtype, "head_dim": d}, steps))
    judge(first, case)
    for step, results in zip(steps[1:], others, strict=True):
        for rank, (want, got) in enumerate(zip(first, results, strict=True)):
            what = f"rank {rank}, layouts {step.layouts} and {step.lse_layouts}"
            assert same_bits(got[0], want[0]), what
            assert same_bits(got[1], want[1]), what


def broadcast_views(group: Any, case: Case) -> Any:
    rank = rank_of(group)
    b, h, d = case.outs.shape[1:]
    with merger_for(group, {"dtype": F32}) as merger:
        wide = merger.merge(case.outs[rank, :, :1].expand(b, h, d), case.lses[rank, :1].expand(b, h))
        flat = merger.merge(case.outs[rank, :, :, :1].expand(b, h, d), case.lses[rank, :, :1].expand(b, h))
        return wide, flat


def test_strides_of_zero_are_strides(world: World, rng: torch.Generator) -> None:
    """Row 14: an expanded view has fewer elements in storage than it shows."""
    case = make_case(rng, world.n, b=5, dtype=F32)
    wide = Case(case.outs[:, :, :1].expand_as(case.outs), case.lses[:, :1].expand_as(case.lses))
    flat = Case(case.outs[..., :1].expand_as(case.outs), case.lses[:, :, :1].expand_as(case.lses))
    results = step_results(world.run(broadcast_views, case))
    judge(results[0], wide)
    judge(results[1], flat)


@pytest.mark.parametrize(
    ("backend", "n", "h"),
    [
        *[(backend, n, 66) for backend in ("gloo_a2a", "loopback") for n in (2, 3)],
        *[(backend, 4, 64) for backend in ("gloo_a2a", "loopback")],
        ("loopback", 6, 66),
        ("loopback", 8, 64),
    ],
)
def test_heads_that_are_no_power_of_two(pool: Any, rng: torch.Generator, backend: str, n: int, h: int) -> None:
    """Row 15: H=66; and a view of H=64 heads where 66 are stored."""
    case = make_case(rng, n, b=3, h=h)
    by_rank = World(backend, n, pool).run(padded_to_66, case)
    judge(by_rank, case)


def padded_to_66(group: Any, case: Case) -> Any:
    rank, h = rank_of(group), case.outs.shape[2]
    outs, lses = torch.full((3, 66, 32), NAN, dtype=BF16), torch.full((3, 66), 9.0)
    outs[:, :h], lses[:, :h] = case.outs[rank], case.lses[rank]
    with merger_for(group, {"num_heads": h}) as merger:
        return merger.merge(outs[:, :h], lses[:, :h], return_lse=True)


def test_heads_and_tokens_land_where_they_belong(peers: World) -> None:
    """Row 17: value = head + 1000 * source, equal LSEs; any permutation shows."""
    n = peers.n
    b, h, d = 2 * n, 16 * n, 8
    source, head = torch.arange(n).view(n, 1, 1, 1), torch.arange(h).view(1, 1, h, 1)
    heads = (head + 1000.0 * source).expand(n, b, h, d).contiguous()
    token, column = torch.arange(b).view(1, b, 1, 1), torch.arange(d).view(1, 1, 1, d)
    others = (token + 100.0 * column + 1000.0 * source).expand(n, b, h, d).contiguous()
    lses = torch.full((n, b, h), 0.7)
    for scatter in ("heads", "tokens", "none"):
        shape = {"num_heads": h, "head_dim": d, "dtype": F32, "scatter": scatter}
        steps = [Step(Case(outs, lses)) for outs in (heads, others)]
        by_step = step_results(peers.run(merge_steps, shape, steps))
        for outs, results in zip((heads, others), by_step, strict=True):
            want = shares(outs[0] + 1000 * (n - 1) / 2, n, scatter)
            for rank in range(n):
                if n != 3:  # 1/2 and 1/4 are exact in float32
                    assert torch.equal(results[rank], want[rank]), f"rank {rank} scatter {scatter}"
                torch.testing.assert_close(results[rank], want[rank], rtol=1e-6, atol=1e-3)


def wrong_arguments(group: Any, case: Case) -> Any:
    rank = rank_of(group)
    out, lse = case.outs[rank], case.lses[rank]
    result = torch.full((out.shape[0], 4, 32), NAN, dtype=BF16)
    wrong: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "heads": ((out[:, 1:], lse[:, 1:]), {}),
        "head_dim": ((out[..., 1:], lse), {}),
        "dtype": ((out.to(F16), lse), {}),
        "device": ((out.to("meta"), lse), {}),
        "lse device": ((out, lse.to("meta")), {}),
        "axes": ((out[0], lse), {}),
        "lse rows": ((out, lse[1:]), {}),
        "lse heads": ((out, lse[:, 1:]), {}),
        "lse axes": ((out, lse.unsqueeze(-1)), {}),
        "lse integer": ((out, lse.to(torch.int32)), {}),
        "no tensor": ((None, lse), {}),
        "channel past the last": ((out, lse), {"channel": 1}),
        "channel negative": ((out, lse), {"channel": -1}),
        "out rows": ((out, lse), {"out": result[1:]}),
        "out heads": ((out, lse), {"out": result[:, 1:]}),
        "out dtype": ((out, lse), {"out": result.to(F16)}),
        "out device": ((out, lse), {"out": result.to("meta")}),
    }
    with merger_for(group) as merger:
        raised = {name: outcome(merger.merge, *args, **kw) for name, (args, kw) in wrong.items()}
        return raised, merger.merge(out, lse)


#: what each message must say: the argument, what came, what was expected
SAYS = {
    "heads": ("partial_out", "{h1}", "{h}"),
    "head_dim": ("partial_out", "31", "32"),
    "dtype": ("partial_out", "float16", "bfloat16"),
    "device": ("partial_out", "meta", "cpu"),
    "lse device": ("partial_lse", "meta", "cpu"),
    "axes": ("partial_out",),
    "lse rows": ("partial_lse", "6", "7"),
    "lse heads": ("partial_lse", "{h1}", "{h}"),
    "lse axes": ("partial_lse",),
    "lse integer": ("partial_lse", "int32", "float32"),
    "no tensor": ("partial_out",),
    "channel past the last": ("channel", "1"),
    "channel negative": ("channel", "-1"),
    "out rows": ("out", "6", "7"),
    "out heads": ("out", "3", "4"),
    "out dtype": ("out", "float16", "bfloat16"),
    "out device": ("out", "meta", "cpu"),
}


def test_wrong_arguments_are_named_with_what_came_and_what_was_expected(world: World, rng: torch.Generator) -> None:
    """Row 16, wrong on all ranks alike: found before anything is sent, so that the next call works."""
    case = make_case(rng, world.n, b=7)
    h = 4 * world.n
    results = world.run(wrong_arguments, case)
    for raised, _ in results:
        for name, error in raised.items():
            assert hasattr(error, "kinds"), f"{name}: was accepted"
            assert "ShapeError" in error.kinds, f"{name}: {error.trace}"
            for word in SAYS[name]:
                assert word.format(h=h, h1=h - 1) in error.text, f"{name}: {word!r} is not in {error.text!r}"
            assert error.seconds < AT_ONCE_S, name
    judge([good for _, good in results], case)


def bad_heads(group: Any) -> Any:
    return outcome(merger_for, group, {"num_heads": 7 * size_of(group) + 1})


def test_heads_that_do_not_divide_are_refused_naming_both(peers: World) -> None:
    """Row 16: ShapeError at construction, on every rank, none waits."""
    for error in peers.run(bad_heads):
        assert "ShapeError" in error.kinds
        assert error.names(7 * peers.n + 1, peers.n)
        assert error.seconds < AT_ONCE_S


def between_canaries(group: Any, cases: list[Case], scatter: str, max_tokens: int) -> Any:
    """Merges whose inputs and `out` lie between canaries; returns the results, and what was hit."""
    rank, n = rank_of(group), size_of(group)
    results, hits = [], []
    with merger_for(group, {"max_tokens": max_tokens, "scatter": scatter, "dtype": F32}) as merger:
        for case in cases:
            b, h, d = case.outs.shape[1:]
            rows = {"heads": (b, h // n, d), "tokens": (b // n, h, d), "none": (b, h, d)}[scatter]
            fenced = [_fence(case.outs[rank]), _fence(case.lses[rank]), _fence(torch.full(rows, NAN))]
            partial, lse, out = (view for _, view in fenced)
            before = [storage.clone() for storage, _ in fenced]
            got = merger.merge(partial, lse, out=out)
            assert got is out or got.data_ptr() == out.data_ptr()
            results.append(contiguous(got))
            out.copy_(before[2][64:-64].view(rows))  # put NaN back: all else must be as it was
            hits += [i for i, (storage, _) in enumerate(fenced) if not same_bits(storage, before[i])]
    return results, hits


def _fence(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    storage = torch.full((x.numel() + 128,), -1.25)
    view = storage[64:-64].view(x.shape)
    view.copy_(x)
    return storage, view


@pytest.mark.parametrize("scatter", ["heads", "tokens", "none"])
def test_nothing_is_written_past_a_buffer(world: World, rng: torch.Generator, scatter: str) -> None:
    """Row 20: B = max_tokens - 2 .. + 2 (in steps of N for token scatter)."""
    n, most = world.n, 12
    step = n if scatter == "tokens" else 1
    cases = [make_case(rng, n, b=most + k * step, dtype=F32) for k in range(-2, 3)]
    by_rank, heard = world.run_counting_warnings(between_canaries, cases, scatter, most)
    assert [hits for _, hits in by_rank] == [[]] * n, "0: partial_out, 1: partial_lse, 2: around out"
    for i, results in enumerate(step_results([r for r, _ in by_rank])):
        judge(results, cases[i], scatter, f"B={cases[i].outs.shape[1]}")
    assert len(heard) <= n


def strided_out(group: Any, case: Case, scatter: str) -> Any:
    rank, n = rank_of(group), size_of(group)
    b, h, d = case.outs.shape[1:]
    rows = {"heads": (b, h // n, d), "tokens": (b // n, h, d), "none": (b, h, d)}[scatter]
    results = []
    with merger_for(group, {"scatter": scatter}) as merger:
        for layout in LAYOUTS.values():
            out = layout(torch.full(rows, NAN, dtype=BF16))
            got, lse = merger.merge(case.outs[rank], case.lses[rank], out=out, return_lse=True)
            assert got is out or (got.data_ptr() == out.data_ptr() and got.stride() == out.stride())
            results.append((contiguous(got), lse))
    return results


@pytest.mark.parametrize("scatter", ["heads", "tokens", "none"])
def test_out_may_be_any_view(world: World, rng: torch.Generator, scatter: str) -> None:
    """Section 5: `out` may be any view of the result's shape and dtype, and is what is returned."""
    case = make_case(rng, world.n, b=2 * world.n)
    case.outs[:, 0], case.lses[:, 0] = NAN, NAN  # empty rows are written as well: zero
    for results, layout in zip(step_results(world.run(strided_out, case, scatter)), LAYOUTS, strict=True):
        judge(results, case, scatter, layout)


def overlapping(group: Any, case: Case) -> Any:
    rank, n = rank_of(group), size_of(group)
    b, h, d = case.outs.shape[1:]
    own = h // n
    pool = torch.full((2 * b * h * d,), NAN, dtype=BF16)
    inside = pool[: b * h * d].view(b, h, d)
    inside.copy_(case.outs[rank])
    counts = torch.full((b,), 3, dtype=torch.int32)
    over_lse = torch.full((b * own * d,), NAN, dtype=BF16)
    lse_inside = over_lse.view(F32)[: b * h].view(b, h) if own * d >= 2 * h else None
    errors = {}
    with merger_for(group) as merger:
        errors["a slice of partial_out"] = outcome(
            merger.merge, inside, case.lses[rank], out=inside[:, :own], valid_counts=counts
        )
        last = b * h * d - 1
        errors["the last element"] = outcome(
            merger.merge, inside, case.lses[rank], out=pool[last : last + b * own * d].view(b, own, d)
        )
        if lse_inside is not None:
            lse_inside.copy_(case.lses[rank])
            errors["the lse"] = outcome(merger.merge, case.outs[rank], lse_inside, out=over_lse.view(b, own, d))
        assert same_bits(inside, case.outs[rank]), "a refused merge wrote to its input"
        beside = pool[b * h * d :][: b * own * d].view(b, own, d)  # the same storage, but past the input
        return errors, contiguous(merger.merge(inside, case.lses[rank], out=beside))


def test_out_that_overlaps_an_input_is_refused(world: World, rng: torch.Generator) -> None:
    """Section 5; on every rank alike, nothing sent; and one storage is not one tensor."""
    case = make_case(rng, world.n, b=5)
    results = world.run(overlapping, case)
    for errors, _ in results:
        for name, error in errors.items():
            assert "ShapeError" in getattr(error, "kinds", ()), f"{name}: {error}"
            assert "overlap" in error.text, name
    judge([good for _, good in results], case)


def interleaved(group: Any, case: Case) -> Any:
    rank, n = rank_of(group), size_of(group)
    b, h, d = case.outs.shape[1:]
    storage = torch.full((b, h + h // n, d), NAN, dtype=BF16)
    storage[:, :h] = case.outs[rank]
    with merger_for(group) as merger:
        result = contiguous(merger.merge(storage[:, :h], case.lses[rank], out=storage[:, h:]))
    assert same_bits(storage[:, :h], case.outs[rank])
    return result


def test_out_between_the_rows_of_an_input_is_no_overlap(world: World, rng: torch.Generator) -> None:
    """Section 5: `out` may be any view; interleaved with an input it shares no element with it."""
    case = make_case(rng, world.n, b=5)
    judge(world.run(interleaved, case), case)


def test_ranks_need_not_agree_on_what_is_local(peers: World, rng: torch.Generator) -> None:
    """Section 10: dtype of LSE, form of counts, strides and `out` are each rank's own affair."""
    n = peers.n
    case = make_case(rng, n, b=8)
    dtypes = [F32, F16, BF16, F32]
    for r in range(n):
        case.lses[r] = case.lses[r].to(dtypes[r]).float()
    case.counts = torch.tensor([[5, 0, 3, 1, 0, 0, 2, 2], [1] * 8, [0, 4, 4, 4, 4, 0, 0, 0], [3] * 8])[:n]
    starts = torch.tensor([0, 1, 5, 8], dtype=torch.int32)
    results = peers.run(each_in_its_own_way, case, dtypes, starts)
    judge(results, case)


def each_in_its_own_way(group: Any, case: Case, dtypes: list[torch.dtype], starts: torch.Tensor) -> Any:
    rank = rank_of(group)
    lse = case.lses[rank].to(dtypes[rank])
    kw: dict[str, Any] = {"valid_counts": case.counts[rank].to([torch.int64, torch.int32][rank % 2])}
    if rank == 2:
        kw = {"seq_lens": torch.tensor([0, 4, 0]), "query_start_loc": starts}
    if rank == 1:
        kw["return_lse"] = True
        kw["out"] = torch.full((8, 8, 32), NAN, dtype=BF16)[:, ::2]
    layout = list(LAYOUTS.values())[rank + 1]
    with merger_for(group) as merger:
        return merger.merge(layout(case.outs[rank]), lse, **kw)
