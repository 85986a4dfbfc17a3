"""Which calls are made by whom: small, and together all that the protocol must carry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tests.protocol.setting import Answer, Call, Outcomes, Protocol, Reset, Scenario

__all__ = ["RIGHT", "Case", "by_name"]


@dataclass(frozen=True)
class Case:
    """A scenario that a right variant of the protocol must pass, and how large its search is at least."""

    scenario: Scenario
    states: int
    protocol: Protocol = field(default_factory=Protocol)
    reduce: bool = True


# -- what must have come out


def all_right(outcomes: Outcomes) -> str:
    wrong = [(rank, a) for (rank, _), answers in outcomes.items() for a in answers if not a.right]
    return "; ".join(f"rank {rank} has no answer to {a.call}: {a.kinds} {a.ranks}" for rank, a in wrong)


def last_right(outcomes: Outcomes) -> str:
    """Whatever came before."""
    return all_right({key: answers[-1:] for key, answers in outcomes.items()})


def right_on(channel: int) -> Callable[[Outcomes], str]:
    return lambda outcomes: all_right({key: answers for key, answers in outcomes.items() if key[1] == channel})


def names_missing(rank: int) -> Callable[[Outcomes], str]:
    """Every other rank has given its first call up, or was told, and names that rank; nothing later is answered."""

    def judge(outcomes: Outcomes) -> str:
        for (other, _), answers in outcomes.items():
            if other == rank:
                continue
            if any(answer.right for answer in answers):
                return f"rank {other} has an answer without rank {rank}"
            if rank not in answers[0].ranks:
                return f"rank {other} doesn't name rank {rank}: {answers[0]}"
        return ""

    return judge


def names_mismatch(call: str, rank: int) -> Callable[[Outcomes], str]:
    """From `call` on nothing is answered; there, `rank` names another and all others name it."""

    def judge(outcomes: Outcomes) -> str:
        for (other, _), answers in outcomes.items():
            first = next((answer for answer in answers if not answer.right), None)
            if first is None or "mismatch" not in first.kinds or (other != rank and first.ranks != (rank,)):
                return f"rank {other} doesn't say that its call differs from rank {rank}'s: {first}"
            if other != rank and first.call != call:
                return f"rank {other} fails in {first.call}, not in {call}"
        return ""

    return judge


def calls_off(call: str) -> Callable[[Outcomes], str]:
    """That call has no result, and is nobody's failure; all others are answered."""

    def judge(outcomes: Outcomes) -> str:
        failed = [answer for answers in outcomes.values() for answer in answers if answer.kinds]
        return str(failed) if failed else all_right({k: _without(v, call) for k, v in outcomes.items()})

    return judge


def _without(answers: tuple[Answer, ...], call: str) -> tuple[Answer, ...]:
    return tuple(answer for answer in answers if answer.call not in call.split())


def anything(outcomes: Outcomes) -> str:
    """It ended, and nothing wrong was answered on the way."""
    return ""


# -- who calls what


def everywhere(ranks: int, *calls: Call | Reset, channel: int = 0) -> dict[tuple[int, int], tuple[Call | Reset, ...]]:
    return {(rank, channel): calls for rank in range(ranks)}


A, B, C, D, E, F = (Call(name) for name in "abcdef")
VARYING = (
    Call("a", rows=2, grid=2),
    Call("b", rows=1, grid=1, light=((0, 0),)),
    Call("c", rows=2, grid=2, empty=((1, 0),)),
    Call("d", rows=2, grid=1, empty=((0, 1), (1, 1))),
)
TAGGED = tuple(replace(call, tag=n) for n, call in enumerate((A, B, C)))
OFF = replace(B, off=(1,))
GIVEN_UP = (replace(A, deadline=True), replace(B, deadline=True), Reset(), C)
#: Rank 1's process is gone, and another one takes its place, over new buffers. What was launched may still run.
GONE: dict[tuple[int, int], tuple[Call | Reset, ...]] = {
    (0, 0): (replace(A, deadline=True),),
    (1, 0): (replace(A, deadline=True),),
    (0, 1): (Reset(after=((0, 0),)), Call("x"), Call("y")),
    (1, 1): (Reset(), Call("x"), Call("y")),
}
WAITS, VALIDATED = Protocol(overlap="waits"), Protocol(overlap="validated", slots=3)

