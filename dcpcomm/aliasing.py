"""Whether tensors share memory, so that a merge never writes what it, or somebody else, still reads."""

from __future__ import annotations

import warnings

import numpy as np
import torch

__all__ = ["overlap", "overlaps_itself", "span"]

_MAX_WORK = 100_000  # of numpy's exact solver; beyond it the answer is "may overlap"


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last byte that `tensor` can touch; (0, 0) where it has no elements."""
    if tensor.numel() == 0:
        return 0, 0
    if tensor.is_contiguous():  # the usual case, and on the hot path
        start = tensor.data_ptr()
        return start, start + tensor.nbytes
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.element_size()


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether any byte belongs to both. Exact for interleaved views, conservative where that would take too long."""
    (a0, a1), (b0, b1) = span(a), span(b)
    if a.device != b.device or a1 <= b0 or b1 <= a0:
        return False
    try:
        return bool(np.shares_memory(_as_array(a), _as_array(b), max_work=_MAX_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two indices of `tensor` may name one element (an expanded axis, say)."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


class _Memory:
    """The same addresses for numpy's arithmetic; never dereferenced, so they may lie on a GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), True),
        }


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.asarray(_Memory(tensor))
