"""Each fault of a message does what it says to the message it says, and writes down what it did."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpcomm.backends.loopback import Loopback
from dcpcomm.testing import Fault, Injection, LoopbackWorld, faulty
from dcpcomm.transport import Capabilities, MergeTransport
from tests.exchanges import ROWS, WIDTH, Arrivals, connected, rounds


def struck(fault: Fault, n: int = 3, calls: int = 4, channel: int = 0) -> tuple[Arrivals, list[Injection]]:
    """What rank 1, whose fault it is, received; every other rank must have received what was sent."""
    cls = faulty(Loopback, dataclasses.replace(fault, rank=1))
    by_rank = rounds(cls, n, calls, channel)
    assert all(not by_rank[rank].wrong() for rank in range(n) if rank != 1)
    mine = by_rank[1]
    assert mine.wrong() == {(i.call, i.source) for i in cls.injected if i.row is not None}, cls.injected
    for strike in cls.injected:
        assert (strike.rank, strike.stage, strike.channel) == (1, "exchange", channel)
        if strike.row is not None:
            assert_first_difference(mine, strike)
    return mine, cls.injected


def assert_first_difference(mine: Arrivals, strike: Injection) -> None:
    assert strike.call is not None
    assert strike.source is not None
    assert strike.row is not None
    assert strike.offset is not None
    sent, got = mine.sent(strike.source, strike.call), mine.blocks[strike.call][strike.source]
    word = strike.row * (WIDTH // 4) + strike.offset // 4
    sent, got = sent.view(torch.int32).flatten(), got.contiguous().view(torch.int32).flatten()
    assert torch.equal(sent[:word], got[:word])
    assert (sent[word].item() & 0xFFFFFFFF, got[word].item() & 0xFFFFFFFF) == (strike.wanted, strike.got)
    assert strike.wanted != strike.got


def test_drop_leaves_the_old_content() -> None:
    mine, _ = struck(Fault("drop", call=2, source=0))
    assert torch.equal(mine.blocks[2][0], mine.sent(0, 1))
    mine, _ = struck(Fault("drop", call=0, source=0))
    assert torch.equal(mine.blocks[0][0], torch.full((ROWS, WIDTH), 0xEE, dtype=torch.uint8))


def test_dropped_every_time_nothing_ever_lands() -> None:
    mine, injected = struck(Fault("drop", source=2))
    assert all((blocks[2] == 0xEE).all() for blocks in mine.blocks)
    assert len(injected) == 4


def test_corrupt_flips_one_word_and_says_which() -> None:
    mine, (strike,) = struck(Fault("corrupt", call=1, source=0, row=3, word=5))
    differ = (mine.blocks[1][0].contiguous().view(torch.int32) != mine.sent(0, 1).view(torch.int32)).nonzero()
    assert differ.tolist() == [[3, 5]]
    assert (strike.row, strike.offset) == (3, 20)


def test_corrupt_draws_another_word_by_another_seed_and_the_same_by_the_same() -> None:
    where = [struck(Fault("corrupt", seed=seed))[1] for seed in (1, 2, 1)]
    a, b, again = ([(i.source, i.row, i.offset, i.got) for i in strikes] for strikes in where)
    assert a != b
    assert a == again
    assert len(set(a)) == 4
    assert {source for source, *_ in a} <= {0, 2}


def test_reorder_mixes_this_call_and_the_one_before() -> None:
    for seed in range(5):
        mine, _ = struck(Fault("reorder", call=2, source=2, seed=seed))
        now, before = mine.sent(2, 2), mine.sent(2, 1)
        from_now = [torch.equal(row, now[i]) for i, row in enumerate(mine.blocks[2][2])]
        from_before = [torch.equal(row, before[i]) for i, row in enumerate(mine.blocks[2][2])]
        assert from_now[0]
        assert any(from_before)
        assert all(a != b for a, b in zip(from_now, from_before, strict=True))


def test_reorder_of_the_first_call_shows_what_memory_held() -> None:
    mine, _ = struck(Fault("reorder", call=0, source=0))
    assert torch.equal(mine.blocks[0][0][0], mine.sent(0, 0)[0])
    assert any((row == 0xEE).all() for row in mine.blocks[0][0])


def test_swap_exchanges_two_sources() -> None:
    mine, injected = struck(Fault("swap", call=1, source=0, other=2))
    assert torch.equal(mine.blocks[1][0], mine.sent(2, 1))
    assert torch.equal(mine.blocks[1][2], mine.sent(0, 1))
    assert sorted(i.source for i in injected) == [0, 2]


@pytest.mark.parametrize("age", [1, 2, 3])
def test_stale_is_the_whole_block_of_a_call_before(age: int) -> None:
    mine, _ = struck(Fault("stale", call=3, source=0, age=age))
    assert torch.equal(mine.blocks[3][0], mine.sent(0, 3 - age))


def test_stale_without_a_call_before_is_what_memory_held() -> None:
    mine, _ = struck(Fault("stale", call=0, source=0))
    assert (mine.blocks[0][0] == 0xEE).all()


def test_shift_moves_the_rows_by_16_bytes() -> None:
    mine, (strike,) = struck(Fault("shift", call=1, source=0))
    got, sent = mine.blocks[1][0].flatten(), mine.sent(0, 1).flatten()
    assert torch.equal(got[WIDTH + 16 :], sent[WIDTH:-16])
    assert torch.equal(got[: WIDTH + 16], sent[: WIDTH + 16])
    assert (strike.row, strike.offset) == (1, 16)


def test_zero_fills_the_block() -> None:
    mine, _ = struck(Fault("zero", call=1, source=0))
    assert not mine.blocks[1][0].any()


def test_a_fault_of_one_channel_spares_the_other() -> None:
    assert struck(Fault("zero", channel=1), channel=0)[1] == []
    assert len(struck(Fault("zero", channel=1), channel=1)[1]) == 4


def test_probability_and_seed() -> None:
    counts = {len(struck(Fault("zero", probability=p, seed=3), calls=40)[1]) for p in (0.0, 1.0)}
    assert counts == {0, 40}
    some = [[i.call for i in struck(Fault("zero", probability=0.4, seed=3), calls=40)[1]] for _ in range(2)]
    assert some[0] == some[1]
    assert 4 <= len(some[0]) <= 30


def test_two_faults_of_one_call_add_up() -> None:
    cls = faulty(Loopback, Fault("zero", rank=1, call=1, source=0), Fault("corrupt", rank=1, call=1, source=2))
    assert rounds(cls)[1].wrong() == {(1, 0), (1, 2)}


MESSAGE_KINDS = ("drop", "corrupt", "reorder", "swap", "stale", "shift", "zero")


@given(st.sampled_from(MESSAGE_KINDS), st.integers(0, 2**31), st.integers(2, 4), st.integers(0, 3))
@settings(deadline=None, max_examples=25)
def test_the_record_is_true_of_every_kind(kind: Any, seed: int, n: int, call: int) -> None:
    _, injected = struck(Fault(kind, call=call, seed=seed), n=n)
    assert injected
    assert all(strike.row is not None for strike in injected)


# ---------------------------------------------------------------- the view layout


class View(MergeTransport):
    """All-to-all of views, between threads, in the view layout and without `recv`."""

    name = "view"
    capabilities = Capabilities(devices=("cpu",), layout="view")

    def prepare(self) -> bytes:
        return b""

    def connect(self, peers: list[bytes]) -> None:
        self._mail = self.group.loopback.world.mail(self.group.prefix)

    def exchange(self, send: Any, channel: int, recv: Any = None) -> Any:
        for peer in range(self.group.size):
            self._mail[channel, self.group.rank, peer].put([part[:, peer].clone() for part in send])
        came = [self._mail[channel, source, self.group.rank].get(timeout=20) for source in range(self.group.size)]
        return tuple(torch.stack(parts, dim=1) for parts in zip(*came, strict=True))

    def close(self) -> None:
        pass


@pytest.mark.parametrize("kind", MESSAGE_KINDS)
def test_message_faults_strike_views_too(kind: Any) -> None:
    cls = faulty(View, Fault(kind, rank=1, call=1, source=0))

    def rank(handle: Any) -> list[bool]:
        transport = connected(cls, handle)
        same = []
        for call in range(3):
            sent = [
                (
                    torch.rand((4, 2, 2, 8), generator=seeded(r, call)).bfloat16(),
                    torch.rand((4, 2, 2), generator=seeded(r, call)),
                )
                for r in range(2)
            ]
            before = [part.clone() for part in sent[transport.group.rank]]
            out, lse = transport.exchange(sent[transport.group.rank], 0)
            assert all(torch.equal(a, b) for a, b in zip(before, sent[transport.group.rank], strict=True))
            me = transport.group.rank
            same.append(
                all(
                    torch.equal(out[:, source], sent[source][0][:, me])
                    and torch.equal(lse[:, source], sent[source][1][:, me])
                    for source in range(2)
                )
            )
        return same

    assert LoopbackWorld(2).run(rank) == [[True, True, True], [True, False, True]]
    assert {i.source for i in cls.injected} == ({0, 1} if kind == "swap" else {0})


def seeded(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(numbers) % 2**31)
