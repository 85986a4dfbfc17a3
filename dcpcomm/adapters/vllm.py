"""vLLM's functions that merge decode-context-parallel partials, over dcpcomm; and the plug-in that swaps them in.

Called as vLLM calls its own, of `vllm.v1.attention.ops`: partials of all heads in, this rank's share out. In addition,
by name alone: `valid_counts` (instead of lengths), `tag`, `out`, and `channel`, where it isn't vLLM's micro-batch that
picks it. Their meaning, and what is raised, is that of `DCPMerger.merge`. `ctx` is a cache for Triton kernels, which
there are none of here. vLLM is never imported but by its own plug-in loader.

The plug-in (`vllm.general_plugins`) does nothing unless `DCPCOMM_VLLM=1`.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch

from dcpcomm.adapters import configure
from dcpcomm.adapters.mergers import MERGERS, Key, size_of
from dcpcomm.adapters.patching import Patch, Replacement, Report
from dcpcomm.adapters.settings import Settings
from dcpcomm.adapters.switch import switched_on
from dcpcomm.errors import ShapeError
from dcpcomm.projection import GatheredWUV, project

__all__ = [
    "configure_from",
    "cp_lse_ag_out_ar",
    "cp_lse_ag_out_rs",
    "dcp_a2a_lse_reduce",
    "dcp_a2a_lse_reduce_token_sharded",
    "dcp_merge_and_v_up_proj",
    "patch",
    "register",
    "unpatch",
]


def dcp_a2a_lse_reduce(
    cp_attn_out: torch.Tensor,
    cp_attn_lse: torch.Tensor,
    cp_group: Any,
    ctx: Any = None,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    *,
    valid_counts: torch.Tensor | None = None,
    tag: int = 0,
    out: torch.Tensor | None = None,
    channel: int | None = None,
) -> Any:
    """Merge, and keep this rank's heads.

    Args:
        cp_attn_out: `[B, H, D]`, any strides.
        cp_attn_lse: `[B, H]`.
        cp_group: vLLM's coordinator.
        seq_lens, query_start_loc: `[S]` and `[S+1]`, lengths of this rank's KV shard.
        valid_counts: `[B]`, instead of these.

    Returns:
        `[B, H/N, D]`; with `return_lse` also `[B, H/N]` float32, in the base that came. A group of one rank gets its
        partials back as they came.
    """
    return MERGERS.merge(
        cp_group, "heads", cp_attn_out, cp_attn_lse, is_lse_base_on_e, return_lse, seq_lens, query_start_loc,
        valid_counts, _micro_batch() if channel is None else channel, tag, out,
    )  # fmt: skip


def cp_lse_ag_out_rs(
    cp_attn_out: torch.Tensor,
    cp_attn_lse: torch.Tensor,
    cp_group: Any,
    ctx: Any = None,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    *,
    valid_counts: torch.Tensor | None = None,
    tag: int = 0,
    out: torch.Tensor | None = None,
    channel: int | None = None,
) -> Any:
    """As `dcp_a2a_lse_reduce`: how rows travel is the transport's affair. The partials aren't written to, as vLLM's
    own does.
    """
    return MERGERS.merge(
        cp_group, "heads", cp_attn_out, cp_attn_lse, is_lse_base_on_e, return_lse, seq_lens, query_start_loc,
        valid_counts, _micro_batch() if channel is None else channel, tag, out,
    )  # fmt: skip


def cp_lse_ag_out_ar(
    cp_attn_out: torch.Tensor,
    cp_attn_lse: torch.Tensor,
    cp_group: Any,
    ctx: Any = None,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    *,
    valid_counts: torch.Tensor | None = None,
    tag: int = 0,
    out: torch.Tensor | None = None,
    channel: int | None = None,
) -> Any:
    """As `dcp_a2a_lse_reduce`, with all heads on every rank: `[B, H, D]`, and `[B, H]`."""
    return MERGERS.merge(
        cp_group, "none", cp_attn_out, cp_attn_lse, is_lse_base_on_e, return_lse, seq_lens, query_start_loc,
        valid_counts, _micro_batch() if channel is None else channel, tag, out,
    )  # fmt: skip


def dcp_a2a_lse_reduce_token_sharded(
    cp_attn_out: torch.Tensor,
    cp_attn_lse: torch.Tensor,
    cp_group: Any,
    ctx: Any = None,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    *,
    valid_counts: torch.Tensor | None = None,
    tag: int = 0,
    out: torch.Tensor | None = None,
    channel: int | None = None,
) -> Any:
    """As `dcp_a2a_lse_reduce`, with all heads of this rank's rows: `[B/N, H, D]`, and `[B/N, H]`. B must be a multiple
    of N; lengths and counts are those of all B rows.
    """
    return MERGERS.merge(
        cp_group, "tokens", cp_attn_out, cp_attn_lse, is_lse_base_on_e, return_lse, seq_lens, query_start_loc,
        valid_counts, _micro_batch() if channel is None else channel, tag, out,
    )  # fmt: skip


def dcp_merge_and_v_up_proj(
    cp_attn_out: torch.Tensor,
    cp_attn_lse: torch.Tensor,
    w_uv: GatheredWUV | torch.Tensor,
    cp_group: Any,
    valid_counts: torch.Tensor | None = None,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    *,
    tag: int = 0,
    out: torch.Tensor | None = None,
    channel: int | None = None,
) -> Any:
    """Merge latent partials and multiply by W_UV; the idea of vLLM PR #48196 is to multiply first.

    Args:
        cp_attn_out: `[B, H, L]`.
        w_uv: what `dcpcomm.adapters.gather_w_uv` returned for this layer: the order is then the cheaper one. Or
            `[H, L, V]`, gathered by the caller: the product then always comes first.

    Returns:
        `[B, H/N, V]`; with `return_lse` also `[B, H/N]` float32.
    """
    if channel is None:
        channel = _micro_batch()
    if isinstance(w_uv, GatheredWUV):
        heads, latent = cp_attn_out.shape[-2:]
        key = Key(
            id(cp_group), heads, latent, cp_attn_out.dtype, cp_attn_out.device, is_lse_base_on_e, "heads",
            w_uv.local.shape[2],
        )  # fmt: skip
        return MERGERS.merger(cp_group, key, channel).merge_and_project(
            cp_attn_out, cp_attn_lse, w_uv, valid_counts=valid_counts, seq_lens=seq_lens,
            query_start_loc=query_start_loc, return_lse=return_lse, channel=channel, out=out, tag=tag,  # type: ignore[call-overload]
        )  # fmt: skip
    if w_uv.dim() != 3 or w_uv.shape[:2] != cp_attn_out.shape[-2:]:
        raise ShapeError(
            f"w_uv has shape {list(w_uv.shape)}; expected [H, L, V] = {[*cp_attn_out.shape[-2:], 'V']} of all "
            f"{size_of(cp_group)} ranks' heads, or what gather_w_uv returned"
        )
    projected = project(cp_attn_out, w_uv)
    return MERGERS.merge(
        cp_group, "heads", projected, cp_attn_lse, is_lse_base_on_e, return_lse, seq_lens, query_start_loc,
        valid_counts, channel, tag, out,
    )  # fmt: skip


def _micro_batch() -> int:
    """vLLM's id of the micro-batch that this thread computes; 0 where there is only one."""
    ubatching = sys.modules.get("vllm.v1.worker.ubatching")
    return 0 if ubatching is None else int(ubatching.dbo_current_ubatch_id())


