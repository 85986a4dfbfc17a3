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
from typing import Any

from dcpcomm.combine.wire import Header
from dcpcomm.control import Control
from dcpcomm.log import log

__all__ = ["Watchdog"]


class _Progress:
    """What this rank last did on each channel. Written by the calling threads, read by the watchdog's."""

    def __init__(self, channels: int) -> None:
        self.moved = time.monotonic()
        self.calls: list[tuple[bool, Header | None, float]] = [(False, None, self.moved)] * channels

    def note(self) -> str:
        """For the others: by channel, whether this rank is inside a call, its header, and for how long."""
        now = time.monotonic()
        return json.dumps(
            [
                {
                    "inside": inside,
                    "call": call._asdict() if call is not None else None,
                    "seconds": round(now - since, 1),
                }
                for inside, call, since in self.calls
            ]
        )


class Watchdog:
    """Watches one merger.

    Args:
        timeout_s: how long an exchange may wait for its peers.
        action: "raise": the exchange itself raises at the deadline. "log": it waits on, and this thread says so once
            per call.
        owner: what the thread ends with, or with the process.
    """

    def __init__(self, control: Control, channels: int, timeout_s: float, action: str, owner: object) -> None:
        self._control = control
        self._timeout_s, self._action = timeout_s, action
        self._progress = _Progress(channels)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._owner = weakref.ref(owner)

    def begin(self, channel: int, call: Header) -> None:
        """This rank enters an exchange."""
        if self._thread is None:
            self._start()
        now = time.monotonic()
        self._progress.calls[channel] = (True, call, now)
        self._progress.moved = now

    def end(self, channel: int, call: Header) -> None:
        """This rank has left it."""
        now = time.monotonic()
        self._progress.calls[channel] = (False, call, now)
        self._progress.moved = now

    def forget(self) -> None:
        """After a reset: what was done before it says nothing of the calls to come."""
        now = time.monotonic()
        self._progress.calls[:] = [(False, None, now)] * len(self._progress.calls)
        self._progress.moved = now

    def last_words(self, ranks: tuple[int, ...]) -> str:
        """What each of `ranks` last noted, for an error message."""
        return "; ".join(f"rank {rank}: {_last_word(self._control, rank)}" for rank in ranks)

    def call_of(self, rank: int, channel: int) -> Header | None:
        """The call that `rank` noted it is waiting in, if it did."""
        note = self._control.read_note(rank, "progress")
        there: dict[str, Any] = json.loads(note)[channel] if note else {"inside": False}
        return Header(**there["call"]) if there["inside"] and there["call"] else None

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
            args=(self._control, self._progress, self._stop, self._timeout_s, self._action),
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


def _watch(control: Control, progress: _Progress, stop: threading.Event, timeout_s: float, action: str) -> None:
    noted_at = -1.0
    logged: set[tuple[int, Header]] = set()
    while not stop.wait(min(1.0, timeout_s / 8)):
        now, moved = time.monotonic(), progress.moved
        if now - moved > timeout_s / 2 and noted_at != moved:
            control.note("progress", progress.note())
            noted_at = moved
        if action != "log":
            continue
        for channel, (inside, call, since) in enumerate(progress.calls):
            if inside and call is not None and now - since > timeout_s and (channel, call) not in logged:
                logged.add((channel, call))
                others = "; ".join(
                    f"rank {rank}: {_last_word(control, rank)}" for rank in range(control.size) if rank != control.rank
                )
                log.warning(
                    "rank %d has waited %.1f s in %s on channel %d. %s",
                    control.rank,
                    now - since,
                    call,
                    channel,
                    others,
                )


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
