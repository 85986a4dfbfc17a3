"""Cases about what a merge computes: dtypes, LSE bases, and rows that must not count."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from dcpcomm.testing.conformance.case import Carries, Case, Claim, every_transport
from dcpcomm.testing.conformance.judging import JudgedBy, judge_merge, judge_script, same_bits
from dcpcomm.testing.conformance.partials import INF, NAN, Partials
from dcpcomm.testing.conformance.rank import Call, Played, Rank, Script, fetched
from dcpcomm.testing.conformance.scene import Scene

__all__ = ["NUMBERS"]

#: A float32 that loses its value when it travels as anything shorter.
LONG_LSE = torch.tensor(0x3F800001, dtype=torch.int32).view(torch.float32).item()


def of_dtype(dtype: torch.dtype, scene: Scene) -> Script:
    shape, rng = scene.shape(dtype=dtype), scene.generator()
    return Script(shape, tuple(Call(scene.partials(rng, b, shape)) for b in (17, 5)))


def of_base(base: str, scene: Scene) -> Script:
    """Random LSEs; then one rank apart from the rest, by ln 3072 and ln 64, of which the second weighs 2.04 %."""
    shape, rng = scene.shape(lse_base=base), scene.generator()
    uneven = scene.partials(rng, 3, shape)
    uneven.lses[:] = torch.tensor(64.0).log() if base == "e" else 6.0
    uneven.lses[0] = torch.tensor(3072.0).log() if base == "e" else torch.tensor(3072.0).log2()
    return Script(shape, (Call(scene.partials(rng, 17, shape)), Call(uneven)))


def whole_lse(scene: Scene) -> Script:
    """Each row and head counts on one rank only, whose LSE must come out of the merge as it went in."""
    shape, rng = scene.shape(), scene.generator()
    partials = scene.partials(rng, 11, shape)
    partials.lses[:, ::2] = LONG_LSE
    owner = torch.randint(0, scene.n, partials.lses.shape[1:], generator=rng)
    others = torch.arange(scene.n).view(-1, 1, 1) != owner
    return Script(shape, (Call(Partials(partials.outs, partials.lses.masked_fill(others, -INF), "e")),))


def judge_whole_lse(scene: Scene, got: list[Any]) -> None:
    script = whole_lse(scene)
    judge_script(scene, script, got)
    if not scene.capabilities.deterministic:
        return
    (call,) = script.calls
    wanted = call.partials.lses.amax(0).chunk(scene.n, 1)
    for rank, ((_, lse),) in enumerate(got):
        assert same_bits(lse, wanted[rank].contiguous()), (
            f"rank {rank}: an LSE that only one rank has comes back changed: {int((lse != wanted[rank]).sum())} of "
            f"{lse.numel()} float32 words differ. Is it carried as float32, all 32 bits?"
        )


def short_lses(scene: Scene) -> Script:
    shape, rng = scene.shape(), scene.generator()
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    return Script(shape, tuple(Call(scene.partials(rng, 6, shape, dtype)) for dtype in dtypes))


def empty_rows(scene: Scene) -> Script:
    """Hazards 1 to 4: rows that saw no KV entry hold garbage, finite or not, and say so by count or by LSE."""
    n, shape, rng = scene.n, scene.shape(), scene.generator()
    calls = []

    everywhere = scene.partials(rng, n + 1, shape)  # row 0 empty on all ranks, row 1 + r on rank r
    for source in range(n):
        for row in (0, 1 + source):
            everywhere.outs[source, row], everywhere.lses[source, row] = NAN, NAN
    calls.append(Call(everywhere))

    by_count = scene.partials(rng, 9, shape)  # a finite LSE that must not count
    by_count.counts = torch.randint(0, 2, (n, 9), generator=rng)
    by_count.counts[:, 0] = 0
    by_count.lses[by_count.counts == 0] = 0.0
    calls.append(Call(by_count))

    for lse in (-INF, INF, NAN):
        for payload in (NAN, INF, -INF):
            partials = scene.partials(rng, 3, shape)
            source = len(calls) % n
            partials.outs[source, 1, ::2], partials.lses[source, 1, ::2] = payload, lse
            partials.outs[:, 2, 0], partials.lses[:, 2, 0] = payload, lse
            calls.append(Call(partials))
    calls.append(Call(scene.partials(rng, 9, shape)))  # and nothing of it is left behind
    return Script(shape, tuple(calls))


def padding_rows(scene: Scene) -> Script:
    """Rows at and past `query_start_loc[-1]`, and requests without KV here, hold NaN."""
    shape, rng = scene.shape(), scene.generator()
    starts, lens = torch.tensor([0, 1, 4, 6, 6, 6]), torch.tensor([5, 0, 3, 0, 0])
    partials = scene.partials(rng, 10, shape)
    live = torch.zeros(10, dtype=torch.int64)
    live[0], live[4:6] = 1, 1
    partials.counts = live.expand(scene.n, 10).contiguous()
    partials.outs[:, live == 0], partials.lses[:, live == 0] = NAN, NAN
    return Script(shape, (Call(partials, seq_lens=lens, query_start_loc=starts), Call(scene.partials(rng, 10, shape))))


def underflow(scene: Scene) -> Script:
    """A rank so far below the others that its weight is 0, then a normal call, ten times over."""
    shape, rng = scene.shape(), scene.generator()
    calls = []
    for i in range(10):
        low = scene.partials(rng, 3, shape)
        low.lses[i % scene.n] -= 200
        calls += [Call(low), Call(scene.partials(rng, 3, shape))]
    return Script(shape, tuple(calls))


def chain_parts(base: str, scene: Scene) -> tuple[Any, list[Partials]]:
    shape, rng = scene.shape(scatter="none", lse_base=base), scene.generator()
    return shape, [scene.partials(rng, 7, shape) for _ in range(2)]


def chain(base: str, at: Rank) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """merge(merge(a, b, ..), merge(c, d, ..)): rank 0 brings the first result, rank 1 the second, others nothing."""
    shape, parts = chain_parts(base, at.scene)
    with at.merger(shape) as merger:
        halves = [merger.merge(*at.mine(part), return_lse=True) for part in parts]
        out, lse = (t.clone() for t in halves[min(at.rank, 1)])
        if at.rank > 1:
            out, lse = out.fill_(NAN), lse.fill_(-INF)
        merged, merged_lse = merger.merge(out, lse, return_lse=True)
    return [fetched(merged, merged_lse)]


def judge_chain(base: str, scene: Scene, got: list[Any]) -> None:
    _, (a, b) = chain_parts(base, scene)
    everything = Partials(torch.cat([a.outs, b.outs]), torch.cat([a.lses, b.lses]), base)
    judge_merge(scene, everything, [results[0] for results in got], "none", "the merge of two merges", merges=2)


def _scripted(name: str, proves: str, script: Any, claim: Claim = every_transport) -> Case:
    return Case(name=name, proves=proves, rank_function=Played(script), judge=JudgedBy(script), claim=claim)


NUMBERS: tuple[Case, ...] = (
    *(
        _scripted(
            f"dtype-{str(dtype).removeprefix('torch.')}",
            f"partials in {str(dtype).removeprefix('torch.')}, rounded once",
            partial(of_dtype, dtype),
            Carries(dtype),
        )
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ),
    *(
        _scripted(
            f"lse-base-{base}",
            f"LSEs in base {base} are weighed in that base, and the merged LSE comes back in it",
            partial(of_base, base),
        )
        for base in ("e", "2")
    ),
    Case(
        name="lse-whole",
        proves="all 32 bits of an LSE arrive: it isn't carried as something shorter",
        rank_function=Played(whole_lse),
        judge=judge_whole_lse,
    ),
    _scripted("lse-dtypes", "LSEs in float16, bfloat16 and float32", short_lses),
    *(
        Case(
            name=f"chained-merges-{base}",
            proves=f"a merge of merges, by the LSEs they returned in base {base}, is the merge of all",
            rank_function=partial(chain, base),
            judge=partial(judge_chain, base),
        )
        for base in ("e", "2")
    ),
    _scripted(
        "empty-rows", "an empty row has no influence, whatever it holds; no NaN and no infinity leaks", empty_rows
    ),
    _scripted("padding-rows", "rows of CUDA-graph padding come out 0 with LSE -inf, NaN in them or not", padding_rows),
    _scripted("weights-that-underflow", "a weight of 0 leaves nothing behind for the next call", underflow),
)
