"""Merges as operators of torch, so that `torch.compile` sees one node instead of Python it can't trace.

    from dcpcomm.adapters import torch_op            # registers torch.ops.dcpcomm.*

    handle = torch_op.handle(merger)                 # an operator can't take an object
    out = torch.ops.dcpcomm.merge(handle, partial_out, partial_lse, valid_counts=counts, tag=layer)

Operators, each with the promises and errors of the method that it calls:

    merge                         -> out
    merge_with_lse                -> out, lse
    merge_and_project             -> out         its fourth argument is the handle of what `gather_w_uv` returned
    merge_and_project_with_lse    -> out, lse

By name they take `valid_counts`, `seq_lens`, `query_start_loc`, `channel` and `tag`. To import this module registers
them, and nothing else does, so `import dcpcomm` stays as fast as it is. An operator runs the merge on the current
stream, so it can be captured in a CUDA graph wherever a merge can. What a compiler traces in its place meets no peer.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from dcpcomm.errors import DCPCommError, ShapeError
from dcpcomm.merger import DCPMerger
from dcpcomm.projection import GatheredWUV

__all__ = ["handle"]

T = TypeVar("T", DCPMerger, GatheredWUV)

_DIGEST_BITS = 32


class _Handles:
    """Numbers of live objects. That of one that is gone is given to no other: what was compiled with it must not find a
    stranger.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: weakref.WeakValueDictionary[int, DCPMerger | GatheredWUV] = weakref.WeakValueDictionary()
        self._given: weakref.WeakKeyDictionary[DCPMerger | GatheredWUV, int] = weakref.WeakKeyDictionary()
        self._count = 0

    def of(self, what: DCPMerger | GatheredWUV) -> int:
        with self._lock:
            found = self._given.get(what)
            if found is None:
                self._count += 1
                found = self._given[what] = self._count << _DIGEST_BITS | _digest(what)
                self._live[found] = what
            return found

    def find(self, number: int, kind: type[T], argument: str) -> T:
        found = self._live.get(number)
        if isinstance(found, kind):
            return found
        if found is not None:
            raise ShapeError(
                f"{argument} is the handle {number} of a {type(found).__name__}; expected a {kind.__name__}'s"
            )
        raise DCPCommError(
            f"{argument} is {number}, which is the handle of no live {kind.__name__} of this process: it is gone, or "
            "the handle is from another process or of another shape. Keep the object as long as what was compiled with "
            "its handle, and get handles from dcpcomm.adapters.torch_op.handle"
        )


_handles = _Handles()


def handle(what: DCPMerger | GatheredWUV) -> int:
    """The integer that stands for a merger, or for weights of `gather_w_uv`, in calls of the operators.

    The same for as long as the object lives, which it doesn't prolong. Handles of a process count from 1 in the order
    in which they are asked for, and carry a digest of shape and group size: where they are asked for in the same order,
    a graph from a compiler's cache on disk finds the same merger in the next process, and is refused one of another
    shape.

    Raises:
        ShapeError: it is neither.
    """
    if not isinstance(what, DCPMerger | GatheredWUV):
        raise ShapeError(f"{what!r} is a {type(what).__name__}; expected a DCPMerger, or what gather_w_uv returned")
    return _handles.of(what)


def _digest(what: DCPMerger | GatheredWUV) -> int:
    """Of what a compiled graph has taken from it: shapes and dtypes of results."""
    if isinstance(what, DCPMerger):
        return zlib.crc32(f"{what.shape}, {what.group.size} ranks".encode())
    return zlib.crc32(f"{tuple(what.local.shape)}, {what.local.dtype}".encode())


# ---------------------------------------------------------------- the operators


def _merge(merger: int, partial_out: Tensor, partial_lse: Tensor, **keywords: Any) -> Tensor:
    merged: Tensor = _merger(merger).merge(partial_out, partial_lse, **keywords)
    return merged


