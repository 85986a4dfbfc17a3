"""The protocol with one mistake each, and what the search must find then."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.protocol.scenarios import (
    A, B, C, D, GIVEN_UP, GONE, OFF, TAGGED, VARYING, all_right, by_name, calls_off, everywhere, last_right,
    names_mismatch, names_missing, right_on,
)  # fmt: skip
from tests.protocol.setting import Call, Protocol, Reset, Scenario

__all__ = ["FAULTS", "Fault"]


@dataclass(frozen=True)
class Fault:
    """A mistake, where it shows, the property that it violates, and words of the trace that tell of it."""

    name: str
    protocol: Protocol
    scenario: Scenario
    property: str
    tells: str


def forgiving(scenario: Scenario, *properties: str) -> Scenario:
    """To see what comes of a word left unarmed, say, and not only that it was left."""
    return replace(scenario, forgives=properties)


FOUR = by_name("two words a row")
LIGHT = by_name("a weight underflows")
ONE_WORD = Scenario("four calls", everywhere(2, A, B, C, D), all_right)
SIX = Scenario("six calls", everywhere(2, A, B, C, D, Call("e"), Call("f")), all_right)
GROWS = Scenario("the grid grows", everywhere(2, A, Call("b", rows=2, grid=2), C), all_right)
SILENT = Scenario("rank 1 has no rows twice", everywhere(2, A, replace(B, empty=((1, 0),)), replace(C, empty=((1, 0),))), all_right)
TWO_BLOCKS = (replace(A, rows=2, grid=2, deadline=True), replace(B, rows=2, grid=2, deadline=True))
OTHER_ROWS = {(0, 0): (Call("a", rows=2, grid=2, deadline=True),), (1, 0): (Call("other", deadline=True),)}

FAULTS = [
    # the six that were named before there was a model
    Fault("re-arm skipped by weight", Protocol(rearm="unless-light"), forgiving(LIGHT, "left unarmed"), "wrong data", "d"),
    Fault("epoch words that drift", Protocol(advances="own"), forgiving(GROWS, "epochs differ"), "deadlock", "b"),
    Fault("one-way calls", Protocol(off_takes="nothing"), Scenario("called off three times", everywhere(2, A, OFF, replace(C, off=(1,)), replace(D, off=(1,))), calls_off("b c d")), "", ""),
    Fault("resumed without a reset", Protocol(refuses=False), Scenario("late", everywhere(2, *GIVEN_UP[:2]), all_right), "answer after a failure", ""),
    Fault("re-armed before validation", Protocol(rearm="early"), forgiving(FOUR, "left unarmed"), "wrong data", ""),
    Fault("overlap with two slots", Protocol(overlap="validated"), ONE_WORD, "", ""),
    # variants of section 10 that the model found wanting
    Fault("three slots, triggered after sending", Protocol(overlap="sent", slots=3), SIX, "", ""),
    Fault("three slots, triggered without waiting", Protocol(overlap="validated", slots=3, waits_before_trigger=False), SIX, "", ""),
    Fault("poison in the epoch word", Protocol(poison_in="epoch-word"), Scenario("two blocks late", everywhere(2, *TWO_BLOCKS), all_right), "answer after a failure", ""),
    Fault("the peer poisoned without a name", Protocol(poison_names=False), by_name("one of three is absent"), "unexpected end", ""),
    Fault("poisoned blocks that don't send", Protocol(same_call_sends=False), by_name("another number of rows"), "", ""),
    Fault("told, but not marked", Protocol(told_poisons=False), by_name("late, given up, reset"), "answer after a failure", ""),
    Fault("header's epoch in one word of it", Protocol(header_epoch="first-word"), by_name("a call is skipped"), "", ""),
    Fault("header's epoch in one word, same calls", Protocol(header_epoch="first-word"), Scenario("tags vary", everywhere(2, *TAGGED), all_right), "false mismatch", ""),
    Fault("the host's ordinal in the header", Protocol(ordinal_from="host"), by_name("replay and eager calls"), "false mismatch", ""),
    Fault("called off, peers' rows left", Protocol(off_takes="headers"), forgiving(Scenario("called off", everywhere(2, A, OFF, C, D), calls_off("b")), "left unarmed"), "wrong data", ""),
    Fault("overlap, room for one grid a channel", Protocol(overlap="waits"), replace(by_name("overlapping launches of two channels"), resident=2), "deadlock", ""),
    # mistakes that are easily made
    Fault("epoch from the host", Protocol(epoch_from="host"), by_name("replay and eager calls"), "", ""),
    Fault("epoch loaded before the grid before ended", Protocol(overlap="waits", epoch_after_wait=False), ONE_WORD, "", ""),
    Fault("no header where there are no rows", Protocol(headers="with-rows"), SILENT, "", ""),
    Fault("a count says what was sent", Protocol(awaited="count"), SILENT, "", ""),
    Fault("one word of a row looked at", Protocol(words_checked="first"), FOUR, "torn row", ""),
    Fault("stores not drained", Protocol(drains="none"), forgiving(ONE_WORD, "left unarmed"), "", ""),
    Fault("re-arms not drained", Protocol(drains="sends"), forgiving(ONE_WORD, "left unarmed"), "", ""),
    Fault("refilled before all have stopped", Protocol(agrees_to_refill=False), by_name("late, given up, reset"), "", ""),
    Fault("begun before all have refilled", Protocol(agrees_to_begin=False), by_name("late, given up, reset"), "", ""),
    Fault("a gone rank's buffers used again", Protocol(), replace(by_name("gone, and replaced over new buffers"), buffers=(0, 0)), "", ""),
    Fault("channels that don't fit", Protocol(), replace(by_name("two channels, all resident"), resident=1), "deadlock", ""),
    Fault("a grid that doesn't fit", Protocol(), replace(by_name("two ranks, rows and grid vary"), resident=1), "deadlock", ""),
    Fault("a call skipped, tags equal", Protocol(), Scenario("skipped unseen", {(0, 0): (A, B), (1, 0): (B,)}, all_right), "wrong data", ""),
]
