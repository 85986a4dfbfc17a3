"""Times of a decode: of each layer's merge, and of whole steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["Stopwatch"]


class Stopwatch:
    """Takes times on the host or, where a GPU does the work, by events on its stream, in replays too.

    Args:
        meet: returns when all ranks have come. On CPU they meet before a merge, or its time would include waiting for a
            rank whose attention took longer.

    Attributes:
        laps_us: of each layer's merges, one for each step.
        steps_us: of whole steps.
    """

    def __init__(self, device: torch.device, layers: int, meet: Callable[[], None]) -> None:
        self._meet = meet
        self.laps_us: list[list[float]] = [[] for _ in range(layers)]
        self.steps_us: list[float] = []
        self._laps: list[tuple[Any, Any]] = []
        self._whole: tuple[Any, Any] | None = None
        if device.type == "cuda":
            # External: a replay records them anew, so that they can be read after it.
            self._laps = [(_event(external=True), _event(external=True)) for _ in range(layers)]
            self._whole = _event(), _event()

    @contextlib.contextmanager
    def lap(self, layer: int) -> Iterator[None]:
        """Around a merge, within a step."""
        if self._whole is not None:
            begin, end = self._laps[layer]
            begin.record()
            yield
            end.record()
            return
        self._meet()
        start = time.perf_counter()
        yield
        self.laps_us[layer].append((time.perf_counter() - start) * 1e6)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a whole step. Waits for the GPU."""
        if self._whole is None:
            start = time.perf_counter()
            yield
            self.steps_us.append((time.perf_counter() - start) * 1e6)
            return
        begin, end = self._whole
        begin.record()
        yield
        end.record()
        end.synchronize()
        self.steps_us.append(begin.elapsed_time(end) * 1e3)
        for times, (first, last) in zip(self.laps_us, self._laps, strict=True):
            times.append(first.elapsed_time(last) * 1e3)


def _event(**how: bool) -> Any:
    return torch.cuda.Event(enable_timing=True, **how)
