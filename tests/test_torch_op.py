"""Merges as operators of torch: traced without a peer, compiled whole, and bit for bit what the merger gives."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import dcpcomm
from dcpcomm.adapters import torch_op
from dcpcomm.merger import DCPMerger
from tests.world import World, merger_for, outcome, rank_of, size_of

OPS = torch.ops.dcpcomm
L, V = 32, 16
FORMS = ("none", "counts", "lengths")

#: Marks of tests whose programs Inductor compiles. What it imports of torch is deprecated by torch.
INDUCTOR = (
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, as Inductor does on CPU"),
    pytest.mark.filterwarnings(r"ignore:.*torch\.jit:DeprecationWarning"),
)


def data(group: Any, b: int, seed: int, *, h: int | None = None, form: str = "none") -> tuple[Any, ...]:
    """(partial_out, partial_lse, keywords) of this rank."""
    generator = torch.Generator().manual_seed(seed * 100 + rank_of(group) + 10_000 * b)
    heads = 4 * size_of(group) if h is None else h
    out = torch.randn(b, heads, L, generator=generator).bfloat16()
    lse = torch.randn(b, heads, generator=generator)
    keywords: dict[str, Any] = {}
    if form == "counts":
        keywords["valid_counts"] = torch.randint(0, 3, (b,), generator=generator)
    elif form == "lengths":
        keywords["seq_lens"] = torch.tensor([2, 0, 5])
        keywords["query_start_loc"] = torch.tensor([0, b // 3, b // 2, b - b // 4])
    return out, lse, keywords


def same(got: Any, want: Any) -> bool:
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    return all(
        a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b) for a, b in pairs
    )


def weights_of(merger: DCPMerger, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed + merger.group.rank)
    return merger.gather_w_uv(torch.randn(4, L, V, generator=generator).bfloat16())


# ---------------------------------------------------------------- opcheck


def opchecked(group: Any, seed: int, scatter: str) -> int:
    """Every form of every operator, through torch's own checks."""
    b, count = 4 * size_of(group), 0
    with merger_for(group, {"scatter": scatter, "v_head_dim": V}) as merger:
        w = weights_of(merger, seed)
        number, weights = torch_op.handle(merger), torch_op.handle(w)
        for form in FORMS:
            out, lse, keywords = data(group, b, seed, form=form)
            for op in (OPS.merge, OPS.merge_with_lse):
                torch.library.opcheck(op.default, (number, out, lse), {**keywords, "tag": 3})
                count += 1
            for op in (OPS.merge_and_project, OPS.merge_and_project_with_lse):
                torch.library.opcheck(op.default, (number, out, lse, weights), {**keywords, "tag": 3})
                count += 1
    return count


@pytest.mark.parametrize("scatter", ["heads", "tokens", "none"])
@pytest.mark.parametrize("n", [1, 2])
def test_torch_finds_nothing_wrong_with_the_operators(n: int, scatter: str, seed: int, pool: Any) -> None:
    # In processes: what opcheck traces with isn't safe among threads.
    assert World("gloo_a2a", n, pool).run(opchecked, seed, scatter) == [12] * n


# ---------------------------------------------------------------- eager


def eagerly(group: Any, seed: int) -> list[bool]:
    results = []
    with merger_for(group, {"v_head_dim": V, "channels": 2}) as merger:
        w = weights_of(merger, seed)
        number, weights = torch_op.handle(merger), torch_op.handle(w)
        for form in FORMS:
            out, lse, keywords = data(group, 9, seed, form=form)
            keywords |= {"channel": 1, "tag": 7}
            plain, pair = merger.merge(out, lse, **keywords), merger.merge(out, lse, return_lse=True, **keywords)
            results += [
                same(OPS.merge(number, out, lse, **keywords), plain),
                same(OPS.merge_with_lse(number, out, lse, **keywords), pair),
                same(
                    OPS.merge_and_project(number, out, lse, weights, **keywords),
                    merger.merge_and_project(out, lse, w, **keywords),
                ),
                same(
                    OPS.merge_and_project_with_lse(number, out, lse, weights, **keywords),
                    merger.merge_and_project(out, lse, w, return_lse=True, **keywords),
                ),
            ]
    return results


