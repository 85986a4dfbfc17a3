"""The demo: shards and whole cache agree, a planted fault is seen, and the command says which it was."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dcpcomm
from dcpcomm.cli import main
from dcpcomm.cli.demo import show
from dcpcomm.demo.model import Decoder, DecoderConfig, IndexCache, ShardCache, WholeCache, fill
from dcpcomm.demo.run import (
    TOLERANCE,
    Order,
    RankReport,
    Reference,
    Settings,
    Trace,
    decode,
    differences,
    judge,
    prefixes,
    run_rank,
)
from dcpcomm.reference import merge_partials

TEXT = (
    b"A rank that holds none of the chosen entries has nothing to say, and must not be heard. "
    b"The others say what they know; their words are weighed, and added up. " * 3
)
TOKENS = 12

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
            ShardCache(decoder.config, batch, capacity, rank=rank, size=size, interleave=interleave)
            for rank in range(size)
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
    shard = ShardCache(DecoderConfig(), 1, 8, rank=3, size=4)
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
    assert not judge([_report(trace, worlds.whole)]).passed


def test_a_shard_holds_no_more_than_its_share() -> None:
    config = DecoderConfig()
    shards = [ShardCache(config, 2, 100, rank=rank, size=4, interleave=3) for rank in range(4)]
    positions = torch.arange(100)
    entries = torch.arange(1.0, 101.0)[:, None].expand(100, config.entry_dim)
    for shard in shards:
        shard.append(0, torch.zeros(100, dtype=torch.long), positions, entries)
    held = [cache._entries[0][0, :, 0] for cache in shards]
    assert all(len(h) == 27 for h in held)  # nine blocks of three, where all have 33 and a third
    kept = torch.cat(held)
    assert sorted(kept[kept > 0].tolist()) == list(range(1, 101))


def test_a_prefilled_prefix_is_what_decoding_it_leaves(worlds: Worlds) -> None:
    decoder, length = worlds.decoder, 40
    cache, index = WholeCache(decoder, 1, length), IndexCache(decoder.config, 1, length)
    for position in range(length):
        decoder.step(worlds.prompt[position : position + 1], torch.tensor([position]), index, cache)
    prefilled, prefilled_index = WholeCache(decoder, 1, length), IndexCache(decoder.config, 1, length)
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


def _report(trace: Trace, whole: Trace) -> RankReport:
    attention, logits = differences(trace, whole)
    order = Order(
        projection="before",
        tokens=trace.tokens.T.tolist(),
        merge_us=[],
        wire_bytes=0,
        attention_difference=attention,
        logit_difference=logits,
    )
    reference = Reference(tokens=whole.tokens.T.tolist(), logit_margin=1.0, choice_gap=1.0)
    return RankReport(orders=[order], empty=0, pairs=0, transport=None, explained="", reference=reference)


def test_a_rank_that_chooses_alone_is_named(worlds: Worlds) -> None:
    other = worlds.whole.tokens.clone()
    other[5, 2] ^= 1
    reports = [_report(worlds.whole, worlds.whole), _report(worlds.whole._replace(tokens=other), worlds.whole)]
    passed, failures = judge(reports)
    assert not passed
    assert len(failures) == 1
    assert "rank 1" in failures[0]
    assert "request 2 at token 5" in failures[0]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, 0.01])
def test_the_same_tokens_from_wrong_outputs_fail(worlds: Worlds, wrong: float) -> None:
    heads = worlds.whole.heads.clone()
    heads[3, 1, 0, 7, 2] += wrong
    passed, failures = judge([_report(worlds.whole._replace(heads=heads), worlds.whole)])
    assert not passed
    assert "attention is off" in failures[0]


def test_nothing_is_compared_after_tokens_parted(worlds: Worlds) -> None:
    tokens, heads = worlds.whole.tokens.clone(), worlds.whole.heads.clone()
    tokens[4, 1] ^= 1
    heads[5:, :, 1] += 100
    assert differences(worlds.whole._replace(tokens=tokens, heads=heads), worlds.whole) == (0.0, 0.0)
    heads[4, :, 1] += 100
    assert differences(worlds.whole._replace(tokens=tokens, heads=heads), worlds.whole)[0] > 99


# ---------------------------------------------------------------- the command


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of `dcpcomm demo ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["dcpcomm", "demo", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


def test_json_is_pure_and_passes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(monkeypatch, capsys, "--json", "--tokens", "8", "--ranks", "4")
    result = json.loads(out)
    assert (status, err, result["passed"], result["failures"]) == (0, "", True, [])
    assert result["ranks"] == 4
    assert result["transport"] == "gloo_a2a"
    assert 0 < result["empty_pairs"] < result["pairs"] == 4 * 4 * 2 * 8
    assert all(r["tokens"] == r["reference_tokens"] and len(r["tokens"]) == 8 for r in result["requests"])
    sent = {order["projection"]: order["wire_bytes_per_rank"] for order in result["orders"]}
    assert 2 * sent["before"] < sent["after"]
    assert all(len(order["merge_median_us"]) == 2 for order in result["orders"])
    assert result["min_logit_margin"] > 100 * max(order["max_logit_difference"] for order in result["orders"])


def test_people_are_told_what_is_shown_and_that_it_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"[bold]not markup[/]" * 500)
    status, out, err = run(
        monkeypatch, capsys, "--ranks", "2", "--tokens", "3", "--context", str(text), "--projection", "after"
    )
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert "KV cache sharded over 2 processes" in lines[0]
    assert lines[-1].startswith("PASS")
    assert "1308 more left out" in " ".join(out.split())
    assert out.index("after merge") < out.index("before merge"), "the order that was asked for comes first"


def test_one_rank_needs_nobody(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(monkeypatch, capsys, "--json", "--ranks", "1", "--tokens", "2", "--projection", "before")
    result = json.loads(out)
    assert (status, result["passed"], result["transport"], result["empty_pairs"]) == (0, True, None, 0)
    assert [order["projection"] for order in result["orders"]] == ["before", "after"]


def run_rank_deaf_to_counts(settings: Settings) -> RankReport:
    """`run_rank` with a merger that drops the valid counts."""
    whole = dcpcomm.DCPMerger.merge_and_project

    def deaf(self: Any, *args: Any, valid_counts: Any, **keywords: Any) -> Any:
        return whole(self, *args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcpcomm.DCPMerger, "merge_and_project", deaf)
        return run_rank(settings)


def test_a_merge_that_ignores_counts_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dcpcomm.demo.run.run_rank", run_rank_deaf_to_counts)
    status, out, _ = run(monkeypatch, capsys, "--json", "--tokens", "4", "--ranks", "4")
    result = json.loads(out)
    assert (status, result["passed"]) == (1, False)
    assert any("chose another token" in failure for failure in result["failures"])
    assert result["orders"][0]["max_attention_difference"] is None

    show(result)
    told = capsys.readouterr().out
    assert "FAIL" in told
    assert "not finite" in told
    assert "PASS" not in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "5"], "24 heads divide over 1, 2, 3, 4, 6, 8, 12, 24"),
        (["--ranks", "0"], "--ranks is 0"),
        (["--ranks", "-4"], "--ranks is -4"),
        (["--tokens", "0"], "--tokens is 0; expected 1 or more"),
        (["--context", "no/such/file"], "no/such/file: No such file"),
        (["--context", "."], "Is a directory"),
        (["--context", "EMPTY"], "is empty"),
        (["--transport", "glo_a2a"], "did you mean 'gloo_a2a'"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    said: str,
) -> None:
    (tmp_path / "empty").touch()
    status, out, err = run(monkeypatch, capsys, *(str(tmp_path / "empty") if a == "EMPTY" else a for a in arguments))
    assert (status, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_ranks_against_torchrun_is_refused_instead_of_ignored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    status, _, err = run(monkeypatch, capsys, "--ranks", "4")
    assert status == 2
    assert "--ranks is 4, but torchrun started 2" in err


def test_a_transport_that_cannot_serve_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(monkeypatch, capsys, "--ranks", "2", "--transport", "loopback")
    assert (status, out) == (1, "")
    assert "loopback" in err
    assert "Traceback" not in err


def test_under_torchrun_rank_0_alone_speaks() -> None:
    launched = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("-m", "dcpcomm", "demo", "--json", "--tokens", "2"),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert launched.returncode == 0, launched.stderr
    assert json.loads(launched.stdout)["ranks"] == 2
