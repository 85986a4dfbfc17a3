"""The demo: shards and whole cache agree, and a planted fault is seen."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dcpcomm
from dcpcomm.demo import judge as judging
from dcpcomm.demo import run as running
from dcpcomm.demo.judge import RankReport, Reference, Trace, Variant, differences, judge
from dcpcomm.demo.model import Decoder, DecoderConfig, IndexCache, ShardCache, WholeCache, fill
from dcpcomm.demo.run import GRAPH, MergedAttention, Settings, decode, prefixes, run_threads
from dcpcomm.demo.stopwatch import Stopwatch
from dcpcomm.launch import RankFailed
from dcpcomm.reference import merge_partials
from dcpcomm.testing import LoopbackWorld

TEXT = (
    b"A rank that holds none of the chosen entries has nothing to say, and must not be heard. "
    b"The others say what they know; their words are weighed, and added up. " * 3
)
TOKENS = 12
TOLERANCE = judging.TOLERANCE["float32"]

Partials = tuple[Tensor, Tensor, Tensor]  # out [N, B, H, L], LSE [N, B, H], counts [N, B]
Merge = Callable[[Partials], Tensor]  # -> latent [B, H, L]


def merge(partials: Partials) -> Tensor:
    """As the oracle says: float64, rank n's slice of the heads from its own result."""
    out, lse, counts = partials
    merged, _ = merge_partials(out, lse, lse_base="e", valid_counts=counts)
    return torch.cat(list(merged), dim=1).float()


class AllShards:
    """N shard caches in one process, and a merge between them."""

    def __init__(self, decoder: Decoder, batch: int, capacity: int, size: int, merge: Merge, interleave: int = 1):
        self.decoder, self.merge = decoder, merge
        self.shards = [
            ShardCache(decoder, batch, capacity, rank=rank, size=size, interleave=interleave) for rank in range(size)
        ]
        self.counts: list[Tensor] = []

    def append(self, layer: int, rows: Tensor, positions: Tensor, entries: Tensor) -> None:
        for shard in self.shards:
            shard.append(layer, rows, positions, entries)

    def attend(self, layer: int, query: Tensor, chosen: Tensor) -> Tensor:
        parts = zip(*(shard.partial(layer, query, chosen) for shard in self.shards), strict=True)
        out, lse, counts = (torch.stack(part) for part in parts)
        self.counts.append(counts)
        return torch.einsum("bhl,hlv->bhv", self.merge((out, lse, counts)), self.decoder.layers[layer].w_uv)


class Worlds:
    """One decoder and one text, decoded whole once, and in shards as often as asked."""

    def __init__(self, text: bytes = TEXT, tokens: int = TOKENS) -> None:
        self.decoder = Decoder(DecoderConfig())
        self.prompt = torch.tensor(list(text))
        self.filled = self.decoder.prefill(self.prompt[:-1])
        self.lengths, self.tokens = prefixes(text), tokens
        self.size = (len(self.lengths), len(text) + tokens)
        self.whole = self.run(WholeCache(self.decoder, *self.size))

    def run(self, attention: Any) -> Trace:
        return decode(self.decoder, self.prompt, self.filled, self.lengths, self.tokens, attention)

    def sharded(self, size: int, merge: Merge = merge, interleave: int = 1) -> tuple[Trace, AllShards]:
        shards = AllShards(self.decoder, *self.size, size, merge, interleave)
        return self.run(shards), shards


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the demo's processes: matrices this small only wait for more threads
    yield Worlds()
    torch.set_num_threads(threads)


# ---------------------------------------------------------------- the model


