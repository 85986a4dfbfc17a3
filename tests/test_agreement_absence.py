"""Ranks that die, hang or dawdle while a merger is constructed: nobody waits for ever, and everybody says for whom.

The worlds run at once, because they do nothing but wait; each test looks at one of them.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from dcpcomm.errors import TransportTimeout
from dcpcomm.testing import Fault
from tests.agreement import DEADLINE_S, SLACK_S, Built, Died, Failed, construct, flaky, registered, settings

N = 3
STAGES = ("check", "prepare", "connect", "exchange")  # an exchange before the first merge is one of the verification
WORLDS_AT_ONCE = 4


@dataclass(frozen=True)
class Case:
    """What befalls each rank that something befalls: (kind, stage, seconds)."""

    plan: dict[int, tuple[str, str, float]]

    def __str__(self) -> str:
        return "+".join(f"{rank}-{kind}-{stage}-{seconds:.2f}" for rank, (kind, stage, seconds) in self.plan.items())

    @property
    def gone(self) -> set[int]:
        return {rank for rank, (kind, _, _) in self.plan.items() if kind != "delay"}

    def run(self, name: str, deadline_s: float = DEADLINE_S) -> Ended:
        release = threading.Event()
        faults = []
        for rank, (kind, stage, seconds) in self.plan.items():
            given: dict[str, Any] = {"rank": rank, "stage": stage, "call": 1 if stage == "exchange" else None}
            if kind == "delay":
                given["seconds"] = seconds
            if kind == "hang":
                given |= {"until": release, "seconds": 30.0}
            faults.append(Fault(kind, **given))  # type: ignore[arg-type]
        hangs = sum(kind == "hang" for kind, _, _ in self.plan.values())
        cls = flaky(name, {}, *faults)
        with registered(cls):
            fates = construct(N, settings(deadline_s, transport=name), until=release, absent=hangs)
        ends = [strike.at + (strike.fault.seconds or 0.0) * (strike.fault.kind == "delay") for strike in cls.injected]
        return Ended(self, fates, max(ends, default=0.0))


@dataclass(frozen=True)
class Ended:
    """What became of a case: the fate of each rank, and when the last fault struck, or a delay was over."""

    case: Case
    fates: list[Any]
    last_strike: float


SYSTEMATIC = [Case({rank: (kind, stage, 0.0)}) for stage in STAGES for rank in (0, 2) for kind in ("die", "hang")]


@pytest.fixture(scope="module")
def systematic() -> dict[str, Ended]:
    return run_all(SYSTEMATIC)


def run_all(cases: list[Case], deadline_s: float = DEADLINE_S) -> dict[str, Ended]:
    with ThreadPoolExecutor(WORLDS_AT_ONCE) as executor:
        futures = {str(case): executor.submit(case.run, f"absent{i}", deadline_s) for i, case in enumerate(cases)}
        return {name: future.result() for name, future in futures.items()}


def judge(ended: Ended) -> None:
    """All agree, or every rank that lives raises in time, naming who is missing."""
    case, fates = ended.case, ended.fates
    survivors = [rank for rank in range(N) if rank not in case.gone]
    for rank in range(N):
        if rank in case.gone and case.plan[rank][0] == "die":
            # It may have learned of another's absence before its own end came.
            assert isinstance(fates[rank], Died | Failed), (rank, fates[rank])
        elif case.gone:
            assert isinstance(fates[rank], Failed), f"rank {rank} decided alone: {fates[rank]}"
    if not case.gone and all(isinstance(fate, Built) for fate in fates):
        assert len({fate.transport for fate in fates}) == 1
        assert all(fate.right for fate in fates)
        return
    for rank in survivors:
        fate = fates[rank]
        assert isinstance(fate, Failed), (rank, fate)
        after = fate.at - ended.last_strike
        assert after < DEADLINE_S + SLACK_S, f"rank {rank} raised {after:.1f} s after the last fault: {fate.text}"
        late = set(case.plan)
        if rank in late and "before this rank arrived" in fate.text:
            continue  # a delay past the deadline: this rank is the one that the others named
        assert any(f"rank {one}" in fate.text.partition(": ")[2] for one in late), fate.text
        if isinstance(fate.error, TransportTimeout):
            assert set(fate.ranks) & late, fate.text


@pytest.mark.parametrize("case", SYSTEMATIC, ids=str)
def test_a_rank_that_is_gone_is_named_in_time_by_all_others(case: Case, systematic: dict[str, Ended]) -> None:
    fates = systematic[str(case)].fates
    judge(systematic[str(case)])
    (gone,) = case.gone
    for rank, fate in enumerate(fates):
        if rank != gone:
            assert fate.kind is TransportTimeout, fate.trace
            assert fate.ranks == (gone,), fate.text


def test_random_slow_and_dying_ranks(seed: int) -> None:
    rng = random.Random(seed)
    cases = []
    for _ in range(10):
        ranks = rng.sample(range(N), rng.choice((1, 1, 2)))
        plan = {}
        for rank in ranks:
            kind = rng.choice(("die", "hang", "delay", "delay"))
            seconds = rng.choice((0.05, 0.3, 0.6, 1.4)) * DEADLINE_S if kind == "delay" else 0.0
            plan[rank] = (kind, rng.choice(STAGES), seconds)
        cases.append(Case(plan))
    for ended in run_all(cases).values():
        judge(ended)


def test_a_rank_that_is_only_slow_is_waited_for() -> None:
    cases = [Case({rank: ("delay", stage, 0.4 * DEADLINE_S)}) for rank in (0, 1) for stage in STAGES]
    for name, ended in run_all(cases, 10 * DEADLINE_S).items():  # on a busy machine others are slow, too
        assert all(isinstance(fate, Built) and fate.right for fate in ended.fates), (name, ended.fates)
