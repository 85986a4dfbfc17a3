"""What a run of the model is made of: calls, who makes them, and which variant of the protocol carries them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Answer", "Call", "Outcomes", "Protocol", "Reset", "Scenario"]


@dataclass(frozen=True)
class Call:
    """One launch. Ranks that mean the same call have the same name: every value that is sent carries it, unseen."""

    name: str
    rows: int = 1
    grid: int = 1  # block b has the rows that are b modulo the grid
    tag: int = 0
    empty: tuple[tuple[int, int], ...] = ()  # (rank, row): LSE -inf, so no payload is sent
    light: tuple[tuple[int, int], ...] = ()  # (rank, row): a weight that underflows to 0, payload sent all the same
    off: tuple[int, ...] = ()  # ranks that call it off: they send a header and no rows
    deadline: bool = False  # may be given up, at any time while a peer has not sent
    ordinal: int = -1  # as the host counted when it captured this launch; -1: launched eagerly


@dataclass(frozen=True)
class Reset:
    """Stop, agree, refill, agree, new generation."""

    after: tuple[tuple[int, int], ...] = ()  # streams (rank, channel) that must have ended


@dataclass(frozen=True)
class Protocol:
    """Section 10 of the design, its holes closed that this model found. Other values are variants, and mistakes."""

    slots: int = 2
    # When a kernel lets the next one begin: when it has ended; "waits", at its start, and the next one waits for its
    # end before it loads the epoch; "sent" and "validated", the next one sends while this one still runs.
    overlap: str = ""
    waits_before_trigger: bool = True  # of "sent" and "validated": no kernel triggers while the one before it runs
    epoch_after_wait: bool = True  # of "waits"
    drains: str = "all"  # which stores have arrived when a grid has ended: "all", "rearm", "sends" or "none"
    strict: bool = False  # a block fences after it has re-armed
    rearm: str = "validated"  # or "unless-light", "early"
    awaited: str = "wire"  # what says whether a payload comes: the LSE word, or this rank's own "count"
    words_checked: str = "all"  # or "first"
    advances: str = "all"  # whose epoch words a launch advances: "all", or those of its "own" blocks
    epoch_from: str = "device"  # or "host"
    ordinal_from: str = "device"  # or "host"
    headers: str = "always"  # or "with-rows": nothing is sent or awaited where a source has no rows
    header_epoch: str = "every-word"  # or "first-word"
    off_takes: str = "all"  # a rank that calls off: takes what its peers sent, "headers" only, or "nothing"
    poison_in: str = "own-word"  # or "epoch-word"
    poison_names: bool = True  # the word that poisons a peer says who is missing
    same_call_sends: bool = True  # a block that finds this very call poisoned sends before it gives up
    told_poisons: bool = True  # a rank that gives a call up because it was told marks its own channel with that call
    refuses: bool = True  # a poisoned channel carries no call
    agrees_to_refill: bool = True
    agrees_to_begin: bool = True


@dataclass(frozen=True)
class Answer:
    """What a rank's host learns of one call."""

    call: str
    right: bool
    kinds: tuple[str, ...]  # of "missing", "told", "mismatch"
    ranks: tuple[int, ...]  # who was named


Outcomes = dict[tuple[int, int], tuple[Answer, ...]]


@dataclass(frozen=True)
class Scenario:
    """Programs of all streams: (rank, channel) -> what its host launches, in order."""

    name: str
    programs: dict[tuple[int, int], tuple[Call | Reset, ...]]
    expect: Callable[[Outcomes], str]  # "" where the end is as it should be
    ranks: int = 2
    words: int = 1  # payload words of a row
    resident: int = 0  # blocks that fit on a rank at once, over its channels; 0: all
    split: str = ""  # a block's stores are issued all at once; or step by step, by "peer" or by "word"
    buffers: tuple[int, ...] = (0, 1)  # channel -> whose buffers it uses
    forgives: tuple[str, ...] = ()  # properties not looked at, to see what their violation leads to
