"""Functions shaped as engines call them, over mergers that are built once and kept.

    dcpcomm.adapters.vllm       in the place of vLLM's, and what its plug-in swaps in
    dcpcomm.adapters.sglang     the same for SGLang
    dcpcomm.adapters.torch_op   merges as operators of torch, for what compiles; registered when it is imported

What the first two share is here. docs/adopt-in-an-engine.md shows it in use.
"""

from __future__ import annotations

from typing import Any

import torch

from dcpcomm.adapters.mergers import MERGERS, Key, size_of
from dcpcomm.adapters.settings import Settings, configure, settings, shape_for
from dcpcomm.errors import ShapeError
from dcpcomm.merger import DCPMerger
from dcpcomm.projection import GatheredWUV
from dcpcomm.transport import LSE_BASES

__all__ = [
    "Settings",
    "check_all",
    "close_all",
    "configure",
    "gather_w_uv",
    "live_mergers",
    "settings",
    "shape_for",
    "warm_up",
]


def warm_up(
    group: Any,
    *,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    lse_base: str,
    scatter: str = "heads",
    v_head_dim: int | None = None,
    device: torch.device | str | int | None = None,
) -> DCPMerger | None:
    """Build the merger for such partials, if it isn't there. Collective over the group: on every rank, in the same
    order, before the first capture and before memory is measured.

    Args:
        group: what the engine will hand to the adapters: the same object.
        num_heads: H, of the whole group.
        scatter: "heads" (`dcp_a2a_lse_reduce`, `cp_lse_ag_out_rs`), "tokens" (`dcp_a2a_lse_reduce_token_sharded`) or
            "none" (`cp_lse_ag_out_ar`).
        v_head_dim: V, for `dcp_merge_and_v_up_proj` with weights of `gather_w_uv`; `head_dim` is then L.
        device: where the partials will be; None: the current CUDA device, or CPU where there is none.

    Returns:
        the merger; None for a group of one rank that projects nothing.

    Raises:
        as `DCPMerger`.
    """
    if lse_base not in LSE_BASES:
        raise ShapeError(f"lse_base is {lse_base!r}; expected one of {LSE_BASES}")
    key = Key(id(group), num_heads, head_dim, dtype, _device(device), lse_base == "e", scatter, v_head_dim)
    return MERGERS.entry(group, key).merger


def gather_w_uv(group: Any, w_uv_local: torch.Tensor, *, lse_base: str = "e", scatter: str = "heads") -> GatheredWUV:
    """One layer's W_UV for `dcp_merge_and_v_up_proj`. Collective over the group, once for each layer, and every rank
    in the order of layers; builds the merger if it isn't there.

    Args:
        w_uv_local: `[H/N, L, V]`, this rank's heads, in the partials' dtype and on their device. Copied; after new
            weights were loaded, call `refresh` of what this returns.

    Raises:
        ShapeError: another shape, or not the same on all ranks.
    """
    if w_uv_local.dim() != 3:
        raise ShapeError(f"w_uv_local has shape {list(w_uv_local.shape)}; expected [H/N, L, V]")
    heads, latent, value = w_uv_local.shape
    merger = warm_up(
        group,
        num_heads=heads * size_of(group),
        head_dim=latent,
        dtype=w_uv_local.dtype,
        lse_base=lse_base,
        scatter=scatter,
        v_head_dim=value,
        device=w_uv_local.device,
    )
    assert merger is not None
    return merger.gather_w_uv(w_uv_local)


def check_all() -> None:
    """Raise what went wrong in a merge of any adapter. Cheap; once per step, before its tokens are used."""
    MERGERS.check_all()


def close_all(group: Any = None) -> None:
    """Close the adapters' mergers of one group, or all. Local, safe twice; graphs that captured merges are void."""
    MERGERS.close_all(group)


def live_mergers() -> list[DCPMerger]:
    """The adapters' mergers, in the order in which they were built: for `explain` and `device_bytes`."""
    return MERGERS.live()


def _device(device: torch.device | str | int | None) -> torch.device:
    """As tensors name theirs, so that it is the same key."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    named = torch.device(device)
    without_index = str(named) == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if without_index else named
