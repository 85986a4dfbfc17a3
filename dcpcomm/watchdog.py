"""Who is late, and what did they last do: progress of every channel, told to the other ranks when something stands
still.

A rank that waits can't know why; the rank it waits for can. So each merger has one thread that, when nothing has moved
on this rank for half the deadline, leaves a note in the store. A rank that runs into its deadline reads the notes of
those it missed.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from typing import Any, NamedTuple, Protocol

import numpy as np

from dcpcomm.combine.wire import Header
from dcpcomm.control import Control
from dcpcomm.log import log

__all__ = ["Watchdog"]


class Overdue(Protocol):
    """Whom a watchdog tells of a call that waits on a device."""

    def overdue(self, channel: int, ordinal: int, seconds: float, late: tuple[int, ...]) -> None:
        """Call `ordinal` of `channel` has waited for `seconds`, for ranks `late`, past the deadline."""


class _State(NamedTuple):
    """Of one channel on this rank.

    Attributes:
        inside: whether a call is under way.
        call: the last that Python made; replays run none.
        since: when it began or ended.
        begun: calls so far, replays too, where a device counts them; else 0.
    """

    inside: bool
    call: Header | None
    since: float
    begun: int = 0


class _Progress:
    """What this rank last did on each channel. Written by the calling threads and a device, read by the watchdog's.

    Args:
        device: `Engine.progress`.
    """

    def __init__(self, channels: int, device: np.ndarray | None) -> None:
        self._device = device
        self.forget(channels)

    def forget(self, channels: int) -> None:
        self.moved = time.monotonic()
        self.calls: list[tuple[bool, Header | None, float]] = [(False, None, self.moved)] * channels
        self._seen: list[tuple[int, int, float]] = [(0, 0, self.moved)] * channels

    def look(self) -> list[_State]:
        """By channel. On a device, a call is under way from its first kernel to its last."""
        if self._device is None:
            return [_State(*call) for call in self.calls]
        now, states = time.monotonic(), []
        for channel, (before, call) in enumerate(zip(self._seen, self.calls, strict=True)):
            begun, ended = int(self._device[channel, 0]), int(self._device[channel, 1])
            if (begun, ended) != before[:2]:
                self._seen[channel] = begun, ended, now
                self.moved = now
            states.append(_State(begun > ended, call[1], self._seen[channel][2], begun))
        return states

    def note(self, states: list[_State]) -> str:
        """For the others."""
        now = time.monotonic()
        return json.dumps(
            [
                {
                    "inside": state.inside,
                    "call": state.call._asdict() if state.call is not None else None,
                    "seconds": round(now - state.since, 1),
                    "begun": state.begun,
                }
                for state in states
            ]
        )


class Watchdog:
    """Watches one merger.

    Args:
        timeout_s: how long an exchange may wait for its peers.
        action: "raise": the exchange itself raises at the deadline, or `owner.overdue(channel, ...)` is called where it
            is on a device. "log": it waits on, and this thread says so once per call.
        owner: what the thread ends with, or with the process.
        device: `Engine.progress`.
    """

    def __init__(
        self,
        control: Control,
        channels: int,
        timeout_s: float,
        action: str,
        owner: Overdue,
        device: np.ndarray | None = None,
    ) -> None:
        self._control = control
        self._timeout_s, self._action = timeout_s, action
        self._progress = _Progress(channels, device)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._owner = weakref.ref(owner)

    def begin(self, channel: int, call: Header) -> None:
        """This rank enters an exchange."""
        if self._thread is None:
            self._start()
        now = time.monotonic()
        self._progress.calls[channel] = True, call, now
        self._progress.moved = now

    def end(self, channel: int, call: Header) -> None:
        """This rank has left it."""
        now = time.monotonic()
        self._progress.calls[channel] = False, call, now
        self._progress.moved = now

    def forget(self) -> None:
        """After a reset: what was done before it says nothing of the calls to come."""
        self._progress.forget(len(self._progress.calls))

    def last_words(self, ranks: tuple[int, ...]) -> str:
        """What each of `ranks` last noted, for an error message."""
        return "; ".join(f"rank {rank}: {_last_word(self._control, rank)}" for rank in ranks)

    def call_of(self, rank: int, channel: int) -> Header | None:
        """The call that `rank` noted it is waiting in, if it did."""
        there = _noted(self._control, rank, channel)
        return Header(**there["call"]) if there["inside"] and there["call"] else None

    def own_call(self, channel: int) -> Header | None:
        """The last call that this rank made from Python."""
        return self._progress.calls[channel][1]

    def stop(self) -> None:
        """End the thread. Safe twice."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    def _start(self) -> None:
        with self._starting:  # two channels may enter their first call at once
            if self._thread is None:
                self._thread = self._watching_thread()

    def _watching_thread(self) -> threading.Thread:
        thread = threading.Thread(
            target=_watch,
            args=(self._control, self._progress, self._stop, self._timeout_s, self._action, self._owner),
            daemon=True,
            name="dcpcomm watchdog",
        )
        thread.start()
        owner = self._owner()
        if owner is not None:
            # Also runs at interpreter exit: a daemon thread caught inside the store's C++ there would abort the
            # process.
            weakref.finalize(owner, _end, self._stop, thread)
        return thread


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(timeout=1.0)


