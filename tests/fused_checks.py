"""The checks of the fused kernel: N virtual ranks whose memory is all on one device, one thread and stream each."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcpcomm.combine.cuda_engine import CudaEngine
from dcpcomm.combine.engine import Layout, Partials, by_destination
from dcpcomm.combine.fused import FusedPeer, fused_bytes, places_of
from dcpcomm.combine.params import combine_params
from dcpcomm.combine.peer_options import PeerOptions
from dcpcomm.combine.wire import KIND_CANCELLED, Header
from dcpcomm.errors import TransportTimeout
from dcpcomm.rows import RowCounts, clean_lse
from dcpcomm.transport import MergeShape, PeerBuffers
from tests.kernel_rig import DTYPES, POISON, Findings, Rig, any_lse, bits, layouts, lse_layouts
from tests.oracle import Case, judge
from tests.world import in_threads

__all__ = [
    "check_absence",
    "check_back_to_back",
    "check_called_off",
    "check_calls",
    "check_grids_differ",
    "check_mismatch",
    "check_sentinels_travel",
]


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
        self.engines: list[CudaEngine] = []
        for rank in range(n):
            group: Any = SimpleNamespace(
                rank=rank, size=n, peers=[peer for peer in range(n) if peer != rank], max_sms=None,
                exchange_timeout_s=deadline_s or DEADLINE_S,
            )  # fmt: skip
            buffers = PeerBuffers(self.memory[rank], list(self.memory), sharing=n)
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
        call = self.peers[rank].call(self.engines[rank], channel, layout)
        call.merge(partials, 0, header, out, out_lse)

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
            self.peers[rank].check(0)
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


def check_calls(
    rig: Rig, dtype: torch.dtype, n: int, d: int, scatter: str = "heads", rounds: int = 6, *options: PeerOptions,
    generic: bool = False,
) -> None:  # fmt: skip
    """Call after call, B changing: layouts, LSE dtypes and forms of counts differ by rank, one rank is late, strided
    results. Each is right, bit-equal to combine.cu, and leaves everything ready for the next.
    """
    shape = shape_for(n, d, dtype, scatter=scatter, lse_base="2" if rig.randint(0, 2, (1,)) else "e")
    ranks = Ranks(rig, n, shape, *options, generic=generic)
    findings = Findings()
    names = list(layouts(torch.zeros(1, 1, 1), torch.device("cpu")))
    for number in range(rounds):
        b = int(rig.randint(1, shape.max_tokens // n + 1, (1,))) * (n if scatter == "tokens" else 1)
        outs, lses = rig.randn(n, b, shape.num_heads, d, dtype=dtype), any_lse(rig, n, b, shape.num_heads)
        outs[torch.isnan(lses) | (lses == -torch.inf)] = torch.nan  # garbage, which must not count
        counts = rig.randint(0, 3, (n, b)) if number % 3 else None
        held, cast = [], []
        for rank in range(n):
            cast.append(lses[rank].to(DTYPES[(rank + number) % 3]))
            out = layouts(outs[rank], rig.device)[names[(rank * 3 + number) % len(names)]]
            lse_views = lse_layouts(cast[rank], rig.device)
            lse = lse_views[list(lse_views)[(rank + number) % len(lse_views)]]
            held.append(Partials(out, lse, None if counts is None else RowCounts(counts[rank].to(rig.device))))
        results = [ranks.room(b, d) for _ in range(n)]
        if number % 2:  # into every other column
            results = [(torch.stack([out, out], -1)[..., 0], lse) for out, lse in results]
        wants = canonical(ranks, outs, cast, counts)
        header, late = header_of(b, d, tag=number - 2), int(rig.randint(0, n, (1,)))

        def call(rank: int, held: Any = held, results: Any = results, header: Any = header, late: int = late) -> None:
            if rank == late:
                time.sleep(random.random() * 0.005)
            out, lse = results[rank]
            ranks.merge(rank, held[rank], out, lse if header.tag % 2 else None, header)

        rig.sync()
        ranks.together(call)
        with findings.case(f"{dtype} N={n} D={d} {scatter} round {number}, B={b}"):
            ranks.assert_ready(number + 1)
            case = Case(torch.nan_to_num(outs), torch.stack([one.float() for one in cast]), shape.lse_base, counts)
            judge([out.cpu() for out, _ in results], case, scatter)
            for (out, lse), (want, want_lse) in zip(results, wants, strict=True):
                assert torch.equal(bits(out), bits(want)), "other bits than combine.cu's"
                if header.tag % 2:
                    assert torch.equal(bits(lse), bits(want_lse))
                else:
                    assert bool((lse.view(torch.uint8) == POISON).all()), "an LSE was written that nobody wanted"
    assert ranks.ordinals[:, 0].tolist() == [rounds] * n
    findings.report()


def check_back_to_back(rig: Rig, n: int, d: int, rounds: int = 12, *options: PeerOptions) -> None:
    """Ranks that run ahead of each other, as far as the calls allow: nobody waits between one call and the next."""
    shape = shape_for(n, d, torch.bfloat16)
    ranks = Ranks(rig, n, shape, *options)
    calls = [_one_call(ranks, 1 + number % shape.max_tokens, d) for number in range(rounds)]
    headers = [header_of(1 + number % shape.max_tokens, d, tag=number) for number in range(rounds)]

    def call(rank: int) -> None:
        pauses = random.Random(rank + random.random())
        for (held, results, _), header in zip(calls, headers, strict=True):
            if pauses.random() < 0.3:
                time.sleep(pauses.random() * 0.002)
            ranks.merge(rank, held[rank], *results[rank], header)

    ranks.together(call)
    findings = Findings()
    for number, (_, results, wants) in enumerate(calls):
        with findings.case(f"N={n} round {number}"):
            _assert_right(results, wants)
    findings.report()
    ranks.assert_ready(rounds)


def check_grids_differ(rig: Rig, n: int) -> None:
    """Blocks, threads and tiles are each rank's own affair."""
    choices = [PeerOptions(blocks=1, threads=64), PeerOptions(vectors_per_thread=3, threads=64), PeerOptions(blocks=2)]
    check_calls(rig, torch.bfloat16, n, 128, "heads", 4, *choices)


