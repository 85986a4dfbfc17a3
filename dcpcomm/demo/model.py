"""A small decoder with DeepSeek-style sparse latent attention, on random weights; a token is a byte.

It is here to be decoded twice, with its KV cache whole and with its KV cache in shards, so what matters to a
shard is done as an engine does it:

* A cache entry is one latent vector and one rope key, shared by all heads. Queries reach the latent through
  the absorbed W_UK, and attention returns a latent that W_UV turns into a head's output (MLA: DeepSeek-V2,
  arXiv 2405.04434).
* Each layer attends to its k best entries of the *whole* context, by the score of a small indexer (after the
  lightning indexer of DeepSeek-V3.2). Index keys are small, so every rank keeps them all, and comes to the
  same choice without asking.
* Entry i lives on rank (i // interleave) % N. A rank attends with all heads to those of the chosen entries
  that it owns, often none (Helix, arXiv 2507.07120).

A step asks nothing of the host, so that a CUDA graph can hold it.

Words: B rows, one per sequence; T positions; H heads; L, P, V and I, the widths of a latent, a rope key, a head's
output and an index key; J index heads; k chosen entries. Tensors are float32 unless they hold positions, tokens or
counts; a shard's partials may be shorter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

__all__ = [
    "CPU",
    "Attention",
    "Decoder",
    "DecoderConfig",
    "IndexCache",
    "Prefill",
    "ShardCache",
    "Step",
    "WholeCache",
    "fill",
]

CPU = torch.device("cpu")
VOCABULARY = 256
_PREFILL_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The decoder's size. L is four times V, as in DeepSeek-V2; 24 heads divide over 2, 3, 4, 6 and 8 ranks.

    Args:
        top_k: entries that each layer attends to; its length is the number of layers. Few in some layers, so
            that some ranks own none of them.
        seed: of the random weights.
    """

    hidden: int = 128
    num_heads: int = 24
    q_lora_rank: int = 64
    kv_lora_rank: int = 64
    nope_dim: int = 16
    rope_dim: int = 16
    v_head_dim: int = 16
    index_heads: int = 4
    index_dim: int = 16
    mlp_dim: int = 256
    top_k: tuple[int, ...] = (16, 4)
    rope_theta: float = 10000.0
    seed: int = 0

    @property
    def entry_dim(self) -> int:
        """L + P, the width of a KV cache entry."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def num_layers(self) -> int:
        return len(self.top_k)


class Attention(Protocol):
    """A KV cache and the attention over it: what differs between one process and many."""

    def append(self, layer: int, rows: Tensor, positions: Tensor, entries: Tensor) -> None:
        """Keep `entries` `[n, L + P]` as position `positions[i]` of sequence `rows[i]`."""

    def attend(self, layer: int, query: Tensor, chosen: Tensor) -> Tensor:
        """The output `[B, H, V]` of `query` `[B, H, L + P]` on positions `chosen` `[B, k]`, -1 for none."""


class Step(NamedTuple):
    """One decode step: `logits` `[B, 256]`, `heads` `[layers, B, H, V]` and `gaps` `[layers, B]`.

    A gap is how far the index score of the last entry chosen was above that of the first left out; inf where
    none was.
    """

    logits: Tensor
    heads: Tensor
    gaps: Tensor


class Prefill(NamedTuple):
    """What a prompt of T tokens leaves in caches, by layer: `entries` `[T, L + P]`, `index_keys` `[T, I]`.

    The caches of a prefix are the first rows of these: attention is causal.
    """

    entries: list[Tensor]
    index_keys: list[Tensor]


class _Projected(NamedTuple):
    """What attention needs of n rows: `query` `[n, H, L + P]`, `entry` `[n, L + P]`, and for the index
    `index_query` `[n, J, I]`, `index_weight` `[n, J]`, `index_key` `[n, I]`."""

    query: Tensor
    entry: Tensor
    index_query: Tensor
    index_weight: Tensor
    index_key: Tensor


class Layer:
    """One layer's weights, and the two halves of its work: before attention and after it."""

    def __init__(self, config: DecoderConfig, generator: torch.Generator, device: torch.device) -> None:
        c = self.config = config

        def weight(fan_in: int, *shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator) / math.sqrt(fan_in)).to(device)

        self.q_down = weight(c.hidden, c.hidden, c.q_lora_rank)
        self.q_up = 2 * weight(c.q_lora_rank, c.q_lora_rank, c.num_heads * (c.nope_dim + c.rope_dim))
        self.kv_down = weight(c.hidden, c.hidden, c.kv_lora_rank)
        self.k_rope = weight(c.hidden, c.hidden, c.rope_dim)
        self.w_uk = weight(c.kv_lora_rank, c.num_heads, c.nope_dim, c.kv_lora_rank)
        self.w_uv = weight(c.kv_lora_rank, c.num_heads, c.kv_lora_rank, c.v_head_dim)
        self.out = 2 * weight(c.num_heads * c.v_head_dim, c.num_heads * c.v_head_dim, c.hidden)
        self.index_q = weight(c.q_lora_rank, c.q_lora_rank, c.index_heads * c.index_dim)
        self.index_k = weight(c.hidden, c.hidden, c.index_dim)
        self.index_w = weight(c.hidden, c.hidden, c.index_heads)
        self.mlp_up = weight(c.hidden, c.hidden, c.mlp_dim)
        self.mlp_down = weight(c.mlp_dim, c.mlp_dim, c.hidden)

    def project(self, hidden: Tensor, positions: Tensor) -> _Projected:
        """Queries, the KV entry and the indexer's part of `hidden` `[n, hidden]` at `positions` `[n]`."""
        c, n = self.config, len(hidden)
        x = _rms_norm(hidden)
        q_latent = _rms_norm(x @ self.q_down)
        q = (q_latent @ self.q_up).view(n, c.num_heads, c.nope_dim + c.rope_dim)
        q_nope, q_rope = torch.split(q, [c.nope_dim, c.rope_dim], dim=-1)
        absorbed = torch.einsum("nhd,hdl->nhl", q_nope, self.w_uk)
        index_query = (q_latent @ self.index_q).view(n, c.index_heads, c.index_dim)
        return _Projected(
            query=torch.cat((absorbed, self._rotate(q_rope, positions[:, None])), dim=-1),
            entry=torch.cat((_rms_norm(x @ self.kv_down), self._rotate(x @ self.k_rope, positions)), dim=-1),
            index_query=self._rotate(index_query, positions[:, None]),
            index_weight=x @ self.index_w,
            index_key=self._rotate(x @ self.index_k, positions),
        )

    def finish(self, hidden: Tensor, heads: Tensor) -> Tensor:
        """Add the output projection of `heads` `[n, H, V]` and the MLP to `hidden` `[n, hidden]`."""
        hidden = hidden + heads.flatten(1) @ self.out
        return hidden + silu(_rms_norm(hidden) @ self.mlp_up) @ self.mlp_down

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of the last axis of `x`; `positions` broadcasts against `x` without that axis."""
        half = x.shape[-1] // 2
        frequency = self.config.rope_theta ** (-torch.arange(half, device=x.device) / half)
        angle = positions[..., None] * frequency
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=-1)


class Decoder:
    """The model: the same weights on every rank, from `config.seed` alone, whatever the device."""

    def __init__(self, config: DecoderConfig, device: torch.device = CPU) -> None:
        self.config, self.device = config, device
        generator = torch.Generator().manual_seed(config.seed)
        self.embedding = torch.randn(VOCABULARY, config.hidden, generator=generator).to(device)
        self.layers = [Layer(config, generator, device) for _ in config.top_k]
        head = torch.randn(config.hidden, VOCABULARY, generator=generator) / math.sqrt(config.hidden)
        self.head = head.to(device)

    def prefill(self, tokens: Tensor, on_rows: Callable[[int], None] = lambda rows: None) -> Prefill:
        """Run `tokens` `[T]` through all layers, in one place. `on_rows` hears of rows done, T a layer."""
        positions = torch.arange(len(tokens), device=self.device)
        hidden = self.embedding[tokens]
        filled = Prefill([], [])
        for layer, top_k in zip(self.layers, self.config.top_k, strict=True):
            p = layer.project(hidden, positions)
            filled.entries.append(p.entry)
            filled.index_keys.append(p.index_key)
            last = layer is self.layers[-1]  # nothing reads its output: the caches are all that a prompt leaves
            for rows in torch.split(positions, _PREFILL_ROWS):
                if not last:
                    scores = _index_scores(p.index_query[rows], p.index_weight[rows], p.index_key)
                    chosen, _ = _choose(scores, rows, top_k)
                    latent = _softmax_attention(p.query[rows], p.entry[chosen.clamp(min=0)], chosen >= 0, self.config)
                    hidden[rows] = layer.finish(hidden[rows], torch.einsum("nhl,hlv->nhv", latent, layer.w_uv))
                on_rows(len(rows))
        return filled

    def step(self, tokens: Tensor, positions: Tensor, index: IndexCache, attention: Attention) -> Step:
        """Feed one token per sequence, `tokens` `[B]` at `positions` `[B]`; both caches grow by these."""
        rows = torch.arange(len(tokens), device=self.device)
        hidden = self.embedding[tokens]
        heads, gaps = [], []
        for i, (layer, top_k) in enumerate(zip(self.layers, self.config.top_k, strict=True)):
            p = layer.project(hidden, positions)
            index.append(i, rows, positions, p.index_key)
            attention.append(i, rows, positions, p.entry)
            chosen, gap = _choose(_index_scores(p.index_query, p.index_weight, index.keys[i]), positions, top_k)
            heads.append(attention.attend(i, p.query, chosen))
            gaps.append(gap)
            hidden = layer.finish(hidden, heads[-1])
        return Step(_rms_norm(hidden) @ self.head, torch.stack(heads), torch.stack(gaps))


class IndexCache:
    """Index keys `[B, capacity, I]` of all positions, by layer. Every rank holds them all."""

    def __init__(self, decoder: Decoder, batch: int, capacity: int) -> None:
        width, device = decoder.config.index_dim, decoder.device
        self.keys = [torch.zeros(batch, capacity, width, device=device) for _ in decoder.layers]

    def append(self, layer: int, rows: Tensor, positions: Tensor, keys: Tensor) -> None:
        self.keys[layer][rows, positions] = keys


class WholeCache:
    """All KV entries in one place, with plain softmax attention over them: what shards must agree with."""

    def __init__(self, decoder: Decoder, batch: int, capacity: int) -> None:
        self._decoder = decoder
        width, device = decoder.config.entry_dim, decoder.device
        self._entries = [torch.zeros(batch, capacity, width, device=device) for _ in decoder.layers]

    def append(self, layer: int, rows: Tensor, positions: Tensor, entries: Tensor) -> None:
        self._entries[layer][rows, positions] = entries

    def attend(self, layer: int, query: Tensor, chosen: Tensor) -> Tensor:
        entries = self._entries[layer][torch.arange(len(query), device=query.device)[:, None], chosen.clamp(min=0)]
        latent = _softmax_attention(query, entries, chosen >= 0, self._decoder.config)
        return torch.einsum("bhl,hlv->bhv", latent, self._decoder.layers[layer].w_uv)


class ShardCache:
    """One rank's share of the KV entries, and the partial attention over it.

    Args:
        batch, capacity: sequences, and positions of each over all ranks.
        rank, size: which share of how many.
        interleave: neighbouring positions that stay together.
        dtype: of the latents that `partial` returns.
    """

    def __init__(
        self,
        decoder: Decoder,
        batch: int,
        capacity: int,
        *,
        rank: int,
        size: int,
        interleave: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config, self.rank, self.size, self.interleave, self.dtype = decoder.config, rank, size, interleave, dtype
        self.slots = -(-capacity // (size * interleave)) * interleave
        # One slot more takes what others own: to leave it out would mean to ask how much it is.
        width, device = self.config.entry_dim, decoder.device
        self._entries = [torch.zeros(batch, self.slots + 1, width, device=device) for _ in decoder.layers]

    def append(self, layer: int, rows: Tensor, positions: Tensor, entries: Tensor) -> None:
        """Keep those of `entries` `[n, L + P]` whose positions this rank owns."""
        slots = torch.where(self._owns(positions), self._slots(positions), self.slots)
        self._entries[layer][rows, slots] = entries

    def partial(self, layer: int, query: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Attention of `query` `[B, H, L + P]` to those positions of `chosen` `[B, k]` that this rank owns.

        Returns:
            the latent `[B, H, L]`, its natural-log LSE `[B, H]`, and how many entries each row saw here,
            int32 `[B]`. A row that saw none holds NaN and a *finite* LSE, as memory that a kernel skipped
            may: the count alone tells.
        """
        own = self._owns(chosen) & (chosen >= 0)
        rows = torch.arange(len(query), device=query.device)[:, None]
        entries = self._entries[layer][rows, torch.where(own, self._slots(chosen), 0)]
        scores = _scores(query, entries, own, self.config)
        lse = scores.logsumexp(-1)
        latent = (scores - lse[..., None]).exp() @ entries[..., : self.config.kv_lora_rank]
        counts = own.sum(1)
        lse = lse.masked_fill((counts == 0)[:, None], 0.0)  # and the latent is NaN by -inf minus -inf
        return latent.to(self.dtype), lse, counts.int()

    def _owns(self, positions: Tensor) -> Tensor:
        return positions // self.interleave % self.size == self.rank

    def _slots(self, positions: Tensor) -> Tensor:
        """Where an owned position lies in this rank's cache."""
        block = self.interleave * self.size
        return positions // block * self.interleave + positions % self.interleave


