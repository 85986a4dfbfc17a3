"""The checks of the fused kernel where something is wrong: ranks in other calls, calls called off, absent ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from dcpcomm.combine.engine import Partials
from dcpcomm.combine.peer_options import PeerOptions
from dcpcomm.combine.wire import KIND_CANCELLED, Header
from dcpcomm.errors import TransportTimeout
from tests.fused_rig import Ranks, assert_right, header_of, one_call, shape_for
from tests.kernel_rig import Rig


def check_mismatch(rig: Rig, n: int, what: dict[str, int]) -> None:
    """One rank comes to another call: every rank that met it names it, nobody gets an answer, now or later."""
    b, d = 3, 64
    ranks = Ranks(rig, n, shape_for(n, d, torch.bfloat16))
    held, results, wants = one_call(ranks, b, d)
    ranks.together(lambda rank: ranks.merge(rank, held[rank], *results[rank], header_of(b, d)))
    assert_right(results, wants)
    odd = int(rig.randint(0, n, (1,)))
    own = header_of(b, d)
    other = own._replace(**what)
    held, results, _ = one_call(ranks, b, d)

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
    _, results, _ = one_call(ranks, b, d)
    ranks.together(lambda rank: ranks.merge(rank, held[rank], *results[rank], own))
    assert all(bool(torch.isnan(out).all()) for out, _ in results), "a spent channel answered"


def check_called_off(rig: Rig, n: int) -> None:
    """A rank has no rows: its peers are told, and get no answer; the next call is right for all."""
    b, d = 3 * n, 64
    ranks = Ranks(rig, n, shape_for(n, d, torch.bfloat16), PeerOptions(blocks=1, threads=64))
    for number in range(3):
        off = set(rig.randint(0, n, (1 + number % 2,)).tolist())
        held, results, wants = one_call(ranks, b, d)
        header = header_of(b, d, tag=number)

        def call(rank: int, off: Any = off, held: Any = held, results: Any = results, header: Any = header) -> None:
            if rank in off:
                ranks.call_off(rank, header)
            else:
                ranks.merge(rank, held[rank], *results[rank], header)

        ranks.together(call)
        for rank in range(n):
            ranks.peers[rank].poll(0)
            failure = ranks.engines[rank].failure(0)
            if rank in off:
                assert failure is None, "whoever called it off has told its caller already"
                continue
            assert bool(torch.isnan(results[rank][0]).all()), f"rank {rank} was answered"
            assert failure is not None
            kinds = {source for source in range(n) if Header.from_words(failure.came[source]).kind == KIND_CANCELLED}
            assert kinds == off
            ranks.engines[rank].settle(0)
        held, results, wants = one_call(ranks, b, d)
        ranks.together(lambda rank, held=held, results=results: ranks.merge(  # type: ignore[misc]
            rank, held[rank], *results[rank], header_of(b, d)
        ))  # fmt: skip
        assert_right(results, wants)
        ranks.assert_ready(2 * number + 2)


def check_absence(rig: Rig, n: int, missing: int) -> None:
    """One rank doesn't come: the others name it, in time; neither they nor that rank get answers any more."""
    b, d = 3, 64
    ranks = Ranks(rig, n, shape_for(n, d, torch.bfloat16))
    others = [rank for rank in range(n) if rank != missing]
    held, results, wants = one_call(ranks, b, d)
    ranks.together(lambda rank: ranks.merge(rank, held[rank], *results[rank], header_of(b, d)))
    assert_right(results, wants)

    for peer in ranks.peers:
        peer.group.exchange_timeout_s = 1.0

    def refused(some: list[int], names: bool) -> None:
        _, results, _ = one_call(ranks, b, d)
        started = time.monotonic()
        ranks.together(lambda rank: ranks.merge(rank, held[rank], *results[rank], header_of(b, d)), some)
        assert time.monotonic() - started < 5.0
        for rank in some:
            assert bool(torch.isnan(results[rank][0]).all()), f"rank {rank} was answered"
            assert bool(torch.isnan(results[rank][1]).all())
            with pytest.raises(TransportTimeout) as told:
                ranks.peers[rank].poll(0)
            assert not names or told.value.ranks == (missing,)

    refused(others, names=True)
    refused([missing], names=False)
    refused(others, names=True)
    assert all(peer.given_up for peer in ranks.peers)


