"""Who kept a call from ending well, and in what words: a rank in another call, one that called its call off, one that
did not come.
"""

from __future__ import annotations

import numpy as np

from dcpcomm.combine.wire import KIND_CANCELLED, Header
from dcpcomm.errors import CallMismatch, DCPCommError, TransportTimeout
from dcpcomm.group import Group
from dcpcomm.watchdog import Watchdog

__all__ = ["Blame"]


class Blame:
    """Of one channel's calls.

    Args:
        on_gpu: calls are counted on a GPU, replays too, and the host hears of them late.
    """

    def __init__(self, group: Group, watchdog: Watchdog, index: int, on_gpu: bool) -> None:
        self._group, self._watchdog, self._index, self._on_gpu = group, watchdog, index, on_gpu

    def mismatch(self, words: np.ndarray, mine: Header) -> tuple[CallMismatch, bool]:
        """Of headers `[N, 4]` that aren't this rank's: the error, and whether it breaks the channel; not where peers
        merely called this very call off.
        """
        rank = self._group.rank
        cancelled: list[str] = []
        other: list[str] = []
        for source in range(self._group.size):
            theirs = Header.from_words(words[source])
            if theirs == mine or source == rank:
                continue
            if theirs.kind == KIND_CANCELLED:
                reason = self._group.control.read_note(source, self.cancel_key(theirs.ordinal))
                said = (
                    f"rank {source} raised in call {theirs.ordinal} instead of sending its rows: "
                    f"{reason or 'reason not known'}"
                )
                (cancelled if theirs.ordinal == mine.ordinal else other).append(said)
            else:
                other.append(f"rank {source} came with {theirs}")
        if other:
            return CallMismatch(
                f"rank {rank}: ranks met in different calls on channel {self._index}: rank {rank} came with {mine}; "
                f"{'; '.join(other + cancelled)}. Nothing was merged. Did a rank skip a merge, or was B different "
                "there?"
            ), True
        return CallMismatch(
            f"rank {rank}: {mine} on channel {self._index} was called off: {'; '.join(cancelled)}. Nothing was merged; "
            "the next call may follow"
        ), False

    def refusal(self, broken: DCPCommError) -> DCPCommError:
        """What a broken channel raises: the error that broke it, and how to go on."""
        message = (
            f"rank {self._group.rank}: channel {self._index} carries no call until reset() on all ranks, because of an "
            f"earlier error: {broken}"
        )
        if isinstance(broken, TransportTimeout):
            return TransportTimeout(message, broken.ranks)
        return type(broken)(message)

    def timeout(self, transport: str, error: TransportTimeout, call: Header) -> DCPCommError:
        """Of `call` over `transport`, for whose peers `error` says that they did not come."""
        rank = self._group.rank
        self._group.control.note("raised", f"raised in {call} on channel {self._index}: {error}")
        for late in error.ranks:
            reason = self._group.control.read_note(late, self.cancel_key(call.ordinal))
            if reason and not self._on_gpu:  # over a transport that could not tell us sooner
                return CallMismatch(
                    f"rank {rank}: {call} on channel {self._index} was called off: rank {late} raised in call "
                    f"{call.ordinal} instead of sending its rows: {reason}. Nothing was merged"
                )
        return self.other_call(error.ranks, call) or TransportTimeout(
            f"rank {rank}: {call} on channel {self._index} over {transport!r}: {error}. Last heard: "
            f"{self._watchdog.last_words(error.ranks)}",
            error.ranks,
        )

    def other_call(self, others: tuple[int, ...], call: Header) -> CallMismatch | None:
        """With another B a rank may wait over another transport, or in a library that wants equal sizes: its header is
        never met.
        """
        for late in others:
            theirs = self._watchdog.call_of(late, self._index)
            if theirs is not None and theirs.ordinal == call.ordinal and theirs != call:
                return CallMismatch(
                    f"rank {self._group.rank}: ranks waited in different calls on channel {self._index}: rank "
                    f"{self._group.rank} in {call}; rank {late} in {theirs}. Nothing was merged"
                )
        return None

    def cancel_key(self, ordinal: int) -> str:
        """Where the reason is noted. Ordinals begin again with a reset, so the generation is in it. A GPU counts by
        itself, replays too: there it is the last reason.
        """
        which = "last" if self._on_gpu else ordinal
        return f"cancel/{self._group.generation}/{self._index}/{which}"
