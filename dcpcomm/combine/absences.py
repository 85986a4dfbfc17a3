"""What kernels have noted of ranks that did not come."""

from __future__ import annotations

import torch

from dcpcomm.errors import TransportTimeout
from dcpcomm.group import Group

__all__ = ["Absences", "deadline_of"]

_DEADLINE_UNIT_S = 2**20 * 1e-9
_MOST_DEADLINE = 2**31


def deadline_of(limit_s: float | None) -> int:
    """Seconds in the unit that kernels wait by; 0, which waits on, for None."""
    return 0 if limit_s is None else max(1, min(_MOST_DEADLINE, round(limit_s / _DEADLINE_UNIT_S)))


class Absences:
    """What kernels note of ranks that didn't come, in pinned memory: read without asking the GPU."""

    def __init__(self, group: Group, channels: int) -> None:
        self._group = group
        with torch.inference_mode(False):
            # int64 [channels, 2 + N]: state, epoch, 1 for each rank that is missing
            self._records = torch.zeros((channels, 2 + group.size), dtype=torch.int64).pin_memory()
        self._words = self._records.numpy()
        self._states = [memoryview(words) for words in self._words]  # a read is half of numpy's

    def address(self, channel: int) -> int:
        """For the kernels."""
        return int(self._records[channel].data_ptr())

    def state(self, channel: int) -> memoryview:
        """Its first word is 0 as long as nothing is noted."""
        return self._states[channel]

    def check(self, channel: int) -> None:
        """Raise what was noted."""
        if not self._states[channel][0]:
            return
        missing = tuple(int(rank) for rank in self._words[channel, 2:].nonzero()[0])
        if not missing:
            peers = tuple(self._group.peers)
            raise TransportTimeout("a peer has given this channel up, having waited too long", peers)
        text = f"rank {', '.join(map(str, missing))} did not arrive in time in exchange {self._words[channel, 1]}"
        raise TransportTimeout(text, missing)

    @property
    def any(self) -> bool:
        """Whether there is something, on any channel."""
        return bool(self._words[:, 0].any())
