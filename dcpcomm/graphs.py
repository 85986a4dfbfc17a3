"""Capture into a CUDA graph without waiting for the device: other ranks of this process may be in mid-call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["captured"]


def captured(step: Callable[[], Any], device: torch.device) -> Any:
    """A `torch.cuda.CUDAGraph` of what `step` puts on the current stream.

    Only this thread must keep from what a capture forbids.
    """
    # Of high priority, because torch hands streams out in turn: another might be that of a rank of this process.
    graph, stream, outer = torch.cuda.CUDAGraph(), torch.cuda.Stream(device, -1), torch.cuda.current_stream(device)
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            step()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what `step` did may have ended the capture
                graph.capture_end()
            raise
        graph.capture_end()
    outer.wait_stream(stream)
    return graph
