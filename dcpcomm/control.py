"""The one channel over which the ranks of a group agree before any transport exists.

It runs over a key-value store. Rank 0 of the group is the decider: it collects what every rank posted, and publishes
one write-once record; every rank, rank 0 included, acts on that record and on nothing else. So a deadline that passes
differently on two ranks can't make them decide differently: whoever misses the record raises.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

from dcpcomm.errors import CallMismatch, DCPCommError, SelectionMismatch, TransportTimeout

__all__ = ["Control", "Outcome", "first_failure", "left"]

_GRACE_S = 1.0  # how much longer a rank waits for the record than rank 0 waits for the ranks
_BEAT_S = 0.25  # between two heartbeats
_SILENT_S = 10.0  # without a heartbeat, after which a rank that had one is taken for dead


class Outcome(NamedTuple):
    """What one rank reported of one step, and after how many seconds of its own."""

    ok: bool
    reason: str = ""
    seconds: float = 0.0


def first_failure(outcomes: list[Outcome]) -> tuple[int, str] | None:
    """(rank, reason) of the rank that failed first: the later ones often failed only because they waited for it."""
    failed = [(outcome.seconds, rank) for rank, outcome in enumerate(outcomes) if not outcome.ok]
    if not failed:
        return None
    _, rank = min(failed)
    return rank, outcomes[rank].reason


def left(deadline_s: float, mine: Outcome) -> float:
    """What is left of a step's deadline for agreeing on its outcomes. Half a second more, because a peer may have run
    into the same deadline at the same moment.
    """
    return max(0.0, deadline_s - mine.seconds) + 0.5


class Control:
    """Collective steps over a store, among the ranks of one group only, in the same order on every rank.

    Args:
        store: a torch.distributed store that every rank of the group reaches.
        prefix: unique to the merger, the same on all its ranks.
    """

    def __init__(self, store: Any, rank: int, size: int, prefix: str, default_deadline_s: float = 120.0) -> None:
        self.rank, self.size = rank, size
        self.default_deadline_s = default_deadline_s
        self._store = dist.PrefixStore(prefix, store)
        self._step = 0

    def exchange(self, payload: bytes, deadline_s: float | None = None, what: str = "a step") -> list[bytes]:
        """Every rank's `payload`, by rank, as rank 0 saw them. The ranks must agree on `what` it is for.

        Args:
            deadline_s: seconds that rank 0 waits for the others, counted from its own arrival.
            what: names the step in errors.

        Raises:
            TransportTimeout: naming the ranks that did not arrive; on every rank that did.
            SelectionMismatch: a rank called `fail` instead; on every other rank, naming it and its reason.
            CallMismatch: the ranks met in different steps, naming who came for what.
        """
        texts = self._run((True, payload.decode("latin-1"), what), deadline_s, what)  # JSON has no bytes
        return [text.encode("latin-1") for text in texts]

    def agree(self, mine: Outcome, deadline_s: float | None = None, what: str = "a step") -> list[Outcome]:
        """Every rank's outcome of the step before, by rank. Raises as `exchange`."""
        outcomes = self.exchange(json.dumps(mine).encode(), deadline_s, what)
        return [Outcome(*json.loads(outcome)) for outcome in outcomes]

    def fail(self, reason: str) -> None:
        """In place of the next `exchange`: make it raise on every other rank, with `reason`. Waits for nobody."""
        step, self._step = self._step, self._step + 1
        if self.size == 1:
            return
        if self.rank == 0:
            self._put(f"{step}/record", ("failed", [(0, reason)]))
        else:
            self._put(f"{step}/{self.rank}", (False, reason, ""))

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Show the others that this rank is alive, for as long as the block runs: who then falls silent isn't waited
        for until the end of a deadline.
        """
        stop = threading.Event()

        def beat() -> None:
            for count in itertools.count():
                self.note("beat", str(count))
                if stop.wait(_BEAT_S):
                    return

        thread = threading.Thread(target=beat, daemon=True, name="dcpcomm heartbeat")
        if self.size > 1:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            if self.size > 1:
                thread.join(timeout=1.0)
                self.note("beat", "")

    def note(self, key: str, value: str) -> None:
        """Leave a word for the others, outside of any step: what this rank last did, or why it raised."""
        with contextlib.suppress(Exception):  # a note is a courtesy: a store that is gone must not hide the real error
            self._store.set(f"note/{self.rank}/{key}", value)

    def read_note(self, rank: int, key: str) -> str:
        """What `rank` last noted under `key`; "" where it did not, or where the store is gone."""
        with contextlib.suppress(Exception):
            if self._store.check([f"note/{rank}/{key}"]):
                return str(self._store.get(f"note/{rank}/{key}").decode())
        return ""

    def _run(self, posted: tuple[bool, str, str], deadline_s: float | None, what: str) -> list[str]:
        step, self._step = self._step, self._step + 1
        if self.size == 1:
            return [posted[1]]
        limit = self.default_deadline_s if deadline_s is None else deadline_s
        try:
            kind, value = self._decide(step, posted, limit) if self.rank == 0 else self._obey(step, posted, limit)
        except (RuntimeError, ValueError, OSError) as error:
            if isinstance(error, DCPCommError):
                raise
            raise TransportTimeout(
                f"rank {self.rank}: the store that the ranks meet at is gone ({type(error).__name__}: {error}) in "
                f"{what}"
            ) from error
        if kind == "all":
            return list(value)
        if kind == "failed":
            reasons = "; ".join(f"rank {rank} raised {reason}" for rank, reason in value)
            raise SelectionMismatch(f"rank {self.rank}: {what} was called off: {reasons}")
        if kind == "mixed":
            came = "; ".join(f"rank {rank} came for {theirs}" for rank, theirs in value)
            raise CallMismatch(
                f"rank {self.rank}: the ranks met in different steps: {came}. Nothing was exchanged. Every rank must "
                "make the same calls in the same order"
            )
        missing, why = tuple(value[0]), value[1]
        if self.rank in missing:
            raise TransportTimeout(
                f"rank {self.rank}: {what} had ended before this rank arrived: it {why}, and the others gave up. Call "
                "again, on all ranks of the group",
                missing,
            )
        doing = (self.read_note(rank, "doing") for rank in missing)
        heard = "; ".join(f"rank {rank} was last {did}" for rank, did in zip(missing, doing, strict=True) if did)
        raise TransportTimeout(
            f"rank {self.rank}: {what}: rank {_listed(missing)} of {self.size} {why}. Every rank of the group must "
            "make this call; is that process alive, and does it make the same calls in the same order? "
            f"{heard}".rstrip(),
            missing,
        )

    def _decide(self, step: int, posted: tuple[bool, str, str], limit: float) -> tuple[str, Any]:
        self._store.set(f"{step}/open", "1")

        def absent() -> list[int]:
            return [rank for rank in range(1, self.size) if not self._store.check([f"{step}/{rank}"])]

        silent = self._poll(lambda: not absent(), limit, absent)
        frames = {0: posted}
        missing = tuple(absent())
        for rank in range(1, self.size):
            if rank not in missing:
                frames[rank] = self._take(f"{step}/{rank}")
        failed = {rank: value for rank, (ok, value, _) in frames.items() if not ok}
        whats = sorted((rank, what) for rank, (_, _, what) in frames.items())
        record: tuple[str, Any]
        if failed:
            record = ("failed", sorted(failed.items()))
        elif missing:
            record = ("missing", _why(silent, missing, limit))
        elif len({what for _, what in whats}) > 1:
            record = ("mixed", whats)
        else:
            record = ("all", [value for _, value in sorted((rank, frame[1]) for rank, frame in frames.items())])
        self._put(f"{step}/record", record)
        # All have posted this step, so all have read the record of the step before.
        if step and not missing:
            for rank in range(1, self.size):
                self._store.delete_key(f"{step - 1}/{rank}")
            self._store.delete_key(f"{step - 1}/record")
            self._store.delete_key(f"{step - 1}/open")
        return record

    def _obey(self, step: int, posted: tuple[bool, str, str], limit: float) -> tuple[str, Any]:
        self._put(f"{step}/{self.rank}", posted)

        def done() -> bool:
            return bool(self._store.check([f"{step}/record"]))

        silent = self._poll(done, limit + _GRACE_S, lambda: [0], lambda: self._store.check([f"{step}/open"]))
        if not done():
            return "missing", _why(silent, (0,), limit)
        kind, value = self._take(f"{step}/record")
        return kind, value

    # JSON, because whoever reaches the store's port can write to it: what is read there must not be able to run.

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _take(self, key: str) -> Any:
        return json.loads(self._store.get(key))

    def _poll(
        self,
        done: Callable[[], bool],
        limit: float,
        awaited: Callable[[], list[int]],
        restart: Callable[[], bool] | None = None,
    ) -> tuple[int, ...]:
        """Wait until `done`, at most `limit` seconds, and once more as long from the moment that `restart` first holds.

        Polled instead of `store.wait`: that holds a TCP store's connection, and with it every other thread of the
        process.

        Returns:
            those of the `awaited` ranks whose heart stopped beating, which ended the wait; mostly none.
        """
        began = time.monotonic()
        deadline, pause, look = began + limit, 0.0002, began + 1.0
        beats: dict[int, tuple[str, float]] = {}
        while not done():
            now = time.monotonic()
            if restart is not None and now - began > 0.05 and restart():
                deadline, restart = now + limit, None
            if now >= deadline:
                break
            if now >= look:
                look = now + 1.0
                for rank in awaited():
                    beat = self.read_note(rank, "beat")
                    if beats.get(rank, ("", 0.0))[0] != beat:
                        beats[rank] = (beat, now)
                silent = tuple(rank for rank, (beat, since) in beats.items() if beat and now - since > _SILENT_S)
                if silent:
                    return silent
            time.sleep(pause)
            pause = min(pause * 1.5, 0.01)
        return ()


def _why(silent: tuple[int, ...], missing: tuple[int, ...], limit: float) -> tuple[tuple[int, ...], str]:
    """Who is to be named, and what they did."""
    if silent:
        return silent, f"fell silent: it was there, and then gave no sign of life for {_SILENT_S:g} s"
    return missing, f"did not arrive within {limit:g} s"


def _listed(ranks: Any) -> str:
    return ", ".join(str(rank) for rank in ranks)