@pytest.mark.parametrize("interleave", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_shards_choose_the_tokens_of_the_whole_cache(worlds: Worlds, size: int, interleave: int) -> None:
    trace, _ = worlds.sharded(size, interleave=interleave)
    assert torch.equal(trace.tokens, worlds.whole.tokens)
    assert max(differences(trace, worlds.whole)) < TOLERANCE


def test_some_ranks_own_none_of_a_rows_chosen_entries(worlds: Worlds) -> None:
    _, shards = worlds.sharded(4)
    counts = torch.stack(shards.counts)  # [steps x layers, N, B]
    assert (counts == 0).any()
    assert (counts > 0).any(1).all(), "a row that is empty on every rank attends to nothing"
    assert len(counts.sum(1).unique()) > 1, "rows of one batch should have different counts"


def test_an_empty_row_is_garbage_that_only_its_count_tells_of() -> None:
    shard = ShardCache(Decoder(DecoderConfig()), 1, 8, rank=3, size=4)
    query = torch.randn(1, 24, DecoderConfig().entry_dim)
    out, lse, counts = shard.partial(0, query, torch.tensor([[0, 1, 6, -1]]))
    assert counts.tolist() == [0]
    assert out.isnan().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize(
    "fault",
    [
        "counts ignored",
        "LSE in another base",
        "LSE ignored",
        "a rank not heard",
        "heads permuted",
        "ranks' LSE swapped",
    ],
)
def test_a_faulty_merge_changes_the_tokens(worlds: Worlds, fault: str) -> None:
    def faulty(partials: Partials) -> Tensor:
        out, lse, counts = partials
        if fault == "counts ignored":
            counts = torch.ones_like(counts)
        elif fault == "LSE in another base":
            lse = lse * math.log(2)
        elif fault == "LSE ignored":
            lse = torch.zeros_like(lse)
        elif fault == "a rank not heard":
            counts = counts * (torch.arange(len(counts)) != 2)[:, None]
        elif fault == "ranks' LSE swapped":
            lse = lse.roll(1, 0)
        merged = merge((out, lse, counts))
        return merged.roll(6, 1) if fault == "heads permuted" else merged

    trace, _ = worlds.sharded(4, faulty)
    assert not torch.equal(trace.tokens, worlds.whole.tokens)
    assert not judge([_report(trace, worlds.whole)], "float32").passed


def test_a_shard_holds_no_more_than_its_share() -> None:
    decoder = Decoder(DecoderConfig())
    shards = [ShardCache(decoder, 2, 100, rank=rank, size=4, interleave=3) for rank in range(4)]
    positions = torch.arange(100)
    entries = torch.arange(1.0, 101.0)[:, None].expand(100, decoder.config.entry_dim)
    for shard in shards:
        shard.append(0, torch.zeros(100, dtype=torch.long), positions, entries)
    held = [cache._entries[0][0, : cache.slots, 0] for cache in shards]
    assert all(len(h) == 27 for h in held)  # nine blocks of three, where all have 33 and a third
    kept = torch.cat(held)
    assert sorted(kept[kept > 0].tolist()) == list(range(1, 101))


def test_a_prefilled_prefix_is_what_decoding_it_leaves(worlds: Worlds) -> None:
    decoder, length = worlds.decoder, 40
    cache, index = WholeCache(decoder, 1, length), IndexCache(decoder, 1, length)
    for position in range(length):
        decoder.step(worlds.prompt[position : position + 1], torch.tensor([position]), index, cache)
    prefilled, prefilled_index = WholeCache(decoder, 1, length), IndexCache(decoder, 1, length)
    fill(worlds.filled, [length], prefilled, prefilled_index)
    for layer in range(decoder.config.num_layers):
        torch.testing.assert_close(cache._entries[layer], prefilled._entries[layer], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(index.keys[layer], prefilled_index.keys[layer], rtol=0, atol=TOLERANCE)


def test_a_context_of_one_byte() -> None:
    short = Worlds(b"x", 3)
    trace, _ = short.sharded(4)
    assert torch.equal(trace.tokens, short.whole.tokens)
    assert short.whole.gaps.isinf().all()  # nothing was ever left out


# ---------------------------------------------------------------- the judgement


def _report(trace: Trace, whole: Trace, **variant: Any) -> RankReport:
    return RankReport(
        variants=[_variant(trace, whole, **variant)], skipped={}, empty=0, pairs=0, device="cpu", explained="",
        reference=Reference(tokens=whole.tokens.T.tolist(), logit_margin=1.0, choice_gap=1.0),
    )  # fmt: skip


def _variant(trace: Trace, whole: Trace, **changes: Any) -> Variant:
    attention, logits = differences(trace, whole)
    given = {
        "transport": "one", "deterministic": True, "projection": "before", "mode": "eager", "merge_us": [],
        "step_us": 1.0, "wire_bytes": 0, "tokens": trace.tokens.T.tolist(), "attention_difference": attention,
        "logit_difference": logits,
    }  # fmt: skip
    return Variant(**{**given, **changes})


def test_a_rank_that_chooses_alone_is_named(worlds: Worlds) -> None:
    other = worlds.whole.tokens.clone()
    other[5, 2] ^= 1
    reports = [_report(worlds.whole, worlds.whole), _report(worlds.whole._replace(tokens=other), worlds.whole)]
    passed, failures = judge(reports, "float32")
    assert not passed
    assert len(failures) == 1
    assert "rank 1" in failures[0]
    assert "request 2 at token 5" in failures[0]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, 0.01])