def configure_from(vllm_config: Any) -> Settings:
    """Configure the adapters for what a `VllmConfig` says a decode step may hold.

    max_tokens becomes the larger of the sequences times their query tokens and the largest captured size, but no more
    than a step's tokens; channels the micro-batches.
    """
    scheduler = vllm_config.scheduler_config
    speculative = vllm_config.speculative_config
    drafted = 0 if speculative is None else speculative.num_speculative_tokens or 0
    if getattr(speculative, "parallel_drafting", False):
        drafted *= 2  # as many rows again, for what is drafted side by side
    compilation = vllm_config.compilation_config
    captured = getattr(compilation, "max_cudagraph_capture_size", None)
    if captured is None:
        captured = max(getattr(compilation, "cudagraph_capture_sizes", None) or [0])
    rows = max(scheduler.max_num_seqs * (1 + drafted), captured)
    parallel = vllm_config.parallel_config
    channels = getattr(parallel, "num_ubatches", None) or (2 if getattr(parallel, "enable_dbo", False) else 1)
    return configure(max_tokens=min(scheduler.max_num_batched_tokens, rows), channels=max(channels, 1))


# ---------------------------------------------------------------- the plug-in


def _first_dcp_a2a_lse_reduce(
    local_output: torch.Tensor,
    local_lse: torch.Tensor,
    kvp_group: Any,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
) -> Any:
    """`dcp_a2a_lse_reduce` as its first release had it."""
    return dcp_a2a_lse_reduce(local_output, local_lse, kvp_group, None, return_lse, is_lse_base_on_e)


def _no_direct_workspace(*args: Any, **kwargs: Any) -> None:
    """vLLM's own merge over symmetric memory, which would come before ours: not there."""


def _may_be_absent(original: Any) -> str | None:
    """Releases whose callers don't look for None would call it."""
    try:
        declared = str(inspect.signature(original).return_annotation)
    except (TypeError, ValueError, NameError) as error:
        return f"what it returns can't be read: {error}; set VLLM_USE_DIRECT_DCP_A2A=0"
    return None if "None" in declared else "this release can't do without it; set VLLM_USE_DIRECT_DCP_A2A=0"


_patch = Patch(
    "vllm",
    (
        "vllm.attention.ops.common",
        "vllm.v1.attention.ops.common",
        "vllm.v1.attention.ops.dcp_alltoall",
        "vllm.v1.attention.ops.dcp_direct_a2a",
        "vllm.v1.attention.ops.dcp_utils",
        "vllm.v1.attention.ops.dcp",
    ),
    {
        "cp_lse_ag_out_rs": [Replacement.of(cp_lse_ag_out_rs)],
        "cp_lse_ag_out_ar": [Replacement.of(cp_lse_ag_out_ar)],
        "dcp_a2a_lse_reduce": [Replacement.of(dcp_a2a_lse_reduce), Replacement.of(_first_dcp_a2a_lse_reduce)],
        "get_direct_dcp_a2a_workspace": [Replacement(_no_direct_workspace, _may_be_absent)],
    },
)


def patch() -> Report:
    """Swap dcpcomm in for vLLM's merges, in every module that holds them. Before the model is built: what it holds
    already stays. What was done, and what not and why, is in the report and in the log.
    """
    return _patch.apply()


def unpatch() -> None:
    """Put vLLM's own functions back."""
    _patch.undo()


def register() -> None:
    """The entry point of `vllm.general_plugins`: `patch`, where `DCPCOMM_VLLM=1`.

    Raises:
        ConfigError: `DCPCOMM_VLLM` is neither 0 nor 1.
    """
    if switched_on("DCPCOMM_VLLM"):
        patch()
