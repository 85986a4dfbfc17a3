"""The control channel by itself: one record, made by rank 0, and what every rank makes of ranks that don't come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from dcpcomm import control
from dcpcomm.control import Control, Outcome, first_failure
from dcpcomm.errors import SelectionMismatch, TransportTimeout

SLACK_S = 5.0  # of a busy machine


def on_ranks(size: int, fn: Callable[[Control], Any], absent: tuple[int, ...] = ()) -> dict[int, Any]:
    """`fn(control)` in a thread for each rank that isn't absent; what it returned or raised."""
    store = dist.HashStore()
    results: dict[int, Any] = {}

    def body(rank: int) -> None:
        try:
            results[rank] = fn(Control(store, rank, size, "test"))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def test_everybody_gets_the_same_record_step_after_step() -> None:
    def steps(one: Control) -> list[list[bytes]]:
        return [one.exchange(f"{step} of {one.rank}".encode(), 10) for step in range(20)]

    results = on_ranks(4, steps)
    want = [[f"{step} of {rank}".encode() for rank in range(4)] for step in range(20)]
    assert all(result == want for result in results.values())


def test_steps_leave_nothing_in_the_store_but_the_last() -> None:
    store = dist.HashStore()

    def steps(rank: int) -> None:
        one = Control(store, rank, 2, "test")
        for _ in range(50):
            one.exchange(b"", 10)

    threads = [threading.Thread(target=steps, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert store.num_keys() <= 6


@pytest.mark.parametrize("absent", [(0,), (2,), (1, 3)])
def test_who_is_absent_is_named_by_all_others_in_time(absent: tuple[int, ...]) -> None:
    def step(one: Control) -> float:
        started = time.monotonic()
        with pytest.raises(TransportTimeout) as failure:
            one.exchange(b"", 0.5, "this step")
        assert failure.value.ranks == absent
        assert "this step" in str(failure.value)
        return time.monotonic() - started

    results = on_ranks(4, step, absent)
    assert len(results) == 4 - len(absent)
    for spent in results.values():
        assert isinstance(spent, float), spent
        assert 0.4 < spent < 0.5 + SLACK_S


def test_who_comes_too_late_hears_that_it_is_over() -> None:
    over = threading.Event()

    def step(one: Control) -> str:
        if one.rank == 1:
            assert over.wait(10)
        with pytest.raises(TransportTimeout) as failure:
            one.exchange(b"", 0.2, "this step")
        if one.rank == 0:
            over.set()
        return str(failure.value)

    late = on_ranks(3, step)[1]
    assert "had ended before this rank arrived" in late
    assert "Call again" in late


@pytest.mark.parametrize("who", [0, 1, 2])
def test_who_fails_instead_is_heard_by_all_and_waits_for_nobody(who: int) -> None:
    def step(one: Control) -> Any:
        if one.rank == who:
            one.fail("ValueError: no such file")
            return None
        with pytest.raises(SelectionMismatch, match=f"rank {who} raised ValueError: no such file"):
            one.exchange(b"", 10)
        return None

    for result in on_ranks(3, step).values():
        assert result is None, result


def test_a_failed_step_leaves_the_ranks_in_step() -> None:
    def step(one: Control) -> Any:
        if one.rank == 1:
            one.fail("once")
        else:
            with pytest.raises(SelectionMismatch):
                one.exchange(b"", 10)
        return one.exchange(str(one.rank).encode(), 10)

    assert all(result == [b"0", b"1", b"2"] for result in on_ranks(3, step).values())


@pytest.mark.parametrize("dead", [0, 1])
def test_a_heart_that_stops_is_not_waited_for(dead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that died is named long before the deadline."""
    monkeypatch.setattr(control, "_SILENT_S", 1.0)

    def step(one: Control) -> Any:
        if one.rank == dead:
            one.note("beat", "17")  # its last
            return None
        started = time.monotonic()
        with pytest.raises(TransportTimeout, match="fell silent") as failure:
            one.exchange(b"", 60)
        assert failure.value.ranks == (dead,)
        return time.monotonic() - started

    for rank, spent in on_ranks(3, step).items():
        if rank != dead:
            assert isinstance(spent, float), spent
            assert spent < 20


def test_a_heart_that_beats_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow rank, compiling, say, isn't a dead one."""
    monkeypatch.setattr(control, "_SILENT_S", 1.0)
    go = threading.Event()

    def step(one: Control) -> Any:
        with one.beating():
            if one.rank == 1:
                assert go.wait(20)
            else:
                threading.Timer(3.0, go.set).start()
            return one.exchange(b"x", 60)

    assert all(result == [b"x", b"x"] for result in on_ranks(2, step).values())


def test_the_first_to_fail_is_the_one_to_name() -> None:
    outcomes = [Outcome(False, "waited for rank 2", 5.0), Outcome(True), Outcome(False, "no such device", 0.1)]
    assert first_failure(outcomes) == (2, "no such device")
    assert first_failure([Outcome(True), Outcome(True)]) is None
