"""The benchmark's arithmetic, and its guard: nothing unverified is timed. No GPU."""

from __future__ import annotations

import itertools
import math
import statistics
import threading

import pytest
import torch

from dcpcomm.bench import timing
from dcpcomm.bench.checked import Checked, Unverified, count_wrong, poison
from dcpcomm.bench.clocks import WallClock
from dcpcomm.bench.limits import Limits
from dcpcomm.bench.ranks import Meeting, ThreadRanks
from dcpcomm.bench.timing import Times, percentile, slowest, time_eager_host, time_graph, time_in_turns
from dcpcomm.errors import TransportTimeout
from dcpcomm.testing import LoopbackWorld

CPU = torch.device("cpu")


def nobody() -> None:
    """Meet: one rank."""


# ---------------------------------------------------------------- arithmetic


def test_each_replay_is_as_slow_as_its_slowest_rank() -> None:
    found = slowest([Times((1.0, 9.0, 3.0)), Times((4.0, 2.0, 3.5))])
    assert (found.p50, found.mad, found.count) == (4.0, 0.5, 3)
    assert found.p99 == pytest.approx(4.0 + 0.98 * 5.0)


def test_one_late_replay_moves_p99_and_not_the_median() -> None:
    found = slowest([Times((2.0,) * 29 + (1000.0,)), Times((1.0,) * 30)])
    assert (found.p50, found.mad) == (2.0, 0.0)
    assert found.p99 > 100.0


def test_percentiles_are_those_of_the_standard_library(rng: torch.Generator) -> None:
    values = torch.rand(101, generator=rng).tolist()
    assert percentile(values, 0.99) == pytest.approx(statistics.quantiles(values, n=100, method="inclusive")[98])
    assert percentile(values, 0.5) == pytest.approx(statistics.median(values))
    assert percentile([7.0], 0.99) == 7.0


@pytest.mark.parametrize("ranks", [[], [Times(())], [Times((1.0,)), Times((1.0, 2.0))]])
def test_ranks_that_do_not_match_are_no_measurement(ranks: list[Times]) -> None:
    with pytest.raises(ValueError, match="replays by rank"):
        slowest(ranks)


def test_wrong_elements_of_all_ranks_are_counted() -> None:
    assert slowest([Times((1.0,), 2), Times((1.0,), 3)]).wrong == 5


def test_the_limit_is_the_smallest_exchange_and_then_bytes() -> None:
    limits = Limits(1.3, 2.4, 1.0, 1.8, {1 << 19: 144.0, 1 << 26: 357.0})
    assert limits.bandwidth == 357.0
    assert limits.limit_us(0) == 2.4
    assert limits.limit_us(357e3) == pytest.approx(3.4)
    assert limits.limit_us(357e3, programmatic=True) == pytest.approx(2.8)
    assert limits.as_dict()["gb_s"]["524288"] == 144.0


# ---------------------------------------------------------------- the judge


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rounding_is_not_wrong_and_a_neighbour_is(dtype: torch.dtype, rng: torch.Generator) -> None:
    want = torch.randn(64, 64, generator=rng, dtype=torch.float64)
    assert count_wrong(want.to(dtype), want) == 0
    worse = want.to(dtype)
    worse[3, 5] = 4 * float(want.abs().max())
    worse[6, 7] = math.nan
    assert count_wrong(worse, want) == 2
    assert count_wrong(worse, want, sums_rounded=True) == 2


def test_a_result_of_another_shape_is_all_wrong() -> None:
    assert count_wrong(torch.ones(4, 8), torch.ones(4, 4, dtype=torch.float64)) == 32


def test_poison_is_no_result() -> None:
    rows, raw = torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.uint8)
    poison(rows)
    poison(raw)
    assert bool(rows.isnan().all())
    assert raw.tolist() == [255] * 4


# ---------------------------------------------------------------- the guard


class Buffer:
    """A step that writes 1.0 into its own buffer, while `works`."""

    def __init__(self) -> None:
        self.memory, self.calls, self.works = torch.zeros(3), 0, True
        self.checked = Checked(self.run, lambda got: int((got != 1.0).sum()), "a buffer")

    def run(self) -> torch.Tensor:
        self.calls += 1
        if self.works:
            self.memory.fill_(1.0)
        return self.memory


@pytest.mark.parametrize("time_it", [time_graph, time_eager_host])
def test_what_was_never_compared_is_not_timed(time_it: object) -> None:
    buffer = Buffer()
    with pytest.raises(Unverified, match="a buffer was never compared"):
        time_it(buffer.checked, CPU, nobody)  # type: ignore[operator]
    assert buffer.calls == 0


