"""What a merge was called with, checked before anything is sent. Messages name the argument, what came and what was
expected.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch

from dcpcomm.aliasing import overlap, overlaps_itself, reach
from dcpcomm.errors import ShapeError
from dcpcomm.group import Group
from dcpcomm.transport import LSE_DTYPES, MergeShape

__all__ = ["Arguments", "Checked", "check_tag", "check_w_uv", "rows_of"]

#: What a call may bring, by the names in messages.
INPUTS = (
    "partial_out",
    "partial_lse",
    "valid_counts",
    "seq_lens",
    "query_start_loc",
    "w_uv",
    "w_uv of all heads",
)
_INT32 = range(-(2**31), 2**31)
_KNOWN = 1024


def check_tag(tag: Any) -> int:
    """The tag, which must fit the 32 bits it has on the wire."""
    if isinstance(tag, bool) or not isinstance(tag, int) or tag not in _INT32:
        raise ShapeError(f"tag is {tag!r}; expected an integer of 32 bits (the layer, say)")
    return tag


class Checked(NamedTuple):
    """Of partials that were found right.

    Attributes:
        tokens: B.
        out_reach, lse_reach: bytes that each of the two may touch, from its address on.
        rows: tokens and heads of the result.
    """

    tokens: int
    out_reach: int
    lse_reach: int
    rows: tuple[int, int]


class Arguments:
    """The checks of one merger's calls. What layouts and dtypes it has found right it looks up the next time, so that a
    call costs little more than comparing addresses.

    Attributes:
        own: where the library's own memory begins and ends.
    """

    def __init__(self, shape: MergeShape, world_size: int, device: torch.device) -> None:
        self._shape, self._world_size, self._device = shape, world_size, device
        self.own = 0, 0
        self._partials: dict[Any, Checked] = {}
        self._outs: dict[Any, int] = {}

    def keep_off(self, own: torch.Tensor | None) -> None:
        """No argument may lie in the library's `own` memory."""
        if own is not None:
            self.own = own.data_ptr(), own.data_ptr() + own.nbytes

    def partials(self, out: Any, lse: Any) -> Checked:
        """After checking type, shape, dtype, device, grad and overlap with the library's own memory.

        Raises:
            ShapeError: naming the argument.
        """
        try:
            key = out.shape, out.stride(), out.dtype, out.device, lse.shape, lse.stride(), lse.dtype, lse.device
            found = self._partials.get(key)
        except Exception:  # no tensor, or none that has strides
            found = key = None
        if found is None or ((out.requires_grad or lse.requires_grad) and torch.is_grad_enabled()):
            tokens = self._check(out, lse)
            rows = self._shape.result_rows(tokens, self._world_size)
            found = Checked(tokens, reach(out), reach(lse), rows)
            _remember(self._partials, key, found)
        begin, end = self.own
        at = _address("partial_out", out)
        if at < end and begin < at + found[1]:
            raise ShapeError("partial_out lies in the library's own buffers; expected memory of the caller's")
        at = _address("partial_lse", lse)
        if at < end and begin < at + found[2]:
            raise ShapeError("partial_lse lies in the library's own buffers; expected memory of the caller's")
        return found

    def _check(self, out: Any, lse: Any) -> int:
        shape, world_size = self._shape, self._world_size
        _check_tensor("partial_out", out, self._device)
        _check_tensor("partial_lse", lse, self._device)
        if out.dim() != 3 or out.shape[1:] != (shape.num_heads, shape.head_dim):
            expected = f"[B, H, D] = [B, {shape.num_heads}, {shape.head_dim}]"
            raise ShapeError(f"partial_out has shape {tuple(out.shape)}; expected {expected}")
        if out.dtype != shape.dtype:
            raise ShapeError(f"partial_out has dtype {out.dtype}; expected {shape.dtype}, as the merger's shape says")
        tokens = int(out.shape[0])
        if lse.shape != (tokens, shape.num_heads):
            raise ShapeError(
                f"partial_lse has shape {tuple(lse.shape)}; expected [B, H] = [{tokens}, {shape.num_heads}], like "
                "partial_out"
            )
        if lse.dtype not in LSE_DTYPES:
            raise ShapeError(f"partial_lse has dtype {lse.dtype}; expected one of {', '.join(map(str, LSE_DTYPES))}")
        if shape.scatter == "tokens" and tokens % world_size:
            raise ShapeError(
                f'B={tokens} is not a multiple of the group\'s size {world_size}, which scatter="tokens" needs; '
                f"pad the rows to {-(-tokens // world_size) * world_size}"
            )
        return tokens

    def out(
        self,
        out: Any,
        shape: tuple[int, ...],
        checked: Checked,
        inputs: tuple[torch.Tensor | None, ...],
    ) -> None:
        """Raise unless `out` is a view of the result's shape and dtype that shares no byte with an input or with the
        library's own memory.

        Args:
            checked: what `self.partials` said of the first two of `inputs`.
            inputs: those of `INPUTS`, in that order, as far as there are any.
        """
        try:
            key = shape, out.shape, out.stride(), out.dtype, out.device
            size = self._outs.get(key)
        except Exception:
            size = key = None
        if size is None or (out.requires_grad and torch.is_grad_enabled()):
            self._check_out(out, shape)
            size = reach(out)
            _remember(self._outs, key, size)
        if out.is_neg():
            raise ShapeError("out is a view that negates what it stands for; expected memory to write to")
        if out.is_inference() and not torch.is_inference_mode_enabled():
            raise ShapeError(
                "out was made in inference_mode and can't be written outside of it; call within, or clone it"
            )
        begin = _address("out", out)
        end = begin + size
        reaches = checked.out_reach, checked.lse_reach
        for index, tensor in enumerate(inputs):
            if tensor is None:
                continue
            at = tensor.data_ptr()
            far = reaches[index] if index < 2 else reach(tensor)
            if at < end and begin < at + far and overlap(out, tensor):
                raise ShapeError(f"out overlaps {INPUTS[index]} in memory; expected memory of its own")
        if self.own[0] < end and begin < self.own[1]:
            raise ShapeError("out lies in the library's own buffers; expected memory of the caller's")

    def _check_out(self, out: Any, shape: tuple[int, ...]) -> None:
        _check_tensor("out", out, self._device)
        dtype = self._shape.dtype
        if tuple(out.shape) != shape or out.dtype != dtype:
            raise ShapeError(f"out has shape {tuple(out.shape)} and dtype {out.dtype}; expected {shape} and {dtype}")
        if overlaps_itself(out):
            raise ShapeError(
                f"out has strides {out.stride()}, by which two of its elements share memory; expected a plain view"
            )


