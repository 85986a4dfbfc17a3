"""The search: every reachable state, breadth first, so that the first violation found has a shortest trace."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tests.protocol.model import Model, State, Step
from tests.protocol.setting import Protocol, Scenario

__all__ = ["Report", "Violation", "check"]


@dataclass(frozen=True)
class Violation:
    """A property that doesn't hold, and how to get there."""

    property: str
    detail: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{n:3} {line}" for n, line in enumerate(self.trace, 1)]
        return "\n".join([f"{self.property}: {self.detail}", *lines])


@dataclass(frozen=True)
class Report:
    scenario: str
    states: int
    ends: int  # states in which nothing more can happen
    seconds: float
    violation: Violation | None

    def __str__(self) -> str:
        head = f"{self.scenario}: {self.states} states, {self.ends} ends, {self.seconds:.1f} s"
        return f"{head}\n{self.violation}" if self.violation else head


def check(
    scenario: Scenario, protocol: Protocol | None = None, *, reduce: bool = True, limit: int = 2_000_000
) -> Report:
    """Search until a violation, or until no state is left. `reduce=False` leaves out no order of arrivals at all.

    Raises:
        OverflowError: more than `limit` states: a search that stopped there would prove nothing.
    """
    started = time.perf_counter()
    model = Model(scenario, protocol or Protocol(), reduce=reduce)
    first = model.initial()
    came: dict[State, tuple[State, Step] | None] = {first: None}
    level, ends, violation = [first], 0, None

    def trace_to(state: State, last: Step | None = None) -> tuple[str, ...]:
        steps = [] if last is None else [last]
        while (before := came[state]) is not None:
            state, step = before
            steps.append(step)
        return tuple(model.describe(step) for step in reversed(steps))

    while level and violation is None:
        following: list[State] = []
        for state in level:
            quiet = True
            for step, after, wrong in model.steps(state):
                quiet = False
                if wrong:
                    violation = Violation(*wrong, trace_to(state, step))
                    break
                if after not in came:
                    came[after] = (state, step)
                    following.append(after)
            if quiet:
                ends += 1
                if wrong := model.judge(state):
                    violation = Violation(*wrong, trace_to(state))
            if violation is not None:
                break
        if len(came) > limit:
            raise OverflowError(f"{scenario.name}: more than {limit} states")
        level = following
    return Report(scenario.name, len(came), ends, time.perf_counter() - started, violation)