RIGHT = [
    Case(Scenario("two ranks, rows and grid vary", everywhere(2, *VARYING), all_right), 1500),
    Case(Scenario("two words a row", everywhere(2, A, B, C, D), all_right, words=2), 371),
    Case(
        Scenario("three ranks", everywhere(3, A, replace(B, empty=((1, 0),)), C, D), all_right, ranks=3),
        8800,
    ),
    Case(Scenario("three ranks, rows vary", everywhere(3, replace(A, rows=2), B), all_right, ranks=3), 61300),
    Case(Scenario("a weight underflows", everywhere(2, A, replace(B, light=((1, 0),)), C, D), all_right), 204),
    Case(
        Scenario(
            "two channels, all resident", everywhere(2, A, B) | everywhere(2, A, B, channel=1), all_right, resident=2
        ),
        5900,
    ),
    Case(
        Scenario(
            "replay and eager calls",
            {
                (0, 0): (A, B, replace(C, ordinal=1), replace(D, ordinal=1)),
                (1, 0): (A, B, C, replace(D, ordinal=1)),
            },
            all_right,
        ),
        204,
    ),
    Case(Scenario("overlapping launches", everywhere(2, *VARYING), all_right), 25100, WAITS),
    Case(Scenario("overlapping launches of three ranks", everywhere(3, A, B), all_right, ranks=3), 16100, WAITS),
    Case(
        Scenario(
            "overlapping launches of two channels",
            everywhere(2, A, B) | everywhere(2, A, B, channel=1),
            all_right,
            resident=4,
        ),
        44300,
        WAITS,
    ),
    Case(Scenario("three slots", everywhere(2, A, B, C, D, E), all_right), 1100, VALIDATED),
    Case(
        Scenario("four slots, triggered after sending", everywhere(2, A, B, C, D, E), all_right),
        2200,
        Protocol(overlap="sent", slots=4),
    ),
    Case(
        Scenario("fenced, nothing drained", everywhere(2, A, B, C, D), all_right),
        3900,
        Protocol(drains="none", strict=True),
        reduce=False,
    ),
    Case(
        Scenario("only re-arms are drained", everywhere(2, A, B, C, D), all_right),
        3600,
        Protocol(drains="rearm"),
        reduce=False,
    ),
    Case(Scenario("a call is skipped", {(0, 0): TAGGED, (1, 0): (TAGGED[0], TAGGED[2])}, names_mismatch("b", 1)), 85),
    Case(
        Scenario(
            "a call is skipped by one of three",
            everywhere(3, *TAGGED) | {(1, 0): (TAGGED[0], TAGGED[2])},
            names_mismatch("b", 1),
            ranks=3,
        ),
        3400,
    ),
    Case(
        Scenario(
            "another number of rows, then a reset",
            {
                (0, 0): (Call("a", rows=2, grid=2), Reset(), C),
                (1, 0): (Call("other"), Reset(), C),
            },
            last_right,
        ),
        221,
    ),
    Case(
        Scenario(
            "another number of rows",
            {(0, 0): (Call("a", rows=2, grid=2), C), (1, 0): (Call("other"), C)},
            names_mismatch("a", 1),
        ),
        131,
    ),
    Case(Scenario("a call is called off", everywhere(2, A, OFF, C, D), calls_off("b")), 187),
    Case(Scenario("one of three calls off", everywhere(3, A, OFF, C), calls_off("b"), ranks=3), 5500),
    Case(Scenario("two calls are called off", everywhere(2, A, OFF, replace(C, off=(1,)), D), calls_off("b c")), 171),
    Case(Scenario("a rank is absent", {(0, 0): GIVEN_UP[:2], (1, 0): ()}, names_missing(1)), 9),
    Case(
        Scenario(
            "one of three is absent",
            {(0, 0): GIVEN_UP[:2], (1, 0): GIVEN_UP[:2], (2, 0): ()},
            names_missing(2),
            ranks=3,
        ),
        518,
    ),
    Case(Scenario("late, given up, reset", everywhere(2, *GIVEN_UP), last_right), 1000),
    Case(Scenario("stopped while it sends", everywhere(2, *GIVEN_UP), last_right, split="word"), 1900),
    Case(
        Scenario(
            "two blocks, given up, reset", everywhere(2, replace(GIVEN_UP[0], rows=2, grid=2), Reset(), C), last_right
        ),
        14200,
    ),
    Case(Scenario("three ranks, given up, reset", everywhere(3, GIVEN_UP[0], Reset(), C), last_right, ranks=3), 93200),
    Case(Scenario("gone, and replaced over new buffers", GONE, right_on(1)), 2100),
]


def by_name(name: str) -> Scenario:
    (found,) = (case.scenario for case in RIGHT if case.scenario.name == name)
    return found
