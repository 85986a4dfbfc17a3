"""The demonstration: decode with the KV cache in shards and with it whole, over one transport or over all.

`run_rank` runs on every rank. All ranks hold the same weights and prefill the same text. Then each keeps only
its share of the KV cache, and from there on they meet in mergers alone: in `merge_and_project`, and in a second merger
that brings the finished heads together before the output projection. Rank 0 then decodes once more by itself, with the
whole cache and a plain softmax. `judge` compares.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import dcpcomm
from dcpcomm.demo.judge import RankReport, Trace, Variant, compared, summary
from dcpcomm.demo.model import (
    Attention,
    Decoder,
    DecoderConfig,
    IndexCache,
    Prefill,
    ShardCache,
    Step,
    WholeCache,
    fill,
)
from dcpcomm.demo.stopwatch import Stopwatch
from dcpcomm.errors import TransportTimeout, TransportUnavailable
from dcpcomm.graphs import captured
from dcpcomm.launch import emit, own_device
from dcpcomm.registry import load_transport, registered_transports
from dcpcomm.testing import LoopbackWorld

__all__ = ["Settings", "decode", "prefixes", "run_rank", "run_threads"]

EAGER, GRAPH = "eager", "graph"
_MEETING_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run; the same on every rank.

    Args:
        context: the text, its bytes being the tokens.
        tokens: how many to generate for each request.
        projection: the order in which `DCPMerger` projects and merges: "before", "after" or "auto".
        transport: a registered name, "all" for every one that can carry the merges, or None to leave the choice to
            dcpcomm.
        interleave: neighbouring KV entries that stay on one rank.
        dtype: of the partials and of W_UV.
        device: "cpu", "cuda", or None for a GPU where there is one.
    """

    context: bytes
    tokens: int = 32
    projection: str = "auto"
    transport: str | None = None
    interleave: int = 1
    dtype: str = "float32"
    device: str | None = None
    decoder: DecoderConfig = field(default_factory=DecoderConfig)


class Place(NamedTuple):
    """A rank's: what its mergers take as group, which of how many it is, its device, and what returns on the host
    when all ranks have come.
    """

    group: Any
    rank: int
    size: int
    device: torch.device
    meet: Callable[[], None]


class MergedAttention:
    """A shard of the KV cache, and attention over all shards by a merger: `Attention` for N ranks.

    Args:
        merger: of latents; divides heads over ranks.
        gatherer: a merger of finished heads. Each head is on one rank alone, with weight 1: all get it bit for bit.
    """

    def __init__(
        self,
        decoder: Decoder,
        shard: ShardCache,
        merger: dcpcomm.DCPMerger,
        gatherer: dcpcomm.DCPMerger,
        batch: int,
        stopwatch: Stopwatch,
    ) -> None:
        self._shard, self._merger, self._gatherer, self._stopwatch = shard, merger, gatherer, stopwatch
        config, dtype, device = decoder.config, shard.dtype, decoder.device
        mine = config.num_heads // shard.size
        self._mine = slice(shard.rank * mine, (shard.rank + 1) * mine)
        self._w_uv = [merger.gather_w_uv(layer.w_uv[self._mine].to(dtype)) for layer in decoder.layers]
        # What other ranks hold is garbage here, and has no influence: its LSE says that there is none.
        self._heads = torch.full((batch, config.num_heads, config.v_head_dim), torch.nan, dtype=dtype, device=device)
        self._lse = torch.full((batch, config.num_heads), -torch.inf, device=device)
        self._lse[:, self._mine] = 0.0
        self.empty = torch.zeros((), dtype=torch.int64, device=device)

    def append(self, layer: int, rows: Tensor, positions: Tensor, entries: Tensor) -> None:
        self._shard.append(layer, rows, positions, entries)

    def attend(self, layer: int, query: Tensor, chosen: Tensor) -> Tensor:
        latent, lse, counts = self._shard.partial(layer, query, chosen)
        self.empty += (counts == 0).sum()
        with self._stopwatch.lap(layer):
            self._merger.merge_and_project(
                latent, lse, self._w_uv[layer], valid_counts=counts, out=self._heads[:, self._mine], tag=layer
            )
        heads = self._gatherer.merge(self._heads, self._lse, tag=layer)
        assert isinstance(heads, Tensor)  # a pair only with return_lse
        return heads.float()


