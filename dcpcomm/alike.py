"""Whether tensors are laid out as others were, told by one call in a fifth of the time that asking each for its shape,
strides, dtype and device takes.

It is the guard by which `torch.compile` tells whether what it has compiled still fits. That is no public interface of
torch's, so it is taken only where it is seen to tell apart all that matters here; elsewhere there is none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["alike"]


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """What tells, of as many tensors, whether each is like the one here: of its type, shape, strides, dtype and device,
    as negated and as requiring a gradient, and an inference tensor or not, in inference mode or not.

    Returns:
        None where this torch has nothing that does.
    """
    return _guard(tensors) if _trusted() else None


def _guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    from torch._C._dynamo import guards

    make: Any = guards.TensorGuards
    shapes, strides = [list(one.shape) for one in tensors], [list(one.stride()) for one in tensors]
    check: Callable[..., bool] = make(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
    return check


@functools.cache
def _trusted() -> bool:
    """Whether the guard tells what `alike` promises, here and now."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            like = torch.zeros(4, 2, 8)
            check = _guard([like, like])
            others = (
                like.bfloat16(), like[:3], like.transpose(0, 1), torch.zeros(4, 2, 16)[..., :8], like.to("meta"),
                torch._neg_view(like), torch.zeros(4, 2, 8, requires_grad=True), torch.nn.Parameter(like),
            )  # fmt: skip
            with torch.inference_mode():
                inference = torch.zeros(4, 2, 8)
                inside = check(like, like), _guard([like])(like), _guard([inference])(inference)
            outside = check(inference, like), check(like, inference)
            told = [check(like, other) or check(other, like) for other in others]
            return check(like, torch.ones(4, 2, 8)) and not any((*told, *outside)) and inside == (False, True, True)
    except Exception:  # another torch's guard is another guard
        return False
