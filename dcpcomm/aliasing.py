"""Whether tensors share memory, so that a merge never writes what it, or somebody else, still reads."""

from __future__ import annotations

import warnings

import numpy as np
import torch

__all__ = ["overlap", "overlaps_itself", "reach"]

_MAX_WORK = 100_000  # of numpy's exact solver; beyond it the answer is "may overlap"


def reach(tensor: torch.Tensor) -> int:
    """Bytes from the first that `tensor` can touch to one past the last; 0 where it has no elements."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether any byte belongs to both. Exact for interleaved views, conservative where that would take too long."""
    a0, b0 = a.data_ptr(), b.data_ptr()
    if a.device != b.device or a0 + reach(a) <= b0 or b0 + reach(b) <= a0:
        return False
    try:
        return bool(np.shares_memory(_as_array(a), _as_array(b), max_work=_MAX_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two indices of `tensor` may name one element (an expanded axis, say)."""
    last = 0
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride <= last:
            return True
        last += (size - 1) * stride
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
