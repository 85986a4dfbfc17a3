"""The promises of `merge` (design, section 5), on CPU. Layouts and `out` are in test_hazards_layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dcpcomm
from tests.oracle import INF, NAN, Case, judge, make_case, merged, same_bits
from tests.steps import Step, contiguous, merge_steps, step_results
from tests.world import World, config_for, meet, merger_for, outcome, rank_of, size_of

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SCATTERS = ["heads", "tokens", "none"]


def with_counts(case: Case, rng: torch.Generator) -> Case:
    """Empty about a third of the rows, poison what they hold."""
    case.counts = torch.randint(0, 3, case.outs.shape[:2], generator=rng)
    case.outs[case.counts == 0] = NAN
    case.lses[case.counts == 0] = 0.25
    return case


@pytest.mark.parametrize("scatter", SCATTERS)
def test_every_scatter_with_and_without_lse_and_counts(world: World, rng: torch.Generator, scatter: str) -> None:
    n = world.n
    plain, counted = make_case(rng, n, b=4 * n), with_counts(make_case(rng, n, b=4 * n), rng)
    steps = [Step(case, {"return_lse": lse}) for case in (plain, counted) for lse in (False, True)]
    by_step = step_results(world.run(merge_steps, {"scatter": scatter}, steps))
    for step, results in zip(steps, by_step, strict=True):
        assert all(isinstance(r, tuple) == step.kw["return_lse"] for r in results)
        judge(results, step.case, scatter)


def pass_through(group: Any, case: Case) -> Any:
    with merger_for(group, {"dtype": BF16}) as merger:
        merger.check()
        clean = merger.merge(case.outs[0], case.lses[0], return_lse=True)
        partial = case.outs[0].clone()
        emptied = merger.merge(partial, case.lses[0], valid_counts=case.counts[0], return_lse=True)
        assert same_bits(partial, case.outs[0]), "empty rows were cleaned in the caller's own tensor"
        return clean, emptied, outcome(merger.reset)


@pytest.mark.parametrize("backend", ["gloo_a2a", "loopback"])
def test_one_rank_passes_through_with_empty_rows_cleaned(pool: Any, rng: torch.Generator, backend: str) -> None:
    case = make_case(rng, 1, b=9, lse_dtype=BF16)
    case.lses[0, 4], case.outs[0, 4] = NAN, INF
    case.lses[0, 5, 1], case.outs[0, 5, 1] = -INF, NAN
    case.counts = torch.tensor([[1, 0, 2, 0, 9, 1, 1, 1, 1]])
    ((clean, emptied, reset),) = World(backend, 1, pool).run(pass_through, case)
    assert reset is None
    uncounted = Case(case.outs, case.lses)
    for (out, lse), wanted in ((clean, uncounted), (emptied, case)):
        judge([(out, lse)], wanted)
        live = merged(wanted)[1] > -INF
        assert same_bits(out[live], case.outs[0][live]), "a live row is passed through bit for bit"
        assert same_bits(lse[live], case.lses[0].float()[live])


# ---------------------------------------------------------------- B


def nothing_to_merge(group: Any, scatter: str, case: Case) -> Any:
    """Rank 0 has its empty results before any other rank has called: a merge that needed peers would wait."""
    rank, n = rank_of(group), size_of(group)
    none = torch.empty(0, 4 * n, 32, dtype=BF16), torch.empty(0, 4 * n)
    with merger_for(group, {"scatter": scatter}) as merger:
        if rank > 0:
            meet()
        plain = merger.merge(*none)
        out = torch.empty_like(plain)
        counts = torch.empty(0, dtype=torch.int32)
        again, lse = merger.merge(*none, valid_counts=counts, return_lse=True, out=out)
        assert again.data_ptr() == out.data_ptr()
        if rank == 0:
            meet()
        return plain, again, lse, merger.merge(case.outs[rank], case.lses[rank])


@pytest.mark.parametrize("scatter", SCATTERS)
def test_no_rows_is_an_empty_result_that_waits_for_nobody(world: World, rng: torch.Generator, scatter: str) -> None:
    n = world.n
    case = make_case(rng, n, b=n)
    results = world.run(nothing_to_merge, scatter, case)
    heads = 4 if scatter == "heads" else 4 * n
    for plain, out, lse, _ in results:
        assert plain.shape == out.shape == (0, heads, 32)
        assert plain.dtype == out.dtype == BF16
        assert (lse.shape, lse.dtype) == ((0, heads), F32)
    judge([r[-1] for r in results], case, scatter)


@pytest.mark.parametrize("scatter", SCATTERS)
def test_more_rows_than_max_tokens_run_in_chunks_with_one_warning(
    world: World, rng: torch.Generator, scatter: str
) -> None:
    n, most = world.n, 2 * world.n
    sizes = (
        [most, 2 * most + n, 5 * most, 4 * most + n]
        if scatter == "tokens"
        else [most, 2 * most + 3, most + 1, 5 * most]
    )
    cases = [with_counts(make_case(rng, n, b=b), rng) for b in sizes]
    starts = torch.tensor([0, 3, 3, sizes[1] - 2])  # chunks must cut the counts, too, whatever their form
    by_request = make_case(rng, n, b=sizes[1])
    lens = torch.randint(0, 2, (n, 3), generator=rng)
    by_request.counts = torch.zeros(n, sizes[1], dtype=torch.int64)
    for s in range(3):
        by_request.counts[:, starts[s] : starts[s + 1]] = lens[:, s : s + 1]
    steps = [Step(c, {"return_lse": True}) for c in cases]
    steps.append(
        Step(
            by_request,
            {"return_lse": True, "query_start_loc": starts},
            each=[{"seq_lens": lens[r]} for r in range(n)],
        )
    )
    shape = {"scatter": scatter, "max_tokens": most}
    by_rank, heard = world.run_counting_warnings(merge_steps, shape, steps)
    for i, results in enumerate(step_results(by_rank)):
        judge(results, steps[i].case, scatter, f"B={steps[i].case.outs.shape[1]}")
    about = [text for text in heard if "max_tokens" in text]
    assert len(about) == n or (n == 1 and not about), f"one warning per merger, {n} mergers: {heard}"


def chunks_into_out(group: Any, case: Case, scatter: str) -> Any:
    rank, n = rank_of(group), size_of(group)
    b, h, d = case.outs.shape[1:]
    rows = {"heads": (b, h // n, d), "tokens": (b // n, h, d), "none": (b, h, d)}[scatter]
    storage = torch.full((rows[1], rows[0] + 2, d), NAN, dtype=BF16)
    out = storage.transpose(0, 1)[1:-1]
    with merger_for(group, {"scatter": scatter, "max_tokens": n}) as merger:
        got = merger.merge(case.outs[rank].transpose(0, 1).contiguous().transpose(0, 1), case.lses[rank], out=out)
    assert got.data_ptr() == out.data_ptr()
    assert torch.isnan(storage[:, [0, -1]]).all()
    return contiguous(got)


@pytest.mark.parametrize("scatter", SCATTERS)
def test_chunks_land_in_a_strided_out(peers: World, rng: torch.Generator, scatter: str) -> None:
    case = make_case(rng, peers.n, b=5 * peers.n)
    by_rank, _ = peers.run_counting_warnings(chunks_into_out, case, scatter)
    judge(by_rank, case, scatter)


def uneven_tokens(group: Any, case: Case) -> Any:
    rank, n = rank_of(group), size_of(group)
    with merger_for(group, {"scatter": "tokens"}) as merger:
        bad = outcome(merger.merge, case.outs[rank, : n + 1], case.lses[rank, : n + 1])
        return bad, merger.merge(case.outs[rank], case.lses[rank])


def test_token_scatter_of_a_b_that_does_not_divide_is_refused(peers: World, rng: torch.Generator) -> None:
    case = make_case(rng, peers.n, b=2 * peers.n)
    results = peers.run(uneven_tokens, case)
    for bad, _ in results:
        assert "ShapeError" in bad.kinds
        assert bad.names(peers.n + 1, peers.n)
    judge([good for _, good in results], case, "tokens")


# ---------------------------------------------------------------- grad modes


def grad_modes(group: Any, case: Case) -> Any:
    rank = rank_of(group)
    out, lse = case.outs[rank], case.lses[rank]
    good: list[torch.Tensor] = []
    with torch.inference_mode():
        inside = merger_for(group)  # made inside, used outside too: its buffers must not be inference tensors
    outside = merger_for(group)
    for merger in (inside, outside):
        with torch.inference_mode():
            good.append(merger.merge(out.clone(), lse.clone(), out=torch.empty(out.shape[0], 4, 32, dtype=BF16)))
            good.append(merger.merge(out, lse))
        with torch.no_grad():
            good.append(merger.merge(out.clone().requires_grad_(), lse.clone().requires_grad_()))
        assert torch.is_grad_enabled()
        good.append(merger.merge(out, lse))
        with torch.inference_mode():
            good.append(merger.merge(out, lse))
    errors = [
        outcome(outside.merge, out.clone().requires_grad_(), lse),
        outcome(outside.merge, out, lse.clone().requires_grad_()),
    ]
    good.append(outside.merge(out, lse))
    inside.close()
    outside.close()
    assert not any(t.requires_grad for t in good)
    return [t.clone() for t in good], errors


def test_grad_modes(world: World, rng: torch.Generator) -> None:
    """Works in inference_mode and no_grad, in any order; refuses what would silently lose a gradient."""
    case = make_case(rng, world.n, b=3)
    by_rank = world.run(grad_modes, case)
    for results in step_results([good for good, _ in by_rank]):
        judge(results, case)
    for _, errors in by_rank:
        for error in errors:
            assert "ShapeError" in getattr(error, "kinds", ()), error
            assert "grad" in error.text


# ---------------------------------------------------------------- counts


def forms_of_counts(group: Any, case: Case) -> Any:
    rank = rank_of(group)
    out, lse = case.outs[rank], case.lses[rank]
    counts, lens = case.counts[rank], case.counts[rank]
    starts = torch.arange(out.shape[0] + 1)
    int32, f32 = torch.int32, torch.float32
    good = [
        {"valid_counts": counts.to(int32)},
        {"valid_counts": counts.to(torch.int64)},
        {"valid_counts": torch.stack([counts, counts * 0], dim=1).to(int32)[:, 0]},  # strided
        {"seq_lens": lens.to(int32), "query_start_loc": starts.to(int32)},
        {"seq_lens": lens.to(torch.int64), "query_start_loc": starts.to(torch.int64)},
    ]
    bad = {
        "both": {"valid_counts": counts, "seq_lens": lens, "query_start_loc": starts},
        "one more than a pair": {"valid_counts": counts, "seq_lens": lens},
        "lens alone": {"seq_lens": lens},
        "starts alone": {"query_start_loc": starts},
        "mismatched pair": {"seq_lens": lens, "query_start_loc": starts[:-1]},
        "pair of equal length": {"seq_lens": lens, "query_start_loc": starts[1:]},
        "too few": {"valid_counts": counts[1:]},
        "too many": {"valid_counts": torch.cat([counts, counts])},
        "per head": {"valid_counts": counts[:, None].expand(-1, 4).contiguous()},
        "floats": {"valid_counts": counts.to(f32)},
        "float lens": {"seq_lens": lens.to(f32), "query_start_loc": starts},
        "a list": {"valid_counts": counts.tolist()},
        "another device": {"valid_counts": counts.to("meta")},
    }
    with merger_for(group) as merger:
        errors = {name: outcome(merger.merge, out, lse, **kw) for name, kw in bad.items()}
        return errors, [merger.merge(out, lse, return_lse=True, **kw) for kw in good]


def test_forms_of_valid_counts(world: World, rng: torch.Generator) -> None:
    case = make_case(rng, world.n, b=7)
    with_counts(case, rng)
    by_rank = world.run(forms_of_counts, case)
    for errors, _ in by_rank:
        for name, error in errors.items():
            assert "ShapeError" in getattr(error, "kinds", ()), f"{name}: {error}"
            assert any(word in error.text for word in ("valid_counts", "seq_lens", "query_start_loc")), name
    for results in step_results([good for _, good in by_rank]):
        judge(results, case)


# ---------------------------------------------------------------- memory


def tensors_alive() -> dict[int, int]:
    """Bytes of every storage that a Python tensor holds, by address."""
    import gc

    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.device.type == "cpu" and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            address = storage.data_ptr()  # of a peer's memory a view may be shorter
            found[address] = max(found.get(address, 0), storage.nbytes())
    return found


def bytes_of_a_merger(group: Any, case: Case) -> Any:
    """What came to be with a merger, and what more after merges; counted while all ranks stand still."""
    rank = rank_of(group)
    shape = {"max_tokens": 9, "channels": 2}
    merger_for(group, shape).close()  # whatever is made once per process
    meet()
    before = tensors_alive()
    meet()
    merger = merger_for(group, shape)
    meet()
    made = tensors_alive()
    meet()
    for channel in (0, 1, 0):
        merger.merge(case.outs[rank], case.lses[rank], channel=channel)
    meet()
    after = tensors_alive()
    meet()
    merger.close()
    count = {address: size for address, size in made.items() if address not in before}
    grown = {address: size for address, size in after.items() if address not in made}
    return sum(count.values()), sum(grown.values())


def test_plan_bytes_is_what_is_allocated_and_nothing_grows(peers: World, rng: torch.Generator) -> None:
    """Row 29 as far as a CPU can tell: to the byte. Loopback ranks share a process, so each sees all."""
    n = peers.n
    case = make_case(rng, n, b=9)
    shape = dcpcomm.MergeShape(max_tokens=9, num_heads=4 * n, head_dim=32, dtype=BF16, lse_base="e", channels=2)
    planned = dcpcomm.plan_bytes(shape, world_size=n, config={"transport": peers.backend})
    sharing = 1 if peers.backend == "gloo_a2a" else n
    for made, grown in peers.run(bytes_of_a_merger, case):
        assert made == planned * sharing
        assert grown == 0


def test_plan_bytes_needs_no_group_and_grows_with_what_it_plans() -> None:
    def planned(n: int = 2, **changes: Any) -> int:
        given = {"max_tokens": 8, "num_heads": 48, "head_dim": 64, "dtype": BF16, "lse_base": "e"}
        # cupy_ipc takes whole granules, which hide how little this is.
        return dcpcomm.plan_bytes(dcpcomm.MergeShape(**{**given, **changes}), n, {"forbid": ["cupy_ipc"]})

    assert planned() > 2 * 8 * 48 // 2 * 64 * 2
    assert planned(channels=3) > 2 * planned()
    assert planned(max_tokens=16) > planned()
    assert planned(dtype=F32) > planned()
    with pytest.raises(dcpcomm.ShapeError):
        planned(n=5)


def by_auto(group: Any, case: Case) -> Any:
    rank = rank_of(group)
    shape = dcpcomm.MergeShape(max_tokens=8, num_heads=4 * case.n, head_dim=32, dtype=BF16, lse_base="e")
    config = config_for(group)
    config["transport"] = "auto"
    with dcpcomm.DCPMerger(group, shape, config=config) as merger:
        return merger.merge(case.outs[rank], case.lses[rank]), str(merger.explain())


def test_auto_finds_the_transport_of_the_group(some: World, rng: torch.Generator) -> None:
    case = make_case(rng, some.n, b=3)
    by_rank = some.run(by_auto, case)
    judge([out for out, _ in by_rank], case)
    assert all(some.backend in text for _, text in by_rank)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lse_base", "10"),
        ("lse_base", None),
        ("scatter", "rows"),
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("num_heads", -4),
        ("head_dim", 1.5),
        ("dtype", torch.float64),
        ("channels", 0),
        ("v_head_dim", 0),
    ],
)
def test_a_shape_that_makes_no_sense_names_its_field(field: str, value: Any) -> None:
    given = {"max_tokens": 8, "num_heads": 4, "head_dim": 32, "dtype": BF16, "lse_base": "e"}
    with pytest.raises(dcpcomm.ShapeError, match=field):
        dcpcomm.MergeShape(**{**given, field: value})


def test_lse_base_is_never_guessed() -> None:
    with pytest.raises(TypeError, match="lse_base"):
        dcpcomm.MergeShape(max_tokens=8, num_heads=4, head_dim=32, dtype=BF16)  # type: ignore[call-arg]
