"""The demonstration: decode with the KV cache in shards and with it whole, and judge if the tokens agree.

`run_rank` runs on every rank. All ranks hold the same weights and prefill the same text. Then each keeps only
its share of the KV cache, and from there on they meet in `DCPMerger.merge_and_project`, and in an all-gather
of the finished heads before the output projection. Rank 0 then decodes once more by itself, with the whole
cache and a plain softmax. `judge` compares.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import dcpcomm
from dcpcomm.demo.model import (
    Attention,
    Decoder,
    DecoderConfig,
    IndexCache,
    Prefill,
    ShardCache,
    WholeCache,
    fill,
)
from dcpcomm.launch import emit

__all__ = [
    "NEAR_TIE",
    "TOLERANCE",
    "Judgement",
    "Order",
    "RankReport",
    "Reference",
    "Settings",
    "judge",
    "prefixes",
    "run_rank",
]

#: Heads' outputs are of order 1; summing float32 in another order moves them by about 1e-6. This is a fault.
TOLERANCE = 1e-4
#: Scores nearer to each other than this may change places by rounding.
NEAR_TIE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run; the same on every rank.

    Args:
        context: the text, its bytes being the tokens.
        tokens: how many to generate for each request.
        projection: the order in which `DCPMerger` projects and merges: "before", "after" or "auto".
        transport: a registered name, or None to leave the choice to dcpcomm.
        interleave: neighbouring KV entries that stay on one rank.
    """

    context: bytes
    tokens: int = 32
    projection: str = "auto"
    transport: str | None = None
    interleave: int = 1
    decoder: DecoderConfig = field(default_factory=DecoderConfig)


