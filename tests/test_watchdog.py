"""The watchdog where calls run on a device: begun and ended ones are counted in memory; the notes tell who is late."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from dcpcomm.combine.wire import Header
from dcpcomm.control import Control
from dcpcomm.watchdog import Watchdog

TIMEOUT_S = 0.4
CALL = Header(6, 3, 8, 0, 128)


class Owner:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int, tuple[int, ...]]] = []
        self.called = threading.Event()

    def overdue(self, channel: int, ordinal: int, seconds: float, late: tuple[int, ...]) -> None:
        assert seconds > TIMEOUT_S
        self.told.append((channel, ordinal, late))
        self.called.set()


class Watched:
    """One rank: two channels, their counts of calls on a device, and what its watchdog has said."""

    def __init__(self, store: Any, rank: int, size: int, action: str = "raise") -> None:
        self.counts = np.zeros((2, 8), dtype=np.int64)
        self.owner = Owner()
        self.dog = Watchdog(Control(store, rank, size, "test"), 2, TIMEOUT_S, action, self.owner, self.counts)

    def called(self, begun: int, ended: int, channel: int = 0) -> None:
        self.dog.begin(channel, CALL)
        self.dog.end(channel, CALL)
        self.counts[channel, :2] = begun, ended


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Any:
    store = dist.HashStore()
    made = [Watched(store, rank, 3) for rank in range(3)]
    yield made
    for one in made:
        one.dog.stop()


def test_a_call_that_waits_on_a_device_is_told_with_who_is_late(ranks: list[Watched]) -> None:
    ranks[0].called(7, 6)
    ranks[1].called(7, 6)
    ranks[2].called(6, 6)  # has not come to call 6
    for one in ranks[:2]:
        assert one.owner.called.wait(10)
        assert one.owner.told == [(0, 6, (2,))]
    assert not ranks[2].owner.told


def test_where_all_have_come_all_are_named(ranks: list[Watched]) -> None:
    for one in ranks:
        one.called(7, 6, channel=1)
    for rank, one in enumerate(ranks):
        assert one.owner.called.wait(10)
        assert one.owner.told == [(1, 6, tuple(other for other in range(3) if other != rank))]


def test_a_rank_without_a_word_is_late() -> None:
    only = Watched(dist.HashStore(), 1, 3)
    only.called(1, 0)
    assert only.owner.called.wait(10)
    assert only.owner.told == [(0, 0, (0, 2))]
    only.dog.stop()


def test_calls_that_move_on_are_never_overdue(ranks: list[Watched]) -> None:
    """Replays run no Python: only the counts move."""
    ranks[0].called(1, 0)
    for _ in range(10):
        ranks[0].owner.told.clear()
        longest, before = 0.0, time.monotonic()
        for _ in range(60):
            ranks[0].counts[0, :2] += 1
            time.sleep(TIMEOUT_S / 20)
            longest, before = max(longest, time.monotonic() - before), time.monotonic()
        if longest < TIMEOUT_S / 2:  # else the machine was busy, and the calls stood still for too long
            break
    assert not ranks[0].owner.told


def test_each_wait_is_told_once_and_the_next_again(ranks: list[Watched]) -> None:
    ranks[0].called(1, 0)
    assert ranks[0].owner.called.wait(10)
    ranks[0].owner.called.clear()
    assert not ranks[0].owner.called.wait(2 * TIMEOUT_S)
    ranks[0].counts[0, :2] = 2, 1
    assert ranks[0].owner.called.wait(10)
    assert [ordinal for _, ordinal, _ in ranks[0].owner.told] == [0, 1]


def test_asked_to_log_it_tells_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    waiting, late = (Watched(store, rank, 2, "log") for rank in range(2))
    with caplog.at_level(logging.WARNING, "dcpcomm"):
        late.called(6, 6)
        waiting.called(7, 6)
        ends = time.monotonic() + 10
        while not caplog.records and time.monotonic() < ends:
            time.sleep(0.02)
    assert "rank 0 has waited" in caplog.text
    assert "in call 6 on channel 0" in caplog.text
    assert "rank 1: channel 0: idle after" in caplog.text
    assert not waiting.owner.told
    for one in (waiting, late):
        one.dog.stop()
