"""What a merge was called with, checked before anything is sent. Messages name the argument, what came and what was
expected.
"""

from __future__ import annotations

from typing import Any

import torch

from dcpcomm.aliasing import overlap, overlaps_itself, span
from dcpcomm.errors import ShapeError
from dcpcomm.group import Group
from dcpcomm.transport import LSE_DTYPES, MergeShape

__all__ = ["check_out", "check_partials", "check_tag", "check_w_uv", "rows_of"]

_INT32 = range(-(2**31), 2**31)


def check_tag(tag: Any) -> int:
    """The tag, which must fit the 32 bits it has on the wire."""
    if isinstance(tag, bool) or not isinstance(tag, int) or tag not in _INT32:
        raise ShapeError(f"tag is {tag!r}; expected an integer of 32 bits (the layer, say)")
    return tag


def check_partials(
    shape: MergeShape,
    world_size: int,
    device: torch.device,
    partial_out: Any,
    partial_lse: Any,
    own: torch.Tensor | None,
) -> int:
    """B, after checking type, shape, dtype, device, grad and overlap with the library's `own` memory."""
    _check_tensor("partial_out", partial_out, device)
    _check_tensor("partial_lse", partial_lse, device)
    if partial_out.dim() != 3 or partial_out.shape[1:] != (shape.num_heads, shape.head_dim):
        expected = f"[B, H, D] = [B, {shape.num_heads}, {shape.head_dim}]"
        raise ShapeError(f"partial_out has shape {tuple(partial_out.shape)}; expected {expected}")
    if partial_out.dtype != shape.dtype:
        raise ShapeError(
            f"partial_out has dtype {partial_out.dtype}; expected {shape.dtype}, as the merger's shape says"
        )
    tokens = int(partial_out.shape[0])
    if partial_lse.shape != (tokens, shape.num_heads):
        raise ShapeError(
            f"partial_lse has shape {tuple(partial_lse.shape)}; expected [B, H] = [{tokens}, {shape.num_heads}], like "
            "partial_out"
        )
    if partial_lse.dtype not in LSE_DTYPES:
        raise ShapeError(
            f"partial_lse has dtype {partial_lse.dtype}; expected one of {', '.join(map(str, LSE_DTYPES))}"
        )
    if shape.scatter == "tokens" and tokens % world_size:
        raise ShapeError(
            f'B={tokens} is not a multiple of the group\'s size {world_size}, which scatter="tokens" needs; '
            f"pad the rows to {-(-tokens // world_size) * world_size}"
        )
    if own is not None:
        own_storage = own.untyped_storage().data_ptr()
        for name, tensor in (("partial_out", partial_out), ("partial_lse", partial_lse)):
            if tensor.untyped_storage().data_ptr() == own_storage:
                _check_apart(name, tensor, own)
    return tokens


def check_out(
    out: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    inputs: dict[str, torch.Tensor | None],
    own: torch.Tensor | None,
) -> None:
    """Raise unless `out` is a view of the result's shape and dtype that shares no byte with an input or with `own`."""
    _check_tensor("out", out, device)
    if tuple(out.shape) != shape or out.dtype != dtype:
        raise ShapeError(f"out has shape {tuple(out.shape)} and dtype {out.dtype}; expected {shape} and {dtype}")
    if out.is_neg():
        raise ShapeError("out is a view that negates what it stands for; expected memory to write to")
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ShapeError("out was made in inference_mode and can't be written outside of it; call within, or clone it")
    if overlaps_itself(out):
        raise ShapeError(
            f"out has strides {out.stride()}, by which two of its elements share memory; expected a plain view"
        )
    for name, tensor in inputs.items():
        if tensor is not None and overlap(out, tensor):
            raise ShapeError(f"out overlaps {name} in memory; expected memory of its own")
    if own is not None:
        _check_apart("out", out, own)


def check_w_uv(shape: MergeShape, group: Group, device: torch.device, w_uv_local: Any) -> torch.Tensor:
    """`w_uv_local`, if it is what `DCPMerger.gather_w_uv` takes."""
    if shape.v_head_dim is None:
        raise ShapeError("projecting by W_UV needs a shape with v_head_dim=V and head_dim=L; v_head_dim is None")
    expected = (shape.num_heads // group.size, shape.head_dim, shape.v_head_dim)
    if not isinstance(w_uv_local, torch.Tensor):
        raise ShapeError(f"w_uv_local is a {type(w_uv_local).__name__}; expected a tensor [H/N, L, V] = {expected}")
    if tuple(w_uv_local.shape) != expected or w_uv_local.dtype != shape.dtype:
        raise ShapeError(
            f"w_uv_local has shape {tuple(w_uv_local.shape)} and dtype {w_uv_local.dtype}; expected "
            f"[H/N, L, V] = {expected} and {shape.dtype}"
        )
    if w_uv_local.device != device:
        raise ShapeError(f"w_uv_local is on {w_uv_local.device}; expected {device}")
    return w_uv_local


def rows_of(*partials: Any) -> int:
    """B, as far as a call with wrong arguments has one: 0 only where none of them has a row."""
    given = [int(one.shape[0]) for one in partials if isinstance(one, torch.Tensor) and one.dim()]
    return next((rows for rows in given if rows), 0 if len(given) == len(partials) else 1)


def _check_tensor(name: str, tensor: Any, device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ShapeError(f"{name} is a {type(tensor).__name__}; expected a tensor on {device}")
    if tensor.device != device:
        raise ShapeError(f"{name} is on {tensor.device}; expected {device}, where the merger is")
    if tensor.layout != torch.strided:
        raise ShapeError(f"{name} has layout {tensor.layout}; expected torch.strided")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ShapeError(
            f"{name} requires grad; a merge is an inference operation: detach it, or call under torch.no_grad() or "
            "inference_mode()"
        )


def _check_apart(name: str, tensor: torch.Tensor, own: torch.Tensor) -> None:
    (start, end), (own_start, own_end) = span(tensor), span(own)
    if start < own_end and own_start < end:
        raise ShapeError(f"{name} lies in the library's own buffers; expected memory of the caller's")