@dataclass(frozen=True, kw_only=True)
class Order:
    """One rank's decode with one projection order.

    Args:
        projection: "before" or "after" the merge.
        tokens: generated, `[B][K]`.
        merge_us: the median over the steps, by layer.
        wire_bytes: sent to peers in one layer of one step.
        attention_difference, logit_difference: the largest to one process, over steps with equal inputs; on
            rank 0 only.
    """

    projection: str
    tokens: list[list[int]]
    merge_us: list[float]
    wire_bytes: int
    attention_difference: float = 0.0
    logit_difference: float = 0.0


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
        orders: both, first the one that was asked for or chosen.
        empty, pairs: for how many rows, over all layers and steps, it owned none of the chosen entries; of
            how many.
        transport: its name; None in a group of one.
        explained: how dcpcomm chose the transport and the order.
        reference: on rank 0 only.
    """

    orders: list[Order]
    empty: int
    pairs: int
    transport: str | None
    explained: str
    reference: Reference | None = None


class Judgement(NamedTuple):
    """Whether the demonstration holds, and why not."""

    passed: bool
    failures: list[str]


class MergedAttention:
    """A shard of the KV cache, and attention over all shards by a merger: `Attention` for N processes."""

    def __init__(self, decoder: Decoder, shard: ShardCache, merger: dcpcomm.DCPMerger) -> None:
        self._shard, self._merger = shard, merger
        mine = decoder.config.num_heads // shard.size
        heads = slice(shard.rank * mine, (shard.rank + 1) * mine)
        self._w_uv = [merger.gather_w_uv(layer.w_uv[heads]) for layer in decoder.layers]
        self.merge_us: list[list[float]] = [[] for _ in decoder.layers]
        self.empty = self.pairs = 0

    def append(self, layer: int, rows: Tensor, positions: Tensor, entries: Tensor) -> None:
        self._shard.append(layer, rows, positions, entries)

    def attend(self, layer: int, query: Tensor, chosen: Tensor) -> Tensor:
        latent, lse, counts = self._shard.partial(layer, query, chosen)
        self.empty += int((counts == 0).sum())
        self.pairs += len(counts)
        dist.barrier()  # or the merge's time would include waiting for a rank whose attention took longer
        start = time.perf_counter()
        out = self._merger.merge_and_project(latent, lse, self._w_uv[layer], valid_counts=counts, tag=layer)
        self.merge_us[layer].append((time.perf_counter() - start) * 1e6)
        assert isinstance(out, Tensor)  # a pair only with return_lse
        everyone = [torch.empty_like(out) for _ in range(self._shard.size)]
        dist.all_gather(everyone, out.contiguous())
        return torch.cat(everyone, dim=1)


class Trace(NamedTuple):
    """All K steps of a decode: `tokens` `[K, B]`, and each field of `Step` stacked on a first axis, K."""

    tokens: Tensor
    logits: Tensor
    heads: Tensor
    gaps: Tensor


def prefixes(context: bytes) -> list[int]:
    """How much of the context each request has read. The shortest leaves most ranks with no entry at all."""
    return [len(context), -(-len(context) // 2), -(-len(context) // 10), min(2, len(context))]


def run_rank(settings: Settings) -> RankReport:
    """One rank's part; collective over the default process group. Rank 0 emits `(done, total, what)`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    config = settings.decoder
    lengths = prefixes(settings.context)
    batch, capacity = len(lengths), len(settings.context) + settings.tokens
    progress = _Progress(rank, config.num_layers * len(settings.context), settings.tokens * 3)

    with torch.inference_mode():
        decoder = Decoder(config)
        prompt = torch.tensor(list(settings.context))
        # The last byte of each request's context is its first decode step: every token comes of a merge.
        filled = decoder.prefill(prompt[:-1], progress.prefilled)

        def run(attention: Attention, what: str) -> Trace:
            return decode(decoder, prompt, filled, lengths, settings.tokens, attention, lambda: progress.decoded(what))

        def run_merged(projection: str) -> tuple[Trace, RankReport]:
            with _merger(settings, batch, projection) as merger:
                order = merger.projection_order(batch)
                shard = ShardCache(config, batch, capacity, rank=rank, size=size, interleave=settings.interleave)
                attention = MergedAttention(decoder, shard, merger)
                trace = run(attention, f"decoding on {size} ranks, W_UV {order} the merge")
                merger.check()
                report = Order(
                    projection=order,
                    tokens=trace.tokens.T.tolist(),
                    merge_us=[statistics.median(times) for times in attention.merge_us],
                    wire_bytes=merger.wire_bytes(
                        batch, config.v_head_dim if order == "before" else config.kv_lora_rank
                    ),
                )
                return trace, RankReport(
                    orders=[report],
                    empty=attention.empty,
                    pairs=attention.pairs,
                    transport=merger.transport_for(batch),
                    explained=merger.explain(),
                )

        trace, report = run_merged(settings.projection)
        other_trace, other = run_merged("after" if report.orders[0].projection == "before" else "before")
        orders = report.orders + other.orders
        if rank:
            return replace(report, orders=orders)
        whole = run(WholeCache(decoder, batch, capacity), "decoding on one rank")
        orders = [_compared(order, t, whole) for order, t in zip(orders, (trace, other_trace), strict=True)]
        return replace(report, orders=orders, reference=_summary(whole))


def _merger(settings: Settings, batch: int, projection: str) -> dcpcomm.DCPMerger:
    config = settings.decoder
    shape = dcpcomm.MergeShape(
        max_tokens=batch,
        num_heads=config.num_heads,
        head_dim=config.kv_lora_rank,
        dtype=torch.float32,
        lse_base="e",
        v_head_dim=config.v_head_dim,
    )
    choice = {"projection": projection} | ({"transport": settings.transport} if settings.transport else {})
    return dcpcomm.DCPMerger(None, shape, config=choice, device="cpu")