def check_sentinels_travel(rig: Rig, n: int) -> None:
    """A payload all of whose bits are set is a NaN, and arrives as one."""
    for dtype in DTYPES:
        shape = shape_for(n, 64, dtype)
        ranks = Ranks(rig, n, shape)
        out = torch.full((3, shape.num_heads, 64), 0xFF, dtype=torch.uint8).repeat(1, 1, dtype.itemsize).view(dtype)
        assert bool(torch.isnan(out).all())
        lse = torch.zeros(3, shape.num_heads)
        results = [ranks.room(3, 64) for _ in range(n)]
        mine = Partials(out.to(rig.device), lse.to(rig.device), None)
        rig.sync()

        def call(rank: int, ranks: Ranks = ranks, mine: Partials = mine, results: Any = results) -> None:
            ranks.merge(rank, mine, *results[rank], header_of(3, 64))

        ranks.together(call)
        assert all(bool(torch.isnan(out).all()) for out, _ in results)
        ranks.assert_ready(1)


def _one_call(ranks: Ranks, b: int, d: int) -> tuple[list[Partials], list[Any], Any]:
    """Partials, room for results, and what those must be."""
    rig, n, shape = ranks.rig, ranks.n, ranks.shape
    outs = rig.randn(n, b, shape.num_heads, d, dtype=shape.dtype)
    lses = rig.randn(n, b, shape.num_heads)
    held = [Partials(outs[rank].to(rig.device), lses[rank].to(rig.device), None) for rank in range(n)]
    results = [ranks.room(b, d) for _ in range(n)]
    wants = canonical(ranks, outs, list(lses), None)
    rig.sync()
    return held, results, wants


def _assert_right(results: Any, wants: Any) -> None:
    for got, want in zip(results, wants, strict=True):
        assert torch.equal(bits(got[0]), bits(want[0]))
        assert torch.equal(bits(got[1]), bits(want[1]))