def _watch(
    control: Control,
    progress: _Progress,
    stop: threading.Event,
    timeout_s: float,
    action: str,
    owner: weakref.ref[Overdue],
) -> None:
    noted: Any = None
    told: set[tuple[int, float]] = set()
    while not stop.wait(min(1.0, timeout_s / 8)):
        states, now = progress.look(), time.monotonic()
        idle = progress.moved if now - progress.moved > timeout_s / 2 else None
        stuck = [state.since for state in states if state.inside and now - state.since > timeout_s / 2]
        if (stuck or idle) and noted != (idle, stuck):
            control.note("progress", progress.note(states))
            noted = idle, stuck
        for channel, state in enumerate(states):
            waited = now - state.since
            if not state.inside or waited <= timeout_s or (channel, state.since) in told:
                continue
            told.add((channel, state.since))
            if action == "log":
                _log(control, channel, state, waited)
            elif state.begun and (session := owner()) is not None:
                session.overdue(channel, state.begun - 1, waited, _late(control, channel, state))
                del session  # or this thread would keep it alive


def _log(control: Control, channel: int, state: _State, waited: float) -> None:
    others = (rank for rank in range(control.size) if rank != control.rank)
    log.warning(
        "rank %d has waited %.1f s in %s on channel %d. %s",
        control.rank,
        waited,
        state.call if state.call is not None and not state.begun else f"call {state.begun - 1}",
        channel,
        "; ".join(f"rank {rank}: {_last_word(control, rank)}" for rank in others),
    )


def _late(control: Control, channel: int, mine: _State) -> tuple[int, ...]:
    """The ranks that have not noted that they came to the call which this device waits in; all, where all have."""
    others = tuple(rank for rank in range(control.size) if rank != control.rank)
    return tuple(rank for rank in others if _noted(control, rank, channel)["begun"] < mine.begun) or others


def _noted(control: Control, rank: int, channel: int) -> dict[str, Any]:
    """What `rank` last noted of a channel; that it does nothing, where it noted nothing."""
    note = control.read_note(rank, "progress")
    there: dict[str, Any] = json.loads(note)[channel] if note else {"inside": False, "call": None, "begun": 0}
    return there


def _last_word(control: Control, rank: int) -> str:
    said = control.read_note(rank, "closed") or control.read_note(rank, "raised")
    note = control.read_note(rank, "progress")
    if said or not note:
        return said or "left no note; is its process alive?"
    parts = []
    for channel, there in enumerate(json.loads(note)):
        call = Header(**there["call"]) if there["call"] else None
        state = f"waiting in {call}" if there["inside"] else f"idle after {call}" if call else "no call yet"
        parts.append(f"channel {channel}: {state}, for {there['seconds']} s when it noted this")
    return "; ".join(parts)