def decode(
    decoder: Decoder,
    prompt: Tensor,
    filled: Prefill,
    lengths: list[int],
    tokens: int,
    attention: Attention,
    on_step: Callable[[], None] = lambda: None,
) -> Trace:
    """Greedy decode, `tokens` steps; sequence b continues the first `lengths[b]` tokens of `prompt` `[T]`."""
    index = IndexCache(decoder.config, len(lengths), len(prompt) + tokens)
    fill(filled, [length - 1 for length in lengths], attention, index)
    positions = torch.tensor(lengths) - 1
    token = prompt[positions]
    chosen, steps = [], []
    for _ in range(tokens):
        step = decoder.step(token, positions, index, attention)
        token, positions = step.logits.argmax(-1), positions + 1
        chosen.append(token)
        steps.append(step)
        on_step()
    logits, heads, gaps = (torch.stack(part) for part in zip(*steps, strict=True))
    return Trace(torch.stack(chosen), logits, heads, gaps)


def _summary(whole: Trace) -> Reference:
    """What there is to say of the decode that all others are held to."""
    best = whole.logits.topk(2).values
    return Reference(
        tokens=whole.tokens.T.tolist(),
        logit_margin=float((best[..., 0] - best[..., 1]).min()),
        choice_gap=float(whole.gaps.min()),
    )


def differences(trace: Trace, whole: Trace) -> tuple[float, float]:
    """The largest absolute differences of heads' outputs and of logits, over steps that fed the same tokens.

    A NaN counts as an infinite difference.
    """
    diverged = (trace.tokens != whole.tokens).int()
    comparable = diverged.cumsum(0) - diverged == 0  # [K, B]: up to the first step that chose differently
    largest = []
    for a, b in ((trace.heads.movedim(1, 2), whole.heads.movedim(1, 2)), (trace.logits, whole.logits)):
        by_step = (a - b).abs().flatten(2).amax(-1)[comparable]
        largest.append(float(torch.where(by_step.isnan(), torch.inf, by_step).max()))
    return largest[0], largest[1]


def judge(reports: list[RankReport]) -> Judgement:
    """Passed: all ranks chose one process's tokens, in both orders, and outputs differ by rounding alone."""
    reference = reports[0].reference
    assert reference is not None
    failures = []
    for i, order in enumerate(reports[0].orders):
        how = f"with W_UV {order.projection} the merge"
        for rank, report in enumerate(reports):
            where = _first_difference(report.orders[i].tokens, reference.tokens)
            if where is not None:
                failures.append(
                    f"{how}, rank {rank} chose another token than one process did, "
                    f"first in request {where[0]} at token {where[1]}"
                )
        if not order.attention_difference <= TOLERANCE:
            failures.append(
                f"{how}, attention is off by {order.attention_difference:.2g}; "
                f"rounding explains no more than {TOLERANCE:g}"
            )
    return Judgement(not failures, failures)


def _compared(order: Order, trace: Trace, whole: Trace) -> Order:
    attention, logits = differences(trace, whole)
    return replace(order, attention_difference=attention, logit_difference=logits)


def _first_difference(tokens: list[list[int]], expected: list[list[int]]) -> tuple[int, int] | None:
    """(request, token) of the earliest token that isn't as expected."""
    places = [
        (step, request)
        for request, (got, want) in enumerate(zip(tokens, expected, strict=True))
        for step, (a, b) in enumerate(zip(got, want, strict=True))
        if a != b
    ]
    return min(places)[::-1] if places else None


class _Progress:
    """Counts what is done, and emits it from rank 0."""

    _STEP = 64  # a decode step takes about as long as this many rows of prefill in one layer

    def __init__(self, rank: int, prefill_rows: int, steps: int) -> None:
        self._emit: Callable[[Any], None] = emit if rank == 0 else lambda event: None
        self._done, self._total = 0, prefill_rows + steps * self._STEP

    def prefilled(self, rows: int) -> None:
        self._report(rows, "reading the context")

    def decoded(self, what: str) -> None:
        self._report(self._STEP, what)

    def _report(self, more: int, what: str) -> None:
        self._done += more
        self._emit((self._done, self._total, what))
