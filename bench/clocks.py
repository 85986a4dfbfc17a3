"""What merges are timed by, and the limit that they are held against: CUDA graphs on GPUs, single calls on CPU.

Lateness (`skew_us`) is put before each merge on one rank, in turns, and taken off again: what is left is counted from
when the last rank came.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from dcpcomm.bench.checked import Checked
from dcpcomm.bench.gloo_packed import GlooPacked
from dcpcomm.bench.limits import Gate, Limits, Probe, measure_limits
from dcpcomm.bench.ranks import Ranks
from dcpcomm.bench.rivals import Rival
from dcpcomm.bench.timing import Times, settle, slowest, time_eager_host, time_graph, time_in_turns
from dcpcomm.transport import MergeShape

__all__ = ["GRAPH_REPLAYS", "TIMED_CALLS", "Clock", "GraphClock", "Timing", "WallClock"]

GRAPH_REPLAYS = 30
TIMED_CALLS = 200


@dataclass(frozen=True)
class Timing:
    """Of one step on one rank; `times` is None where it was found wrong, `host` where it was not measured."""

    times: Times | None
    host: Times | None = None


class Clock(ABC):
    """How things are timed on one rank.

    Attributes:
        in_turns: steps are timed together, call by call; else one after the other.
        limits: of a GPU; None where every cell has a limit of its own, timed with it.
    """

    in_turns: bool
    limits: Limits | None = None

    def limit_step(self, ranks: Ranks, shape: MergeShape, device: torch.device) -> Rival | None:
        """What is timed with every cell as its limit."""
        return None

    @abstractmethod
    def time(self, steps: Sequence[Checked], skew_us: float) -> list[Timing]:
        """Time steps that were compared with the oracle before. Collective."""

    def close(self) -> None:  # noqa: B027
        """Collective."""


class GraphClock(Clock):
    """Replays of CUDA graphs, begun together by a gate on the device. Making one measures the limits.

    Args:
        per_graph: calls in a graph.
        replays: timed ones.
    """

    in_turns = False

    def __init__(
        self, ranks: Ranks, device: torch.device, per_graph: int, replays: int, say: Callable[[str], object]
    ) -> None:
        self._ranks, self._device, self._per_graph, self._replays = ranks, device, per_graph, replays
        self._probe = Probe(ranks, device)
        self._gate = Gate(self._probe)
        self.limits = measure_limits(self._probe, self._gate, per_graph=per_graph, replays=replays, say=say)
        self._late: dict[float, float] = {}

    def time(self, steps: Sequence[Checked], skew_us: float) -> list[Timing]:
        return [self._one(step, skew_us) for step in steps]

    def _one(self, step: Checked, skew_us: float) -> Timing:
        ranks, host = self._ranks, None
        if ranks.on_this_gpu == 1 and not skew_us:  # threads of one process would time how they share the interpreter
            host = time_eager_host(step, self._device, ranks.meet)
            if any(ranks.gather(step.wrong)):
                return Timing(None)
        lateness = self._lateness(skew_us) if skew_us else 0.0
        times = self._graph(step, self._delay(skew_us) if skew_us else None)
        return Timing(replace(times, us=tuple(us - lateness for us in times.us)), host)

    def _graph(self, step: Checked, before: Callable[[int], object] | None) -> Times:
        times = time_graph(
            step, self._device, self._gate, per_graph=self._per_graph, replays=self._replays, before=before
        )
        self._gate.check()
        return times

    def _delay(self, skew_us: float) -> Callable[[int], object]:
        spin = self._probe.spin(round(skew_us * 1e3))

        def before(number: int) -> None:
            if number % self._ranks.size == self._ranks.rank:
                spin(torch.cuda.current_stream(self._device).cuda_stream)

        return before

    def _lateness(self, skew_us: float) -> float:
        """What a delay really takes in a graph, its launch included: the slowest rank's median. Collective."""
        if skew_us not in self._late:
            spin = self._probe.spin(round(skew_us * 1e3))
            nothing = torch.ones(1, dtype=torch.int32, device=self._device)

            def alone() -> torch.Tensor:
                spin(torch.cuda.current_stream(self._device).cuda_stream)
                return nothing

            step = _Unchanged(alone, lambda _: 0, "a delay")
            step.check(self._ranks.meet, lambda: settle(self._device))
            times = self._graph(step, None)
            self._late[skew_us] = slowest(self._ranks.gather(times)).p50
        return self._late[skew_us]

    def close(self) -> None:
        self._probe.close()


class _Unchanged(Checked):
    def poison(self) -> None:
        """There is no result to overwrite."""


class WallClock(Clock):
    """Single calls on CPU. Each cell's limit, the bare exchange of the same bytes over Gloo, is timed in turns with it.

    Args:
        calls: timed ones.
    """

    in_turns = True

    def __init__(self, ranks: Ranks, calls: int) -> None:
        self._ranks, self._calls = ranks, calls

    def limit_step(self, ranks: Ranks, shape: MergeShape, device: torch.device) -> Rival | None:
        return GlooPacked(ranks, shape, device)

    def time(self, steps: Sequence[Checked], skew_us: float) -> list[Timing]:
        def late(turn: int) -> None:
            if turn % self._ranks.size == self._ranks.rank:
                until = time.perf_counter_ns() + skew_us * 1e3
                while time.perf_counter_ns() < until:
                    pass

        found = time_in_turns(steps, self._ranks.meet, rounds=self._calls, before=late if skew_us else None)
        return [Timing(replace(times, us=tuple(us - skew_us for us in times.us))) for times in found]