def check_told_early(rig: Rig, n: int) -> None:
    """One rank gives up: the others, who would wait for long yet, end at once and name the same rank."""
    b, d = 3, 64
    ranks = Ranks(rig, n, shape_for(n, d, torch.bfloat16))
    missing, first = n - 1, 0
    for rank, peer in enumerate(ranks.peers):
        peer.group.exchange_timeout_s = 1.0 if rank == first else 10.0
    held, results, _ = one_call(ranks, b, d)
    started = time.monotonic()
    ranks.together(lambda rank: ranks.merge(rank, held[rank], *results[rank], header_of(b, d)), range(missing))
    assert time.monotonic() - started < 7.0, "one deadline, not each rank's own"
    for rank in range(missing):
        assert bool(torch.isnan(results[rank][0]).all())
        with pytest.raises(TransportTimeout) as told:
            ranks.peers[rank].poll(0)
        assert told.value.ranks == (missing,)


def check_refused_calls_send_nothing(rig: Rig) -> None:
    """A call of a channel that was given up in an earlier one leaves its peers' memory as it is."""
    b, d = 3, 64
    ranks = Ranks(rig, 2, shape_for(2, d, torch.bfloat16))
    ranks.peers[0].group.exchange_timeout_s = 0.3
    held, results, _ = one_call(ranks, b, d)
    ranks.together(lambda rank: ranks.merge(rank, held[rank], *results[rank], header_of(b, d)), [0])
    before = ranks.memory[1].clone()
    for _ in range(2):  # into either slot
        ranks.together(lambda rank: ranks.merge(rank, held[rank], *results[rank], header_of(b, d)), [0])
    assert torch.equal(ranks.memory[1], before)


def check_widths_differ(rig: Rig, n: int) -> None:
    """Rows of two widths go through the same slots, and a rank that comes with the other one is named."""
    shape = shape_for(n, 64, torch.bfloat16, v_head_dim=128)
    ranks = Ranks(rig, n, shape)
    for number, d in enumerate((64, 128, 128, 64, 128)):
        held, results, wants = one_call(ranks, 2, d)
        header = header_of(2, d, tag=number)
        ranks.together(lambda rank, held=held, results=results, header=header: ranks.merge(  # type: ignore[misc]
            rank, held[rank], *results[rank], header
        ))  # fmt: skip
        assert_right(results, wants)
    ranks.assert_ready(5)
    wide, narrow = one_call(ranks, 2, 128), one_call(ranks, 2, 64)
    calls = [wide if rank else narrow for rank in range(n)]
    headers = [header_of(2, 128 if rank else 64) for rank in range(n)]
    ranks.together(lambda rank: ranks.merge(rank, calls[rank][0][rank], *calls[rank][1][rank], headers[rank]))
    for rank in range(n):
        assert bool(torch.isnan(calls[rank][1][rank][0]).all()), f"rank {rank} was answered"
        failure = ranks.engines[rank].failure(0)
        assert failure is not None
        assert Header.from_words(failure.came[0 if rank else 1]).width == (64 if rank else 128)


def check_called_off_otherwise(rig: Rig, n: int, what: dict[str, int]) -> None:
    """A rank calls another call off than its peers are in: nobody waits for rows that don't come."""
    shape = shape_for(n, 64, torch.bfloat16, v_head_dim=128)
    ranks = Ranks(rig, n, shape, deadline_s=10.0)
    held, results, _ = one_call(ranks, 3, 64)
    started = time.monotonic()

    def call(rank: int) -> None:
        if rank == n - 1:
            ranks.call_off(rank, header_of(3, 64)._replace(**what))
        else:
            ranks.merge(rank, held[rank], *results[rank], header_of(3, 64))

    ranks.together(call)
    assert time.monotonic() - started < 7.0
    for rank in range(n):
        ranks.peers[rank].poll(0)
        assert ranks.engines[rank].failure(0) is not None
