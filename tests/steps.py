"""The rank function that most tests run: merges by one merger, and what a merge must leave alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import dcpcomm
from tests.oracle import NAN, Case, same_bits
from tests.world import dawdle, merger_for, rank_of

# ---------------------------------------------------------------- layouts: the same values at other places


def _hole(*shape: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full(shape, NAN, dtype=like.dtype)


def contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def padded_heads(x: torch.Tensor) -> torch.Tensor:
    """`storage[:, :H]` of more stored heads."""
    view = _hole(x.shape[0], x.shape[1] + 5, *x.shape[2:], like=x)[:, : x.shape[1]]
    return view.copy_(x)


def head_major(x: torch.Tensor) -> torch.Tensor:
    """`[H, Bcap, ...].transpose(0, 1)[:B]`."""
    view = _hole(x.shape[1], x.shape[0] + 3, *x.shape[2:], like=x).transpose(0, 1)[: x.shape[0]]
    return view.copy_(x)


def odd_token_stride(x: torch.Tensor) -> torch.Tensor:
    """A token stride that is no multiple of 8 elements."""
    per_token = x[0].numel() if x.shape[0] else 1
    view = _hole(max(1, x.shape[0]) * (per_token + 3), like=x).as_strided(
        x.shape, (per_token + 3, *contiguous(x).stride()[1:])
    )
    return view.copy_(x)


def last_stride_2(x: torch.Tensor) -> torch.Tensor:
    return _hole(*x.shape[:-1], 2 * x.shape[-1], like=x)[..., ::2].copy_(x)


def odd_offset(x: torch.Tensor) -> torch.Tensor:
    """One element into its storage: 2-byte aligned at the least."""
    return _hole(x.numel() + 1, like=x)[1:].view(x.shape).copy_(x)


def every_third_token(x: torch.Tensor) -> torch.Tensor:
    return _hole(3 * x.shape[0], *x.shape[1:], like=x)[1::3].copy_(x)


def all_reversed(x: torch.Tensor) -> torch.Tensor:
    """The axes stored in the opposite order: transposed LSE, `[D, H, B]` partials."""
    order = tuple(reversed(range(x.ndim)))
    return _hole(*reversed(x.shape), like=x).permute(order).copy_(x)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    f.__name__: f
    for f in (
        contiguous,
        padded_heads,
        head_major,
        odd_token_stride,
        last_stride_2,
        odd_offset,
        every_third_token,
        all_reversed,
    )
}


# ---------------------------------------------------------------- merges


@dataclass
class Step:
    """One merge on every rank: the case's partials, its counts as `valid_counts` if it has any, and keywords.

    Args:
        each: further keywords by rank.
        layouts, lse_layouts: names in `LAYOUTS`, by rank.
    """

    case: Case
    kw: dict[str, Any] = field(default_factory=dict)
    each: list[dict[str, Any]] | None = None
    layouts: list[str] | None = None
    lse_layouts: list[str] | None = None

    def arguments(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        partial = LAYOUTS[self.layouts[rank] if self.layouts else "contiguous"](self.case.outs[rank])
        lse = LAYOUTS[self.lse_layouts[rank] if self.lse_layouts else "contiguous"](self.case.lses[rank])
        kw = {**self.kw, **(self.each[rank] if self.each else {})}
        if self.case.counts is not None and not kw.keys() & {"valid_counts", "seq_lens", "query_start_loc"}:
            kw["valid_counts"] = self.case.counts[rank].to(torch.int32)
        return partial, lse, kw


def one_merge(merger: dcpcomm.DCPMerger, step: Step, rank: int) -> Any:
    """The merge of `step`; its inputs must come out of it unchanged."""
    partial, lse, kw = step.arguments(rank)
    given = [
        partial,
        lse,
        *(v for v in kw.values() if isinstance(v, torch.Tensor) and v is not kw.get("out")),
    ]
    before = [contiguous(t) for t in given]
    poison_heap(partial)
    result = merger.merge(partial, lse, **kw)
    assert all(same_bits(t, b) for t, b in zip(given, before, strict=True)), "a merge changed its own inputs"
    return result


def poison_heap(like: torch.Tensor) -> None:
    """Leave NaN in memory that the allocator is about to hand out again."""
    blocks = [torch.full((max(1, like.numel() // k),), NAN, dtype=like.dtype) for k in (1, 2, 3, 4)]
    del blocks


def merge_steps(
    group: Any,
    shape: dict[str, Any],
    steps: list[Step],
    config: dict[str, Any] | None = None,
    delay_seed: int | None = None,
) -> list[Any]:
    """The results of `steps`, taken with one merger; also that none of them is changed by a later step."""
    rank = rank_of(group)
    rng = random.Random(f"{delay_seed}/{rank}")
    results, copies = [], []
    with merger_for(group, shape, **(config or {})) as merger:
        for step in steps:
            if delay_seed is not None:
                dawdle(rng)
            result = one_merge(merger, step, rank)
            results.append(result)
            copies.append([t.clone() for t in _tensors(result)])
        merger.check()
    for i, (result, copy) in enumerate(zip(results, copies, strict=True)):
        kept = all(same_bits(t, c) for t, c in zip(_tensors(result), copy, strict=True))
        assert kept, f"the result of step {i} was changed by a later call"
    return results


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def step_results(by_rank: list[list[Any]]) -> list[list[Any]]:
    """[rank][step] -> [step][rank]."""
    return [list(step) for step in zip(*by_rank, strict=True)]