def test_the_same_tokens_from_wrong_outputs_fail(worlds: Worlds, wrong: float) -> None:
    heads = worlds.whole.heads.clone()
    heads[3, 1, 0, 7, 2] += wrong
    passed, failures = judge([_report(worlds.whole._replace(heads=heads), worlds.whole)], "float32")
    assert not passed
    assert "attention is off" in failures[0]


def test_nothing_is_compared_after_tokens_parted(worlds: Worlds) -> None:
    tokens, heads = worlds.whole.tokens.clone(), worlds.whole.heads.clone()
    tokens[4, 1] ^= 1
    heads[5:, :, 1] += 100
    assert differences(worlds.whole._replace(tokens=tokens, heads=heads), worlds.whole) == (0.0, 0.0)
    heads[4, :, 1] += 100
    assert differences(worlds.whole._replace(tokens=tokens, heads=heads), worlds.whole)[0] > 99


def test_rounding_may_change_tokens_but_not_apart(worlds: Worlds) -> None:
    """Partials in bfloat16: other tokens than in float32 are fine; ranks and deterministic transports agree."""
    other, third = worlds.whole.tokens.clone(), worlds.whole.tokens.clone()
    other[5, 2] ^= 1
    third[7, 1] ^= 1

    def reports(*by_rank: tuple[Tensor, Tensor], deterministic: bool = True) -> list[RankReport]:
        """Of each rank, what it chose over two transports."""
        found = []
        for tokens in by_rank:
            one, two = (
                _variant(worlds.whole._replace(tokens=mine), worlds.whole, transport=name, deterministic=sure)
                for mine, name, sure in zip(tokens, ("one", "two"), (True, deterministic), strict=True)
            )
            found.append(replace(_report(worlds.whole, worlds.whole), variants=[one, two]))
        return found

    assert judge(reports((other, other), (other, other)), "bfloat16").passed
    assert not judge(reports((other, other), (other, other)), "float32").passed
    parted = judge(reports((other, other), (other, third)), "bfloat16").failures
    assert len(parted) == 1
    assert "over two, eager, with W_UV before the merge: rank 1 chose another token than rank 0 over one" in parted[0]
    assert not judge(reports((other, third), (other, third)), "bfloat16").passed
    assert judge(reports((other, third), (other, third), deterministic=False), "bfloat16").passed
    assert not judge(reports((other, third), (other, other), deterministic=False), "bfloat16").passed