def _address(name: str, tensor: torch.Tensor) -> int:
    """Where a tensor lies. Wrappers, and zeros that nobody has written, look like any other and lie nowhere: to read
    them there would end the process.
    """
    at = int(tensor.data_ptr())
    if not at and tensor.numel():
        raise ShapeError(
            f"{name} is a {type(tensor).__name__} without memory of its own; expected a plain tensor (of a wrapper, "
            "what it wraps; of a lazy zero, its clone)"
        )
    return at


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    if key is not None:
        if len(known) >= _KNOWN:
            known.clear()
        known[key] = value


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
    if w_uv_local.layout != torch.strided:
        raise ShapeError(f"w_uv_local has layout {w_uv_local.layout}; expected torch.strided")
    _address("w_uv_local", w_uv_local)
    return w_uv_local


def rows_of(*partials: Any) -> int:
    """B, as far as a call with wrong arguments has one: 0 only where none of them has a row."""
    given = []
    for one in partials:
        # A nested tensor, say, has dimensions and raises where it is asked for their length.
        with contextlib.suppress(Exception):
            if isinstance(one, torch.Tensor) and one.dim():
                given.append(int(one.shape[0]))
    return next((rows for rows in given if rows), 0 if len(given) == len(partials) else 1)


def _check_tensor(name: str, tensor: Any, device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ShapeError(f"{name} is a {type(tensor).__name__}; expected a tensor on {device}")
    if tensor.is_nested:
        raise ShapeError(f"{name} is a nested tensor; expected a dense one")
    if tensor.device != device:
        raise ShapeError(f"{name} is on {tensor.device}; expected {device}, where the merger is")
    if tensor.layout != torch.strided:
        raise ShapeError(f"{name} has layout {tensor.layout}; expected torch.strided")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ShapeError(
            f"{name} requires grad; a merge is an inference operation: detach it, or call under torch.no_grad() or "
            "inference_mode()"
        )