def check_mismatch(rig: Rig, n: int, what: dict[str, int]) -> None:
    """One rank comes to another call: every rank that met it names it, nobody gets an answer, now or later."""
    b, d = 3, 64
    ranks = Ranks(rig, n, shape_for(n, d, torch.bfloat16))
    held, results, wants = _one_call(ranks, b, d)
    ranks.together(lambda rank: ranks.merge(rank, held[rank], *results[rank], header_of(b, d)))
    _assert_right(results, wants)
    odd = int(rig.randint(0, n, (1,)))
    own = header_of(b, d)
    other = own._replace(**what)
    held, results, _ = _one_call(ranks, b, d)

    def call(rank: int) -> None:
        header = other if rank == odd else own
        mine, out, lse = held[rank], *results[rank]
        if header.tokens != b:
            mine = Partials(mine.out[: header.tokens], mine.lse[: header.tokens], None)
            out, lse = out[: header.tokens], lse[: header.tokens]
        ranks.merge(rank, mine, out, lse, header)

    ranks.together(call)
    for rank in range(n):
        rows = other.tokens if rank == odd else b
        out, lse = results[rank]
        assert bool(torch.isnan(out[:rows]).all()), f"rank {rank} was answered"
        assert bool(torch.isnan(lse[:rows]).all())
        failure = ranks.engines[rank].failure(0)
        assert failure is not None, f"rank {rank} noted nothing"
        assert failure.mine == (other if rank == odd else own)._replace(ordinal=1)
        came = [Header.from_words(words) for words in failure.came]
        for source in range(n):
            if source == rank or (rank != odd and source == odd):
                assert came[source] == (other if source == odd else own)._replace(ordinal=1), came
    _, results, _ = _one_call(ranks, b, d)
    ranks.together(lambda rank: ranks.merge(rank, held[rank], *results[rank], own))
    assert all(bool(torch.isnan(out).all()) for out, _ in results), "a spent channel answered"


def check_called_off(rig: Rig, n: int) -> None:
    """A rank has no rows: its peers are told, and get no answer; the next call is right for all."""
    b, d = 3 * n, 64
    ranks = Ranks(rig, n, shape_for(n, d, torch.bfloat16), PeerOptions(blocks=1, threads=64))
    for number in range(3):
        off = set(rig.randint(0, n, (1 + number % 2,)).tolist())
        held, results, wants = _one_call(ranks, b, d)
        header = header_of(b, d, tag=number)

        def call(rank: int, off: Any = off, held: Any = held, results: Any = results, header: Any = header) -> None:
            if rank in off:
                ranks.call_off(rank, header)
            else:
                ranks.merge(rank, held[rank], *results[rank], header)

        ranks.together(call)
        for rank in range(n):
            ranks.peers[rank].check(0)
            failure = ranks.engines[rank].failure(0)
            if rank in off:
                assert failure is None, "whoever called it off has told its caller already"
                continue
            assert bool(torch.isnan(results[rank][0]).all()), f"rank {rank} was answered"
            assert failure is not None
            kinds = {source for source in range(n) if Header.from_words(failure.came[source]).kind == KIND_CANCELLED}
            assert kinds == off
            ranks.engines[rank].settle(0)
        held, results, wants = _one_call(ranks, b, d)
        ranks.together(lambda rank, held=held, results=results: ranks.merge(  # type: ignore[misc]
            rank, held[rank], *results[rank], header_of(b, d)
        ))  # fmt: skip
        _assert_right(results, wants)
        ranks.assert_ready(2 * number + 2)


def check_absence(rig: Rig, n: int, missing: int) -> None:
    """One rank doesn't come: the others name it, in time; neither they nor that rank get answers any more."""
    b, d = 3, 64
    ranks = Ranks(rig, n, shape_for(n, d, torch.bfloat16), deadline_s=0.2)
    others = [rank for rank in range(n) if rank != missing]
    held, results, wants = _one_call(ranks, b, d)
    ranks.together(lambda rank: ranks.merge(rank, held[rank], *results[rank], header_of(b, d)))
    _assert_right(results, wants)

    def refused(some: list[int], names: bool) -> None:
        _, results, _ = _one_call(ranks, b, d)
        started = time.monotonic()
        ranks.together(lambda rank: ranks.merge(rank, held[rank], *results[rank], header_of(b, d)), some)
        assert time.monotonic() - started < 3.0
        for rank in some:
            assert bool(torch.isnan(results[rank][0]).all()), f"rank {rank} was answered"
            assert bool(torch.isnan(results[rank][1]).all())
            with pytest.raises(TransportTimeout) as told:
                ranks.peers[rank].check(0)
            assert not names or told.value.ranks == (missing,)

    refused(others, names=True)
    refused([missing], names=False)
    refused(others, names=True)
    assert all(peer.given_up for peer in ranks.peers)