def test_of_short_partials_the_first_layer_is_compared(worlds: Worlds) -> None:
    heads = worlds.whole.heads.clone()
    heads[:, 1] += 100
    assert differences(worlds.whole._replace(heads=heads), worlds.whole, 1)[0] == 0
    heads[3, 0, 0, 7, 2] += 1
    assert differences(worlds.whole._replace(heads=heads), worlds.whole, 1)[0] > 0.9


# ---------------------------------------------------------------- graphs and threads, as on a GPU


class Pretended:
    """In the place of a graph: the step, made again by each replay, at a capture's time only noted."""

    def __init__(self, step: Callable[[], Any], device: torch.device) -> None:
        self.replay = step


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_that_is_replayed_chooses_what_an_eager_one_does(
    worlds: Worlds, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor of a step but its caches and its token is made in it, so that a replay finds what it wrote."""
    monkeypatch.setattr(running, "captured", Pretended)

    def body(group: Any) -> list[Trace]:
        traces = []
        for mode in ("eager", GRAPH):
            common = {"max_tokens": 4, "num_heads": 24, "dtype": getattr(torch, dtype), "lse_base": "e"}
            shape = dcpcomm.MergeShape(head_dim=64, v_head_dim=16, **common)
            heads = dcpcomm.MergeShape(head_dim=16, scatter="none", **common)
            with (
                torch.inference_mode(),
                dcpcomm.DCPMerger(group, shape, device="cpu") as merger,
                dcpcomm.DCPMerger(group, heads, device="cpu") as gatherer,
            ):
                shard = ShardCache(worlds.decoder, *worlds.size, rank=group.rank, size=2, dtype=getattr(torch, dtype))
                watch = Stopwatch(torch.device("cpu"), 2, lambda: None)
                attention = MergedAttention(worlds.decoder, shard, merger, gatherer, 4, watch)
                traces.append(
                    decode(
                        worlds.decoder, worlds.prompt, worlds.filled, worlds.lengths, worlds.tokens, attention,
                        stopwatch=watch, mode=mode,
                    )
                )  # fmt: skip
                assert [len(one) for one in (watch.steps_us, *watch.laps_us)] == [worlds.tokens] * 3
        return traces

    eager, replayed = zip(*LoopbackWorld(2, "cpu").run(body), strict=True)
    for traces in (eager, replayed):
        for field in Trace._fields:
            assert torch.equal(getattr(traces[0], field), getattr(eager[0], field)), field
            assert torch.equal(getattr(traces[1], field), getattr(eager[0], field)), field
    if dtype == "float32":
        assert torch.equal(eager[0].tokens, worlds.whole.tokens)


def test_threads_over_every_transport_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on one GPU, but that the device is a CPU."""
    monkeypatch.setattr(running, "_gpu", lambda: torch.device("cpu"))
    told: list[Any] = []
    settings = Settings(context=TEXT[:60], tokens=4, transport="all")
    reports = run_threads(settings, 3, lambda rank, event: told.append((rank, *event)))
    assert judge(reports, "float32") == (True, [])
    used = {(variant.transport, variant.projection) for variant in reports[0].variants}
    assert used == {
        (name, order) for name in ("gloo_a2a", "loopback", "loopback_peer") for order in ("before", "after")
    }
    assert "works on cuda" in reports[0].skipped["nccl_a2a"]
    assert {rank for rank, *_ in told} == {0}
    assert all(0 < done <= total for _, done, total, _ in told)


def test_a_thread_that_fails_does_not_leave_the_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_gpu", lambda: torch.device("cpu"))
    whole = Decoder.prefill

    def fails(self: Any, *args: Any) -> Any:
        if threading.current_thread().name == "rank 1":
            raise ValueError("planted")
        return whole(self, *args)

    monkeypatch.setattr(Decoder, "prefill", fails)
    with pytest.raises(RankFailed, match="planted"):
        run_threads(Settings(context=TEXT[:60], tokens=2, transport="loopback"), 2, lambda rank, event: None)