def prefixes(context: bytes) -> list[int]:
    """How much of the context each request has read. The shortest leaves most ranks with no entry at all."""
    return [len(context), -(-len(context) // 2), -(-len(context) // 10), min(2, len(context))]


def run_rank(settings: Settings) -> RankReport:
    """One rank's part, in a process of its own; collective over the default process group. Rank 0 emits
    `(done, total, what)`.
    """
    place = Place(None, dist.get_rank(), dist.get_world_size(), own_device(settings.device), dist.barrier)
    return run(settings, place, emit)


def run_threads(settings: Settings, size: int, on_event: Callable[[int, Any], None]) -> list[RankReport]:
    """All ranks' parts, as threads that share one GPU."""
    world, device = LoopbackWorld(size), _gpu()
    barrier = threading.Barrier(size, timeout=_MEETING_S)

    def meet() -> None:
        try:
            barrier.wait()
        except threading.BrokenBarrierError:
            raise TransportTimeout("another rank has failed, or did not come in time", ()) from None

    def body(group: Any) -> RankReport:
        place = Place(group, group.rank, size, device, meet)
        try:
            return run(settings, place, lambda event: on_event(0, event))
        except BaseException:
            barrier.abort()
            raise

    return world.run(body, timeout_s=600.0)


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def run(settings: Settings, place: Place, say: Callable[[Any], None]) -> RankReport:
    """One rank's part."""
    with torch.inference_mode():
        demonstration = _Demonstration(settings, place, say)
        names: list[str | None] = [settings.transport]
        if settings.transport == "all":
            names = list(registered_transports()) if place.size > 1 else [None]
        skipped: dict[str, str] = {}
        for name in names:
            try:
                demonstration.try_transport(name)
            except TransportUnavailable as error:
                if settings.transport != "all":
                    raise
                skipped[str(name)] = str(error).splitlines()[-1].strip().removeprefix(f"{name}: ")
        return demonstration.report(skipped)


class _Demonstration:
    """What a rank keeps from one variant to the next."""

    def __init__(self, settings: Settings, place: Place, say: Callable[[Any], None]) -> None:
        self._settings, self._place = settings, place
        self._on_gpu = place.device.type == "cuda"
        self._lengths = prefixes(settings.context)
        self._batch, self._capacity = len(self._lengths), len(settings.context) + settings.tokens
        self._decoder = Decoder(settings.decoder, place.device)
        self._prompt = torch.tensor(list(settings.context), device=place.device)
        self._progress = _Progress(say if place.rank == 0 else lambda event: None)
        # The last byte of each request's context is its first decode step: every token comes of a merge.
        self._filled = self._decoder.prefill(
            self._prompt[:-1],
            lambda rows: self._progress.more(
                rows, settings.decoder.num_layers * len(settings.context), "reading the context"
            ),
        )
        self._variants: list[Variant] = []
        self._empty, self._explained = 0, ""
        self._whole: Trace | None = None
        if place.rank == 0 or self._on_gpu:
            cache = WholeCache(self._decoder, self._batch, self._capacity)
            self._whole = self._decoded(cache, "decoding on one rank")
        if self._on_gpu:
            # What is done for the first time waits for the GPU, and might for ranks on it that wait for this one.
            self._decoded(_Rehearsal(self._decoder, self._shard()), "rehearsing")
        place.meet()

    def try_transport(self, name: str | None) -> None:
        """Decode over it, or over what dcpcomm chooses, in all ways.

        Raises:
            TransportUnavailable: it can't carry the merges, on any rank.
        """
        capturable = name is None or load_transport(name).capabilities.graph_capturable
        for mode in [EAGER, GRAPH] if self._on_gpu and capturable else [EAGER]:
            first = self._merged(name, self._settings.projection, mode)
            other = self._merged(name, "after" if first.projection == "before" else "before", mode)
            self._variants += [first, other]

    def report(self, skipped: dict[str, str]) -> RankReport:
        if not self._variants:
            raise TransportUnavailable("; ".join(f"{name}: {reason}" for name, reason in skipped.items()))
        rank, device = self._place.rank, self._place.device
        return RankReport(
            variants=self._variants,
            skipped=skipped,
            empty=self._empty,
            pairs=self._settings.tokens * self._batch * len(self._decoder.layers),
            device=torch.cuda.get_device_name(device) if self._on_gpu else "cpu",
            explained=self._explained,
            reference=summary(self._whole) if rank == 0 and self._whole is not None else None,
        )

    def _merged(self, name: str | None, projection: str, mode: str) -> Variant:
        config, place, batch = self._settings.decoder, self._place, self._batch
        with (
            self._merger(name, mode, config.kv_lora_rank, projection, v_head_dim=config.v_head_dim) as merger,
            self._merger(name, mode, config.v_head_dim, projection, scatter="none") as gatherer,
        ):
            carrier, order = merger.transport_for(batch), merger.projection_order(batch)
            stopwatch = Stopwatch(place.device, config.num_layers, place.meet)
            attention = MergedAttention(self._decoder, self._shard(), merger, gatherer, batch, stopwatch)
            what = f"decoding on {place.size} ranks over {carrier}, {mode}, W_UV {order} the merge"
            trace = self._decoded(attention, what, stopwatch, mode)
            merger.check()
            gatherer.check()
            if not self._variants and not self._explained:
                self._empty, self._explained = int(attention.empty), merger.explain()
            variant = Variant(
                transport=carrier,
                deterministic=carrier is None or load_transport(carrier).capabilities.deterministic,
                projection=order,
                mode=mode,
                tokens=trace.tokens.T.tolist(),
                merge_us=[statistics.median(times) for times in stopwatch.laps_us],
                step_us=statistics.median(stopwatch.steps_us),
                wire_bytes=merger.wire_bytes(batch, config.v_head_dim if order == "before" else config.kv_lora_rank),
            )
        return (
            variant
            if place.rank or self._whole is None
            else compared(variant, trace, self._whole, self._settings.dtype)
        )

    def _decoded(self, attention: Attention, what: str, stopwatch: Stopwatch | None = None, mode: str = EAGER) -> Trace:
        return decode(
            self._decoder, self._prompt, self._filled, self._lengths, self._settings.tokens, attention,
            on_step=lambda: self._progress.more(1, self._settings.tokens, what),
            stopwatch=stopwatch, mode=mode, meet=self._place.meet,
        )  # fmt: skip

    def _shard(self) -> ShardCache:
        place, settings = self._place, self._settings
        return ShardCache(
            self._decoder, self._batch, self._capacity, rank=place.rank, size=place.size,
            interleave=settings.interleave, dtype=getattr(torch, settings.dtype),
        )  # fmt: skip

    def _merger(self, name: str | None, mode: str, width: int, projection: str, **more: Any) -> dcpcomm.DCPMerger:
        shape = dcpcomm.MergeShape(
            max_tokens=self._batch,
            num_heads=self._settings.decoder.num_heads,
            head_dim=width,
            dtype=getattr(torch, self._settings.dtype),
            lse_base="e",
            require_graph=mode == GRAPH,
            **more,
        )
        choice = {"projection": projection} | ({"transport": name} if name else {})
        return dcpcomm.DCPMerger(self._place.group, shape, config=choice, device=self._place.device)


class _Rehearsal:
    """As `MergedAttention`, but for the merges."""

    def __init__(self, decoder: Decoder, shard: ShardCache) -> None:
        self._decoder, self._shard = decoder, shard

    def append(self, layer: int, rows: Tensor, positions: Tensor, entries: Tensor) -> None:
        self._shard.append(layer, rows, positions, entries)

    def attend(self, layer: int, query: Tensor, chosen: Tensor) -> Tensor:
        latent, _, counts = self._shard.partial(layer, query, chosen)
        latent = latent.nan_to_num(0.0) * (counts > 0)[:, None, None]
        return torch.einsum("bhl,hlv->bhv", latent, self._decoder.layers[layer].w_uv.to(latent.dtype)).float()


def decode(
    decoder: Decoder,
    prompt: Tensor,
    filled: Prefill,
    lengths: list[int],
    tokens: int,
    attention: Attention,
    *,
    on_step: Callable[[], None] = lambda: None,
    stopwatch: Stopwatch | None = None,
    mode: str = EAGER,
    meet: Callable[[], None] = lambda: None,
) -> Trace:
    """Greedy decode, `tokens` steps; sequence b continues the first `lengths[b]` tokens of `prompt` `[T]`.

    Args:
        mode: "eager", or "graph": the whole step is captured once and replayed.
        meet: of all ranks, on the host.
    """
    device = decoder.device
    stopwatch = stopwatch or Stopwatch(device, 0, meet)
    index = IndexCache(decoder, len(lengths), len(prompt) + tokens)
    fill(filled, [length - 1 for length in lengths], attention, index)
    positions = torch.tensor(lengths, device=device) - 1
    token = prompt[positions]
    latest: Step

    def step() -> None:
        nonlocal latest
        latest = decoder.step(token, positions, index, attention)
        token.copy_(latest.logits.argmax(-1))
        positions.add_(1)

    if mode == GRAPH:
        replay = captured(step, device).replay
        meet()  # a capture takes memory, which may wait for a replay of another rank on this GPU, which waits for us
    else:
        replay = step
    chosen, steps = [], []
    for _ in range(tokens):
        with stopwatch.step():
            replay()
        chosen.append(token.clone())
        steps.append([part.clone() for part in latest])  # the next replay writes there
        on_step()
    logits, heads, gaps = (torch.stack(part) for part in zip(*steps, strict=True))
    return Trace(torch.stack(chosen), logits, heads, gaps)


class _Progress:
    """Counts what is done of the part at hand, and tells."""

    def __init__(self, say: Callable[[Any], None]) -> None:
        self._say, self._part, self._done = say, "", 0

    def more(self, units: int, total: int, part: str) -> None:
        """`units` more of the `total` that `part` takes."""
        if part != self._part:
            self._part, self._done = part, 0
        self._done += units
        self._say((self._done, total, part))