@pytest.mark.parametrize("time_it", [time_graph, time_eager_host])
def test_what_was_wrong_is_not_timed(time_it: object) -> None:
    buffer = Buffer()
    buffer.works = False
    assert buffer.checked.check(nobody, nobody) == 3
    buffer.works = True
    calls = buffer.calls
    with pytest.raises(Unverified, match="wrong in 3 elements"):
        time_it(buffer.checked, CPU, nobody)  # type: ignore[operator]
    assert buffer.calls == calls


def test_a_result_left_over_from_the_call_before_does_not_pass() -> None:
    buffer = Buffer()
    buffer.memory.fill_(1.0)
    checked = Checked(lambda: buffer.memory, lambda got: int((got != 1.0).sum()))
    assert checked.check(nobody, nobody) == 3
    assert not checked.verified


def test_host_time_is_taken_of_verified_calls_and_compared_again() -> None:
    buffer = Buffer()
    assert buffer.checked.check(nobody, nobody) == 0
    times = time_eager_host(buffer.checked, CPU, nobody, calls=10, depth=4)
    assert len(times.us) == 10
    assert all(us > 0 for us in times.us)
    assert (times.wrong, buffer.checked.comparisons) == (0, 2)
    buffer.works = False
    assert time_eager_host(buffer.checked, CPU, nobody, calls=4, depth=4).wrong == 3


def test_the_queue_is_never_deeper_than_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = Buffer()
    buffer.checked.check(nobody, nobody)
    depths = [0]
    monkeypatch.setattr(timing, "settle", lambda device: depths.append(buffer.calls))
    time_eager_host(buffer.checked, CPU, nobody, calls=9, depth=3)
    assert max(b - a for a, b in itertools.pairwise(depths[1:])) <= 3


# ---------------------------------------------------------------- ranks that are threads


def test_threads_gather_in_order_time_and_again() -> None:
    meeting, found = Meeting(3), [[], [], []]  # type: tuple[Meeting, list[list[object]]]

    def body(rank: int) -> None:
        ranks = ThreadRanks(meeting, rank)
        for turn in range(20):
            found[rank].append(ranks.gather((rank, turn)))

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = [[(rank, turn) for rank in range(3)] for turn in range(20)]
    assert found == [want] * 3


def test_a_rank_that_fails_does_not_leave_the_others_waiting() -> None:
    meeting = Meeting(2)
    ThreadRanks(meeting, 0).abort()
    with pytest.raises(TransportTimeout, match="another rank has failed"):
        ThreadRanks(meeting, 1).meet()


# ---------------------------------------------------------------- call by call, in turns


def test_calls_of_all_steps_are_timed_in_turns_behind_a_meeting_each() -> None:
    said: list[str] = []

    def step(name: str) -> Checked:
        def call() -> torch.Tensor:
            said.append(name)
            return torch.ones(2)

        made = Checked(call, lambda got: 0, name)
        made.check(nobody, nobody)
        return made

    steps = [step("a"), step("b")]
    said.clear()
    turns: list[int] = []
    found = time_in_turns(steps, lambda: said.append("|"), rounds=3, before=turns.append)
    warm = timing._WARM_REPLAYS
    assert "".join(said).startswith("|a|b" * (3 + warm))
    assert turns == [turn for turn in range(-warm, 3) for _ in steps]
    assert [len(times.us) for times in found] == [3, 3], "what warms isn't timed"
    assert [one.comparisons for one in steps] == [3, 3], "compared again: the last timed call, and one onto poison"


def test_what_was_never_compared_is_not_timed_in_turns() -> None:
    good = Checked(lambda: torch.ones(1), lambda got: 0, "good")
    good.check(nobody, nobody)
    for judge in (None, lambda got: 1):
        bad = Checked(lambda: torch.ones(1), judge or (lambda got: 0), "bad")
        if judge is not None:
            bad.check(nobody, nobody)
        with pytest.raises(Unverified, match="bad"):
            time_in_turns([good, bad], nobody, rounds=3)


def test_on_cpu_the_late_rank_waits_that_long_and_it_is_taken_off() -> None:
    late_us = 2000.0

    def body(group: object) -> list[float]:
        rank = group.rank  # type: ignore[attr-defined]
        ranks = ThreadRanks(meeting, rank)
        step = Checked(lambda: torch.ones(1), lambda got: 0, "a step")
        step.check(ranks.meet, nobody)
        (timing_,) = WallClock(ranks, 4).time([step], late_us)
        assert timing_.times is not None
        return list(timing_.times.us)

    meeting = Meeting(2)
    for rank, us in enumerate(LoopbackWorld(2, device="cpu").run(body)):
        for turn, found in enumerate(us):
            if turn % 2 == rank:
                assert found >= 0, "it was late: all of the lateness lies behind it"
            else:
                assert found > -late_us, "it was not: nothing of this call's time is less than none"