def fill(filled: Prefill, lengths: Sequence[int], cache: Attention, index: IndexCache) -> None:
    """Give sequence b the first `lengths[b]` positions of a prefilled text, in `cache` and in `index`."""
    for row, length in enumerate(lengths):
        positions = torch.arange(length, device=filled.entries[0].device)
        rows = torch.full_like(positions, row)
        for layer, (entries, keys) in enumerate(zip(*filled, strict=True)):
            index.append(layer, rows, positions, keys[:length])
            cache.append(layer, rows, positions, entries[:length])


def _rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _scores(query: Tensor, entries: Tensor, valid: Tensor, config: DecoderConfig) -> Tensor:
    """Scores `[n, H, k]` of `query` `[n, H, L + P]` on `entries` `[n, k, L + P]`; -inf if not `valid`."""
    scores = query @ entries.mT / math.sqrt(config.nope_dim + config.rope_dim)
    return scores.masked_fill(~valid[:, None], -torch.inf)


def _softmax_attention(query: Tensor, entries: Tensor, valid: Tensor, config: DecoderConfig) -> Tensor:
    """The latent `[n, H, L]`: softmax over the valid entries, and the sum of their latents by it."""
    return _scores(query, entries, valid, config).softmax(-1) @ entries[..., : config.kv_lora_rank]


def _index_scores(query: Tensor, weight: Tensor, keys: Tensor) -> Tensor:
    """Index scores `[n, S]` by `query` `[n, J, I]`, `weight` `[n, J]` and `keys` `[S, I]` or `[n, S, I]`.

    Softplus where DeepSeek has a ReLU: a ReLU scores many entries exactly 0, and a tie is no choice to
        compare.
    """
    return (weight[..., None] * softplus(query @ keys.mT)).sum(1)


def _choose(scores: Tensor, positions: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The best of `scores` `[n, S]` up to a row's own position: places `[n, k]`, -1 for none; gaps `[n]`."""
    future = torch.arange(scores.shape[1], device=scores.device) > positions[:, None]
    best, where = scores.masked_fill(future, -torch.inf).topk(min(top_k + 1, scores.shape[1]))
    chosen = torch.where(best > -torch.inf, where, -1)[:, :top_k]
    if best.shape[1] <= top_k:
        return chosen, torch.full((len(scores),), torch.inf, device=scores.device)
    gap = best[:, top_k - 1] - best[:, top_k]
    return chosen, torch.where(gap.isnan(), torch.inf, gap)  # -inf minus -inf: fewer than top_k to choose from
