"""The timing core: calls in a CUDA graph, replayed; the slowest rank of each replay; the middle of them all.

A merge ends on no rank before the last rank has come to it, so a time means something only where all ranks begin
together. `meet` sees to that: on the host, or better on the device (`limits.Gate`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dcpcomm.bench.checked import Checked
from dcpcomm.graphs import captured

__all__ = [
    "Summary",
    "Times",
    "mad",
    "percentile",
    "settle",
    "slowest",
    "time_calls",
    "time_eager_host",
    "time_graph",
    "time_in_turns",
]

_WARM_REPLAYS = 5


@dataclass(frozen=True)
class Times:
    """Of one rank: microseconds per call, in each replay; and elements found wrong after them."""

    us: tuple[float, ...]
    wrong: int = 0


@dataclass(frozen=True)
class Summary:
    """Of all ranks: microseconds per call over `count` replays, each as slow as its slowest rank."""

    p50: float
    p99: float
    mad: float
    count: int
    wrong: int = 0


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie, between neighbours in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def mad(values: Sequence[float]) -> float:
    """Median absolute deviation from the median."""
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)


def slowest(ranks: Sequence[Times]) -> Summary:
    """Per replay the slowest rank; then median, 99th percentile and median absolute deviation.

    Raises:
        ValueError: no ranks, no replays, or ranks with different numbers of them.
    """
    counts = {len(rank.us) for rank in ranks}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"replays by rank: {[len(rank.us) for rank in ranks]}; expected one number, above 0, for all")
    worst = [max(times) for times in zip(*(rank.us for rank in ranks), strict=True)]
    return Summary(
        statistics.median(worst), percentile(worst, 0.99), mad(worst), len(worst), sum(rank.wrong for rank in ranks)
    )


def settle(device: torch.device) -> None:
    """Wait for the current stream, and for no other: kernels of other ranks may wait for this one's."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def time_graph(
    step: Checked,
    device: torch.device,
    meet: Callable[[], object],
    *,
    per_graph: int = 20,
    replays: int = 30,
    before: Callable[[int], object] | None = None,
) -> Times:
    """Time `per_graph` calls captured into one graph, `replays` times. Collective: all ranks call it alike.

    Args:
        step: verified before; compared again under the graph, before and after the timing.
        device: of the current stream.
        meet: returns when all ranks have come; what it puts on the current stream runs before the clock starts.
        before: captured before each call, told its number: what makes this rank late, say. It is timed with the call.

    Raises:
        Unverified: `step` was not compared with the oracle, or was wrong.
    """
    step.require_verified()

    def calls() -> None:
        for number in range(per_graph):
            if before is not None:
                before(number)
            step()

    _arrive(device, meet)
    graph = captured(calls, device)
    step.poison()
    _arrive(device, meet)
    for _ in range(_WARM_REPLAYS):
        graph.replay()
    _arrive(device, meet)
    wrong = step.judge()
    step.poison()
    settle(device)
    us = []
    for _ in range(replays):
        meet()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        us.append(start.elapsed_time(stop) * 1e3 / per_graph)
    _arrive(device, meet)
    wrong += step.judge()
    _arrive(device, meet)  # before the graph's memory goes
    return Times(tuple(us), wrong)


def _arrive(device: torch.device, meet: Callable[[], object]) -> None:
    """All ranks have come, and nothing is in flight: what follows may wait for the device."""
    settle(device)
    meet()
    settle(device)


def time_eager_host(
    step: Checked, device: torch.device, meet: Callable[[], object], *, calls: int = 200, depth: int = 16
) -> Times:
    """Time what a call costs the host: until it returns, not until its result is there. Collective.

    Args:
        step: verified before, and compared again afterwards.
        calls: timed ones.
        depth: calls in flight at the most: a full queue would make the host wait for the device.

    Returns:
        microseconds of each of the timed calls.

    Raises:
        Unverified: as for `time_graph`.
    """
    step.require_verified()
    us: list[float] = []
    call = step.step  # itself: what is around it here is no cost of its
    for turn in range(-depth, calls, depth):  # the first round warms
        _arrive(device, meet)
        for _ in range(depth):
            began = time.perf_counter_ns()
            step.result = call()
            ended = time.perf_counter_ns()
            if turn >= 0:
                us.append((ended - began) / 1e3)
    _arrive(device, meet)
    step.poison()
    _arrive(device, meet)
    step()
    _arrive(device, meet)
    return Times(tuple(us[:calls]), step.judge())


def time_calls(
    step: Checked, device: torch.device, meet: Callable[[], object], *, per_round: int = 20, rounds: int = 30
) -> Times:
    """Time `per_round` calls after each other until the last result is there, `rounds` times: where nothing can be
    captured, and on CPU. Collective.

    Raises:
        Unverified: as for `time_graph`.
    """
    step.require_verified()
    us = []
    for turn in range(-_WARM_REPLAYS, rounds):
        _arrive(device, meet)
        began = time.perf_counter_ns()
        for _ in range(per_round):
            step()
        settle(device)
        if turn >= 0:
            us.append((time.perf_counter_ns() - began) / 1e3 / per_round)
    _arrive(device, meet)
    step.poison()
    _arrive(device, meet)
    step()
    _arrive(device, meet)
    return Times(tuple(us), step.judge())


def time_in_turns(
    steps: Sequence[Checked],
    meet: Callable[[], object],
    *,
    rounds: int = 200,
    before: Callable[[int], object] | None = None,
) -> list[Times]:
    """Time single calls on CPU, those of all steps in turns: what else the machine does then hits all alike.
    Collective.

    Args:
        meet: returns when all ranks have come, before each call.
        rounds: timed calls of each step, behind some that warm.
        before: called before each call, with the round's number: what makes this rank late, say. It is timed too.

    Returns:
        microseconds of each call, for each step.

    Raises:
        Unverified: as for `time_graph`.
    """
    for step in steps:
        step.require_verified()
    us: list[list[float]] = [[] for _ in steps]
    for turn in range(-_WARM_REPLAYS, rounds):
        for step, found in zip(steps, us, strict=True):
            meet()
            began = time.perf_counter_ns()
            if before is not None:
                before(turn)
            step()
            if turn >= 0:
                found.append((time.perf_counter_ns() - began) / 1e3)
    times = []
    for step, found in zip(steps, us, strict=True):
        meet()
        wrong = step.judge()  # what the last timed call wrote
        step.poison()
        meet()
        step()
        meet()
        times.append(Times(tuple(found), wrong + step.judge()))
    return times
