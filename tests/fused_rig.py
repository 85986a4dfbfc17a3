"""N virtual ranks of the fused kernel whose memory is all on one device, one thread and stream each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from dcpcomm.combine.cuda_engine import CudaEngine
from dcpcomm.combine.engine import Layout, Partials, by_destination
from dcpcomm.combine.fused import FusedCall, FusedPeer, fused_bytes, places_of
from dcpcomm.combine.params import combine_params
from dcpcomm.combine.peer_options import PeerOptions
from dcpcomm.combine.wire import KIND_CANCELLED, Header
from dcpcomm.rows import clean_lse
from dcpcomm.transport import MergeShape, PeerBuffers
from tests.kernel_rig import POISON, Rig, bits
from tests.world import in_threads

DEADLINE_S = 5.0


class Ranks:
    """One merger's ranks, each with memory, kernel state and records of its own.

    Args:
        options: of every rank, or by rank.
    """

    def __init__(
        self,
        rig: Rig,
        n: int,
        shape: MergeShape,
        *options: PeerOptions,
        deadline_s: float | None = None,
        generic: bool = False,
    ) -> None:
        self.rig, self.n, self.shape = rig, n, shape
        self.kernels = rig.kernels(shape.dtype, n, generic)
        self.places = places_of(shape, n)
        size = fused_bytes(shape, n)
        self.memory = torch.full((n, size), POISON, dtype=torch.uint8, device=rig.device)
        self.ordinals = torch.zeros((n, shape.channels), dtype=torch.int64, device=rig.device)
        self.peers: list[FusedPeer] = []
        self.calls: dict[Any, FusedCall] = {}
        self.engines: list[CudaEngine] = []
        for rank in range(n):
            group: Any = SimpleNamespace(
                rank=rank, size=n, peers=[peer for peer in range(n) if peer != rank], max_sms=None,
                exchange_timeout_s=deadline_s or DEADLINE_S,
            )  # fmt: skip
            buffers = PeerBuffers(self.memory[rank], [one.data_ptr() for one in self.memory], sharing=n)
            mine = options[rank % len(options)] if options else PeerOptions()
            self.peers.append(FusedPeer(group, shape, buffers, self.kernels, mine))
            engine = CudaEngine(shape, rank, n, self.kernels)
            engine.ordinals = self.ordinals[rank]
            self.engines.append(engine)
        self.streams = [torch.cuda.Stream(rig.device) for _ in range(n)] if rig.device.type == "cuda" else None
        rig.sync()

    def together(self, call: Callable[[int], Any], ranks: Any = None) -> list[Any]:
        """`call(rank)` on a thread and stream of each of `ranks` (all), and what each returned once all is done."""

        def one(rank: int) -> Any:
            with torch.cuda.stream(self.streams[rank]) if self.streams else contextlib.nullcontext():
                return call(rank)

        ranks = range(self.n) if ranks is None else ranks
        results = in_threads(*(lambda rank=rank: one(rank) for rank in ranks))
        self.rig.sync()
        return results

    def merge(
        self,
        rank: int,
        partials: Partials,
        out: torch.Tensor,
        out_lse: torch.Tensor | None,
        header: Header,
        channel: int = 0,
    ) -> None:
        t = self.shape.result_rows(header.tokens, self.n)[0]
        layout = Layout(
            header.tokens, t, header.width, partials.out.stride(), partials.lse.stride(), partials.lse.dtype
        )
        key = rank, channel, layout
        if key not in self.calls:
            self.calls[key] = self.peers[rank].call(self.engines[rank], channel, layout)
        self.calls[key].merge(partials, 0, header, out, out_lse)

    def call_off(self, rank: int, header: Header, channel: int = 0) -> None:
        h, d = self.shape.num_heads, header.width
        t = self.shape.result_rows(header.tokens, self.n)[0]
        layout = Layout(header.tokens, t, d, (h * d, d, 1), (h, 1), torch.float32)
        self.peers[rank].call(self.engines[rank], channel, layout).call_off(header._replace(kind=KIND_CANCELLED))

    def room(self, tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.shape.result_rows(tokens, self.n)
        return self.rig.poisoned((*rows, width), self.shape.dtype), self.rig.poisoned(rows, torch.float32)

    def assert_ready(self, calls: int) -> None:
        """All is as after a call that went well: no record, epochs advanced everywhere, every payload re-armed."""
        places = self.places
        for rank in range(self.n):
            self.peers[rank].poll(0)
            assert self.engines[rank].failure(0) is None
            mine = self.memory[rank].cpu()
            for slot in range(2):
                payload = mine[slot * places.slot_stride :][: places.lse_offset]
                assert bool((payload == 0xFF).all()), f"rank {rank}, slot {slot}: not re-armed"
            epochs = mine[places.epochs : places.table].view(torch.int32)
            assert epochs.unique().tolist() == [calls], epochs.unique()
            assert not bool(mine[places.poison_offset : places.shared].any())


def canonical(
    ranks: Ranks, outs: torch.Tensor, lses: list[torch.Tensor], counts: Any
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """By rank, what combine.cu makes of the same partials."""
    rig, shape, n = ranks.rig, ranks.shape, ranks.n
    clean = [clean_lse(lses[m], None if counts is None else counts[m] <= 0) for m in range(n)]
    results = []
    for rank in range(n):
        rows = torch.stack([by_destination(outs[m], shape.scatter, n)[rank] for m in range(n)]).to(rig.device)
        lse = torch.stack([by_destination(clean[m], shape.scatter, n)[rank] for m in range(n)]).to(rig.device)
        t, h, d = rows.shape[1:]
        out, out_lse = rig.poisoned((t, h, d), shape.dtype), rig.poisoned((t, h), torch.float32)
        ranks.kernels.combine(rig.stream, combine_params(rows, lse, out, out_lse, shape.lse_base))
        results.append((out, out_lse))
    rig.sync()
    return results


def shape_for(n: int, d: int, dtype: torch.dtype, **other: Any) -> MergeShape:
    given = {"max_tokens": 3 * n, "num_heads": 2 * n, "head_dim": d, "dtype": dtype, "lse_base": "e", **other}
    return MergeShape(**given)


def header_of(tokens: int, width: int, **other: Any) -> Header:
    return Header(0, other.pop("tag", 0), tokens, other.pop("chunk", 0), width, **other)


def one_call(ranks: Ranks, b: int, d: int) -> tuple[list[Partials], list[Any], Any]:
    """Partials, room for results, and what those must be."""
    rig, n, shape = ranks.rig, ranks.n, ranks.shape
    outs = rig.randn(n, b, shape.num_heads, d, dtype=shape.dtype)
    lses = rig.randn(n, b, shape.num_heads)
    held = [Partials(outs[rank].to(rig.device), lses[rank].to(rig.device), None) for rank in range(n)]
    results = [ranks.room(b, d) for _ in range(n)]
    wants = canonical(ranks, outs, list(lses), None)
    rig.sync()
    return held, results, wants


def assert_right(results: Any, wants: Any) -> None:
    for got, want in zip(results, wants, strict=True):
        assert torch.equal(bits(got[0]), bits(want[0]))
        assert torch.equal(bits(got[1]), bits(want[1]))
