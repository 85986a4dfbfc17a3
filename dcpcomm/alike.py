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

__all__ = ["Seen", "alike"]

_GUARDS_MADE = 8  # in all: who changes between inference mode and none would pay for one in each call


class Seen:
    """The tensors of calls that went well, all of one layout.

    Args:
        want_lse: what was asked for.
    """

    def __init__(self, want_lse: bool) -> None:
        self._want_lse = want_lse
        self._form: tuple[bool, ...] = ()
        self._like: Callable[..., bool] | None = None
        self._guards_made = 0

    def expect(
        self,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        valid_counts: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> None:
        """A call with these, and no lengths, has gone well: the next ones are known by `is_like`."""
        if self._guards_made == _GUARDS_MADE:
            return
        self._guards_made += 1
        tensors = [one for one in (partial_out, partial_lse, valid_counts, out) if one is not None]
        self._form = valid_counts is None, out is None
        self._like = None if any(one.requires_grad for one in tensors) else alike(tensors)

    def is_like(
        self,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        valid_counts: torch.Tensor | None,
        out: torch.Tensor | None,
        return_lse: bool,
    ) -> bool:
        """Whether a call with these, and no lengths, is one of this layout in which nothing can be wrong that
        tensors show, but for where they lie. False also where that would take longer to tell.
        """
        like = self._like
        if like is None or return_lse is not self._want_lse or self._form != (valid_counts is None, out is None):
            return False
        if valid_counts is None:
            return like(partial_out, partial_lse) if out is None else like(partial_out, partial_lse, out)
        if out is None:
            return like(partial_out, partial_lse, valid_counts)
        return like(partial_out, partial_lse, valid_counts, out)


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
