"""The protocol with one mistake each, and what the search must find then."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.protocol.scenarios import (
    GIVEN_UP,
    OFF,
    TAGGED,
    A,
    B,
    C,
    D,
    E,
    F,
    all_right,
    anything,
    by_name,
    calls_off,
    everywhere,
)  # fmt: skip
from tests.protocol.setting import Call, Protocol, Scenario

__all__ = ["FAULTS", "Fault"]


@dataclass(frozen=True)
class Fault:
    """A mistake, where it shows, the property that it violates, and words of the trace that tell of it."""

    name: str
    protocol: Protocol
    scenario: Scenario
    property: str
    tells: str
    reduce: bool = True  # a trace that is found is real either way; only readers that skip a word need all orders


def forgiving(scenario: Scenario, *properties: str) -> Scenario:
    """To see what comes of a word left unarmed, say, and not only that it was left."""
    return replace(scenario, forgives=properties)


FOUR = by_name("two words a row")
LIGHT = by_name("a weight underflows")
ONE_WORD = Scenario("four calls", everywhere(2, A, B, C, D), all_right)
SIX = Scenario("six calls", everywhere(2, A, B, C, D, E, F), all_right)
SEVEN = replace(SIX, programs=everywhere(2, A, B, C, D, E, F, Call("g")))
GROWS = Scenario("the grid grows", everywhere(2, A, Call("b", rows=2, grid=2), C), all_right)
SILENT = Scenario(
    "rank 1 has no rows twice", everywhere(2, A, replace(B, empty=((1, 0),)), replace(C, empty=((1, 0),))), all_right
)
UNDRAINED = forgiving(ONE_WORD, "left unarmed")
SKIPPED = Scenario("skipped unseen", {(0, 0): (A, B), (1, 0): (B,)}, all_right)
ONCE = Scenario("only the first has a deadline", everywhere(2, replace(A, deadline=True), B), anything)
LATE = Scenario("late", everywhere(2, *GIVEN_UP[:2]), anything)
OFF_C, OFF_D = replace(C, off=(1,)), replace(D, off=(1,))
RESET = by_name("late, given up, reset")
TWO_CHANNELS = by_name("overlapping launches of two channels")

#: Named before there was a model.
NAMED = [
    Fault(
        "re-arm skipped by weight",
        Protocol(rearm="unless-light"),
        forgiving(LIGHT, "left unarmed"),
        "wrong data",
        "b: takes row 0 of rank 1",
    ),
    Fault("epoch words that drift", Protocol(advances="own"), GROWS, "epochs differ", "a: takes row 0"),
    Fault(
        "one-way calls",
        Protocol(off_takes="nothing"),
        forgiving(
            Scenario("three called off", everywhere(2, A, OFF, OFF_C, OFF_D, E), calls_off("b c d")), "left unarmed"
        ),
        "wrong data",
        "has nothing to wait for",
    ),
    Fault("resumed without a reset", Protocol(refuses=False), LATE, "answer after a failure", "gives rank 1 up"),
    Fault(
        "re-armed before validation",
        Protocol(rearm="early"),
        forgiving(FOUR, "left unarmed", "deadlock"),
        "wrong data",
        "re-arms all of it",
        reduce=False,
    ),
    Fault("overlap with two slots", Protocol(overlap="validated"), ONE_WORD, "deadlock", "d: sends in epoch 4"),
]

#: Section 10 of the design as it can be read, where the model found that reading wanting.
READINGS = [
    Fault(
        "three slots, triggered after sending",
        Protocol(overlap="sent", slots=3),
        SIX,
        "wrong data",
        "d: sends in epoch 4",
    ),
    Fault(
        "three slots, triggered without waiting",
        Protocol(overlap="validated", slots=3, waits_before_trigger=False),
        SIX,
        "deadlock",
        "e: sends in epoch 5",
    ),
    Fault(
        "four slots, triggered without waiting",
        Protocol(overlap="sent", slots=4, waits_before_trigger=False),
        SEVEN,
        "wrong data",
        "e: sends in epoch 5",
    ),
    Fault(
        "overlap, room for one grid a channel",
        Protocol(overlap="waits"),
        replace(TWO_CHANNELS, resident=2),
        "deadlock",
        "b: becomes resident",
    ),
    Fault(
        "poison in the epoch word",
        Protocol(poison_in="epoch-word"),
        ONCE,
        "deadlock",
        "gives rank 1 up",
    ),
    Fault(
        "a peer poisoned without a name",
        Protocol(poison_names=False),
        by_name("one of three is absent"),
        "unexpected end",
        "finds the channel poisoned",
    ),
    Fault(
        "poisoned blocks that don't send",
        Protocol(same_call_sends=False),
        by_name("another number of rows"),
        "deadlock",
        "block 0 finds the channel poisoned, and ends",
    ),
    Fault(
        "told, but not marked", Protocol(told_poisons=False), RESET, "answer after a failure", "a: finds the channel"
    ),
    Fault(
        "the header's epoch in one word of it",
        Protocol(header_epoch="first-word"),
        Scenario("tags vary", everywhere(2, *TAGGED), all_right),
        "false mismatch",
        "header of rank",
        reduce=False,
    ),
    Fault(
        "the host's ordinal in the header",
        Protocol(ordinal_from="host"),
        by_name("replay and eager calls"),
        "false mismatch",
        "c: finds the header",
    ),
    Fault(
        "called off, peers' rows left",
        Protocol(off_takes="headers"),
        forgiving(Scenario("called off", everywhere(2, A, OFF, C, D), calls_off("b")), "left unarmed"),
        "wrong data",
        "payload[slot 0, row 0, word 0] from rank 0 = {b, 0, 0}",
    ),
    Fault("a call skipped, tags equal", Protocol(), SKIPPED, "wrong data", "takes row 0"),
]

#: Easily made.
OTHERS = [
    Fault(
        "the host's epoch", Protocol(epoch_from="host"),
        by_name("replay and eager calls"), "wrong data", "sends in epoch 2",
    ),
    Fault(
        "epoch loaded before the grid before ended", Protocol(overlap="waits", epoch_after_wait=False),
        ONE_WORD, "wrong data", "b: sends in epoch 1",
    ),
    Fault(
        "no header where there are no rows", Protocol(headers="with-rows"),
        SILENT, "wrong data", "c: sends in epoch 3",
    ),
    Fault(
        "a count says what was sent", Protocol(awaited="count"),
        forgiving(SILENT, "left unarmed"), "deadlock", "of which nothing was sent",
    ),
    Fault(
        "one word of a row looked at", Protocol(words_checked="first"),
        FOUR, "torn row", "takes row 0", reduce=False,
    ),
    Fault("stores not drained", Protocol(drains="none"), UNDRAINED, "wrong data", "c: takes row 0", reduce=False),
    Fault("re-arms not drained", Protocol(drains="sends"), UNDRAINED, "wrong data", "c: takes row 0", reduce=False),
    Fault(
        "refilled before all have stopped", Protocol(agrees_to_refill=False),
        RESET, "wrong data", "refills its buffers",
    ),
    Fault("begun before all have refilled", Protocol(agrees_to_begin=False), RESET, "deadlock", "begins anew"),
    Fault(
        "a gone rank's buffers used again", Protocol(),
        replace(by_name("gone, and replaced over new buffers"), buffers=(0, 0)), "wrong data", "refills its buffers",
    ),
    Fault(
        "channels that don't fit", Protocol(),
        replace(by_name("two channels, all resident"), resident=1), "deadlock", "channel 1, a: sends",
    ),
    Fault(
        "a grid that doesn't fit", Protocol(),
        replace(by_name("two ranks, rows and grid vary"), resident=1), "deadlock", "a: block 1 sends",
    ),
]  # fmt: skip

FAULTS = [*NAMED, *READINGS, *OTHERS]
