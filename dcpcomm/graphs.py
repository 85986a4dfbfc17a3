"""Capture into a CUDA graph without waiting for the device: other ranks of this process may be in mid-call."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["captured"]


_lock = threading.Lock()
_capturing = 0
_collected = False  # whether garbage was collected by itself before


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No thread collects garbage by itself: a graph among it would be destroyed, and that ends a capture there."""
    global _capturing, _collected
    with _lock:
        if not _capturing:
            _collected = gc.isenabled()
            gc.disable()
        _capturing += 1
    try:
        yield
    finally:
        with _lock:
            _capturing -= 1
            if not _capturing and _collected:
                gc.enable()


def captured(step: Callable[[], Any], device: torch.device) -> Any:
    """A `torch.cuda.CUDAGraph` of what `step` puts on the current stream.

    Only this thread must keep from what a capture forbids.
    """
    # Of high priority, because torch hands streams out in turn: another might be that of a rank of this process.
    graph, stream, outer = torch.cuda.CUDAGraph(), torch.cuda.Stream(device, -1), torch.cuda.current_stream(device)
    stream.wait_stream(outer)
    with torch.cuda.stream(stream), _no_collection():
        with _lock:  # torch notes graphs in tables that all threads share: eight that begin at once crashed it
            graph.capture_begin(capture_error_mode="thread_local")
        try:
            step()
        except BaseException:
            with contextlib.suppress(RuntimeError), _lock:  # what `step` did may have ended the capture
                graph.capture_end()
            raise
        with _lock:
            graph.capture_end()
    outer.wait_stream(stream)
    return graph