def test_an_operator_gives_what_the_merger_gives(some: World, seed: int) -> None:
    assert some.run(eagerly, seed) == [[True] * 12] * some.n


def other_tags(group: Any) -> Any:
    with merger_for(group) as merger:
        out, lse, _ = data(group, 2, 0)
        return outcome(OPS.merge, torch_op.handle(merger), out, lse, tag=5 + group.rank)


def test_errors_come_through_as_they_are(pool: Any) -> None:
    for raised in World("loopback", 2, pool).run(other_tags):
        assert raised.kinds[0] == "CallMismatch"
        assert raised.names(5, 6)


# ---------------------------------------------------------------- compiled


def compiled(group: Any, seed: int, backend: str, scatter: str) -> tuple[list[bool], int]:
    """One program with three merges, over changing B; and how often it was compiled."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    n, results = size_of(group), []
    with merger_for(group, {"scatter": scatter, "v_head_dim": V}) as merger:
        w = weights_of(merger, seed)
        number, weights = torch_op.handle(merger), torch_op.handle(w)

        @torch.compile(fullgraph=True, backend=counter, dynamic=True)
        def step(out: Any, lse: Any, counts: Any) -> Any:
            first = OPS.merge(number, out * 2, lse, valid_counts=counts, tag=1)
            second, merged_lse = OPS.merge_with_lse(number, out, lse, tag=2)
            third = OPS.merge_and_project(number, out, lse, weights, tag=3)
            return first + 1, second, merged_lse, third.flatten(1)

        for b in (5, 7, 3, 40, 2):  # 40 is past max_tokens; none makes B equal to another dimension, by chance alike
            out, lse, keywords = data(group, b * n, seed, form="counts")
            counts = keywords["valid_counts"]
            with torch.inference_mode():
                got = step(out, lse, counts)
                first = merger.merge(out * 2, lse, valid_counts=counts, tag=1) + 1
                second, merged_lse = merger.merge(out, lse, return_lse=True, tag=2)
                third = merger.merge_and_project(out, lse, w, tag=3).flatten(1)
            results.append(same(got, (first, second, merged_lse, third)))
    return results, counter.frame_count


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("scatter", ["heads", "tokens", "none"])
def test_a_compiled_step_is_one_graph_for_all_b(scatter: str, backend: str, seed: int, pool: Any) -> None:
    assert World("gloo_a2a", 2, pool).run(compiled, seed, backend, scatter) == [([True] * 5, 1)] * 2


def test_ranks_that_are_threads_compile_too(seed: int, pool: Any) -> None:
    for results, _ in World("loopback", 2, pool).run(compiled, seed, "aot_eager", "heads"):
        assert results == [True] * 5


@pytest.mark.parametrize("backend", [pytest.param("inductor", marks=INDUCTOR)])
def test_inductor_compiles_a_step(backend: str, seed: int, pool: Any) -> None:
    assert World("loopback", 1, pool).run(compiled, seed, backend, "heads") == [([True] * 5, 1)]


def unused(group: Any, seed: int, backend: str) -> list[int]:
    """Tags of the merges that a compiled step makes, of which it uses one, and of which two are the same."""
    torch._dynamo.reset()
    seen: list[int] = []
    with merger_for(group) as merger:
        number = torch_op.handle(merger)
        out, lse, _ = data(group, 3, seed)

        @torch.compile(fullgraph=True, backend=backend)
        def step(out: Any, lse: Any) -> Any:
            OPS.merge(number, out, lse, tag=1)
            OPS.merge_with_lse(number, out, lse, tag=2)
            OPS.merge(number, out, lse, tag=3)
            return OPS.merge(number, out, lse, tag=3)

        real = merger.merge

        def listening(*given: Any, tag: int = 0, **keywords: Any) -> Any:
            seen.append(tag)
            return real(*given, tag=tag, **keywords)

        merger.merge = listening  # type: ignore[method-assign]
        step(out, lse)
    return seen


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def test_a_merge_that_nobody_uses_is_still_made(backend: str, seed: int, pool: Any) -> None:
    for seen in World("loopback", 1, pool).run(unused, seed, backend):
        assert seen in ([1, 2, 3, 3], [1, 2, 3])  # torch may make one of two that are alike in everything


def with_grad(group: Any) -> list[Any]:
    torch._dynamo.reset()
    with merger_for(group) as merger:
        number = torch_op.handle(merger)
        out, lse, _ = data(group, 3, 0)
        out.requires_grad_()
        step = torch.compile(lambda out, lse: OPS.merge(number, out, lse), fullgraph=True, backend="aot_eager")
        raised = [outcome(OPS.merge, number, out, lse), outcome(step, out, lse)]
        with torch.no_grad():
            return [*raised, same(step(out, lse), OPS.merge(number, out, lse))]


def test_partials_that_require_grad_are_refused_compiled_too(pool: Any) -> None:
    ((eager, traced, right),) = World("loopback", 1, pool).run(with_grad)
    assert eager.kinds[0] == "ShapeError"
    for raised in (eager, traced):
        assert "requires grad; a merge is an inference operation" in raised.text
    assert right


# ---------------------------------------------------------------- handles


def handles(group: Any) -> dict[str, Any]:
    said: dict[str, Any] = {}
    out, lse, _ = data(group, 3, 0)
    merger = merger_for(group, {"v_head_dim": V})
    w = weights_of(merger, 0)
    number, weights = torch_op.handle(merger), torch_op.handle(w)
    said["same"] = torch_op.handle(merger) == number
    said["as weights"] = outcome(OPS.merge_and_project, number, out, lse, number)
    said["as merger"] = outcome(OPS.merge, weights, out, lse)
    merger.close()
    said["closed"] = outcome(OPS.merge, number, out, lse)
    other = merger_for(group)
    said["another"] = torch_op.handle(other) != number
    other.close()
    del w, merger, other
    gc.collect()
    said["gone"] = outcome(OPS.merge, number, out, lse)
    step = torch.compile(lambda out, lse: OPS.merge(number, out, lse), fullgraph=True, backend="eager")
    said["compiled gone"] = outcome(step, out, lse)
    return said


def test_a_handle_that_leads_nowhere_says_so(pool: Any) -> None:
    (said,) = World("loopback", 1, pool).run(handles)
    assert said["same"]
    assert said["another"]
    assert "expected a GatheredWUV's" in said["as weights"].text
    assert "expected a DCPMerger's" in said["as merger"].text
    assert "this merger is closed" in said["closed"].text
    for how in ("gone", "compiled gone"):
        assert "is the handle of no live DCPMerger of this process: it is gone" in said[how].text
    assert said["gone"].kinds[0] == "DCPCommError"


def test_only_mergers_and_weights_have_handles() -> None:
    with pytest.raises(dcpcomm.ShapeError, match="is a int; expected a DCPMerger"):
        torch_op.handle(3)  # type: ignore[type-var]


HANDLES = """
import torch
from dcpcomm import DCPMerger, MergeShape
from dcpcomm.adapters import torch_op
from dcpcomm.testing import LoopbackWorld
def made(group, heads):
    shape = MergeShape(max_tokens=4, num_heads=heads, head_dim=32, dtype=torch.bfloat16, lse_base="e")
    with DCPMerger(group, shape, device="cpu") as merger:
        return torch_op.handle(merger)
print([LoopbackWorld(1, "cpu").run(made, heads)[0] for heads in (8, 8, 16)])
"""


def test_another_process_gives_the_same_handles_in_the_same_order() -> None:
    first, second = (
        json.loads(subprocess.run([sys.executable, "-c", HANDLES], capture_output=True, text=True, timeout=100).stdout)
        for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == 3
    assert first[0] & 0xFFFFFFFF == first[1] & 0xFFFFFFFF != first[2] & 0xFFFFFFFF


def test_importing_dcpcomm_registers_no_operator() -> None:
    code = (
        "import sys, torch, dcpcomm, dcpcomm.merger; "
        "print(hasattr(torch.ops.dcpcomm, 'merge'), 'dcpcomm.adapters' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["False", "False"], done.stderr
