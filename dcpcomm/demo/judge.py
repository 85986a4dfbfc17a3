"""What the demonstration found, and whether it holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "NEAR_TIE",
    "TOLERANCE",
    "Judgement",
    "RankReport",
    "Reference",
    "Trace",
    "Variant",
    "compared",
    "differences",
    "judge",
    "summary",
]

#: Heads' outputs are of order 1. Summing float32 in another order moves them by about 1e-6, rounding each partial, the
#: weights and the sum to another dtype by a few of its steps. More is a fault.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
#: Scores nearer to each other than this may change places by rounding of float32.
NEAR_TIE = 1e-5


class Trace(NamedTuple):
    """All K steps of a decode: `tokens` `[K, B]`, and each field of `Step` stacked on a first axis, K."""

    tokens: Tensor
    logits: Tensor
    heads: Tensor
    gaps: Tensor


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One rank's decode, over one transport in one way.

    Args:
        transport: its name; None in a group of one.
        deterministic: whether that transport promises the bits of all others that do.
        projection: "before" or "after" the merge.
        mode: "eager", or "graph": each step is the replay of one CUDA graph.
        tokens: generated, `[B][K]`.
        merge_us: the median over the steps, by layer.
        step_us: the median of a whole step.
        wire_bytes: sent to peers in one layer of one step.
        attention_difference, logit_difference: the largest to one process, over steps with equal inputs; of partials
            shorter than float32, attention in the first layer. On rank 0 only.
    """

    transport: str | None
    deterministic: bool
    projection: str
    mode: str
    tokens: list[list[int]]
    merge_us: list[float]
    step_us: float
    wire_bytes: int
    attention_difference: float = 0.0
    logit_difference: float = 0.0

    def __str__(self) -> str:
        over = f"over {self.transport}" if self.transport else "on one rank"
        return f"{over}, {self.mode}, with W_UV {self.projection} the merge"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one process with the whole cache did.

    Args:
        tokens: generated, `[B][K]`.
        logit_margin: the smallest distance between the two best logits.
        choice_gap: the smallest distance between the index scores of the last entry chosen and the first left
            out.
    """

    tokens: list[list[int]]
    logit_margin: float
    choice_gap: float


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank did.

    Args:
        variants: in the order they ran in, the same on all ranks.
        skipped: transport -> why it could not carry the merges.
        empty, pairs: for how many rows, over all layers and steps of the first variant, it owned none of the chosen
            entries; of how many.
        device: "cpu", or the GPU's name.
        explained: how dcpcomm chose the first variant's transport and order.
        reference: on rank 0 only.
    """

    variants: list[Variant]
    skipped: dict[str, str]
    empty: int
    pairs: int
    device: str
    explained: str
    reference: Reference | None = None


class Judgement(NamedTuple):
    """Whether the demonstration holds, and why not."""

    passed: bool
    failures: list[str]


def judge(reports: list[RankReport], dtype: str) -> Judgement:
    """Passed: outputs differ from one process's by rounding alone, and so do no tokens.

    Partials in float32: all ranks chose one process's tokens, in every variant. In a shorter dtype rounding chooses
    other tokens now and then: there all ranks chose the same, and all variants of one projection order whose transports
    are deterministic chose the same too.
    """
    reference = reports[0].reference
    assert reference is not None
    failures = []
    expected: dict[str, tuple[list[list[int]], str]] = {}
    for i, variant in enumerate(reports[0].variants):
        if dtype == "float32":
            want, whose = reference.tokens, "one process"
        elif variant.deterministic:
            want, whose = expected.setdefault(variant.projection, (variant.tokens, f"rank 0 {variant}"))
        else:
            want, whose = variant.tokens, "rank 0"
        for rank, report in enumerate(reports):
            where = _first_difference(report.variants[i].tokens, want)
            if where is not None:
                failures.append(
                    f"{variant}: rank {rank} chose another token than {whose} did, "
                    f"first in request {where[0]} at token {where[1]}"
                )
        if not variant.attention_difference <= TOLERANCE[dtype]:
            failures.append(
                f"{variant}: attention is off by {variant.attention_difference:.2g}; "
                f"rounding to {dtype} explains no more than {TOLERANCE[dtype]:g}"
            )
    return Judgement(not failures, failures)


def summary(whole: Trace) -> Reference:
    """What there is to say of the decode that all others are held to."""
    best = whole.logits.topk(2).values
    return Reference(
        tokens=whole.tokens.T.tolist(),
        logit_margin=float((best[..., 0] - best[..., 1]).min()),
        choice_gap=float(whole.gaps.min()),
    )


def differences(trace: Trace, whole: Trace, layers: int | None = None) -> tuple[float, float]:
    """The largest absolute differences of heads' outputs and of logits, over steps that fed the same tokens.

    A NaN counts as an infinite difference.

    Args:
        layers: how many to compare. Only the first has the same inputs whatever rounding did: in the others it may have
            chosen other entries to attend to.
    """
    diverged = (trace.tokens != whole.tokens).int()
    comparable = diverged.cumsum(0) - diverged == 0  # [K, B]: up to the first step that chose differently
    largest = []
    mine, theirs = (one.heads[:, :layers].movedim(1, 2) for one in (trace, whole))
    for a, b in ((mine, theirs), (trace.logits, whole.logits)):
        by_step = (a - b).abs().flatten(2).amax(-1)[comparable]
        largest.append(float(torch.where(by_step.isnan(), torch.inf, by_step).max()))
    return largest[0], largest[1]


def compared(variant: Variant, trace: Trace, whole: Trace, dtype: str) -> Variant:
    """With its differences to one process's decode."""
    attention, logits = differences(trace, whole, None if dtype == "float32" else 1)
    return replace(variant, attention_difference=attention, logit_difference=logits)


def _first_difference(tokens: list[list[int]], expected: list[list[int]]) -> tuple[int, int] | None:
    """(request, token) of the earliest token that isn't as expected."""
    places = [
        (step, request)
        for request, (got, want) in enumerate(zip(tokens, expected, strict=True))
        for step, (a, b) in enumerate(zip(got, want, strict=True))
        if a != b
    ]
    return min(places)[::-1] if places else None