def _merge_with_lse(merger: int, partial_out: Tensor, partial_lse: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
    return _merger(merger).merge(partial_out, partial_lse, return_lse=True, **keywords)


def _merge_and_project(merger: int, partial_latent: Tensor, partial_lse: Tensor, w_uv: int, **keywords: Any) -> Tensor:
    merged: Tensor = _merger(merger).merge_and_project(partial_latent, partial_lse, _weights(w_uv), **keywords)
    return merged


def _merge_and_project_with_lse(
    merger: int, partial_latent: Tensor, partial_lse: Tensor, w_uv: int, **keywords: Any
) -> tuple[Tensor, Tensor]:
    return _merger(merger).merge_and_project(partial_latent, partial_lse, _weights(w_uv), return_lse=True, **keywords)


# ---------------------------------------------------------------- what a compiler traces in their place


def _fake_merge(merger: int, partial_out: Tensor, partial_lse: Tensor, **keywords: Any) -> Tensor:
    return _fake(merger, partial_out, partial_lse, projected=False)[0]


def _fake_merge_with_lse(
    merger: int, partial_out: Tensor, partial_lse: Tensor, **keywords: Any
) -> tuple[Tensor, Tensor]:
    return _fake(merger, partial_out, partial_lse, projected=False)


def _fake_merge_and_project(
    merger: int, partial_latent: Tensor, partial_lse: Tensor, w_uv: int, **keywords: Any
) -> Tensor:
    _weights(w_uv)
    return _fake(merger, partial_latent, partial_lse, projected=True)[0]


def _fake_merge_and_project_with_lse(
    merger: int, partial_latent: Tensor, partial_lse: Tensor, w_uv: int, **keywords: Any
) -> tuple[Tensor, Tensor]:
    _weights(w_uv)
    return _fake(merger, partial_latent, partial_lse, projected=True)


def _fake(merger: int, partial: Tensor, partial_lse: Tensor, projected: bool) -> tuple[Tensor, Tensor]:
    """Result and LSE as a merge returns them, without contents; B may be symbolic."""
    found = _merger(merger)
    # A compiled graph calls the operator where grad mode is off, so the merge itself could no longer refuse.
    for name, tensor in (("partial_latent" if projected else "partial_out", partial), ("partial_lse", partial_lse)):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ShapeError(
                f"{name} requires grad; a merge is an inference operation: detach it, or compile under torch.no_grad() "
                "or inference_mode()"
            )
    width = found.shape.v_head_dim if projected else found.shape.head_dim
    if width is None:
        raise ShapeError("merge_and_project needs a shape with v_head_dim=V and head_dim=L; v_head_dim is None")
    rows = found.shape.result_rows(partial.shape[0], found.group.size)
    return (
        partial.new_empty((*rows, width), dtype=found.shape.dtype),
        partial.new_empty(rows, dtype=torch.float32),
    )


def _merger(number: int) -> DCPMerger:
    return _handles.find(number, DCPMerger, "merger")


def _weights(number: int) -> GatheredWUV:
    return _handles.find(number, GatheredWUV, "w_uv")


_PARTIALS = "int merger, Tensor partial_out, Tensor partial_lse"
_LATENTS = "int merger, Tensor partial_latent, Tensor partial_lse, int w_uv"
_KEYWORDS = (
    "*, Tensor? valid_counts=None, Tensor? seq_lens=None, Tensor? query_start_loc=None, int channel=0, int tag=0"
)

#: Name -> schema, what runs, what is traced.
_OPERATORS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "merge": (f"({_PARTIALS}, {_KEYWORDS}) -> Tensor", _merge, _fake_merge),
    "merge_with_lse": (f"({_PARTIALS}, {_KEYWORDS}) -> (Tensor, Tensor)", _merge_with_lse, _fake_merge_with_lse),
    "merge_and_project": (f"({_LATENTS}, {_KEYWORDS}) -> Tensor", _merge_and_project, _fake_merge_and_project),
    "merge_and_project_with_lse": (
        f"({_LATENTS}, {_KEYWORDS}) -> (Tensor, Tensor)",
        _merge_and_project_with_lse,
        _fake_merge_and_project_with_lse,
    ),
}


def _register() -> None:
    for name, (schema, runs, traced) in _OPERATORS.items():
        torch.library.define(f"dcpcomm::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(f"dcpcomm::{name}", "CompositeExplicitAutograd", runs)
        torch.library.register_fake(f"dcpcomm::{name}", traced)
        # A merge whose result nobody uses is still one that peers wait for: no compiler may drop it.
        has_side_effect(getattr(torch.ops.dcpcomm, name).default)


_register()
