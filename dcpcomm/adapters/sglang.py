"""SGLang's functions that merge decode-context-parallel partials, over dcpcomm; and the plug-in that swaps them in.

Called as SGLang calls its own, of `sglang.srt.layers.dcp.comm`. In addition, by name alone: `valid_counts`, or
`seq_lens` and `query_start_loc`; `tag` and `channel`. Their meaning, and what is raised, is that of `DCPMerger.merge`.
SGLang is never imported but by its own plug-in loader.

The plug-in (`sglang.srt.plugins`) does nothing unless `DCPCOMM_SGLANG=1`.
"""

from __future__ import annotations

from typing import Any

import torch

from dcpcomm.adapters.mergers import MERGERS, size_of
from dcpcomm.adapters.patching import Patch, Replacement, Report
from dcpcomm.adapters.switch import switched_on

__all__ = ["cp_lse_ag_out_rs_mha", "cp_lse_ag_out_rs_mla", "dcp_a2a_lse_reduce", "patch", "register", "unpatch"]


def dcp_a2a_lse_reduce(
    cp_attn_out: torch.Tensor,
    cp_attn_lse: torch.Tensor,
    cp_group: Any,
    is_lse_base_on_e: bool = True,
    cuda_graph_buffers: Any = None,
    comm_backend: str = "a2a",
    *,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    valid_counts: torch.Tensor | None = None,
    tag: int = 0,
    channel: int = 0,
) -> torch.Tensor:
    """Merge, and keep this rank's heads.

    Args:
        cp_attn_out: `[B, H, D]`, any strides.
        cp_attn_lse: `[B, H]`.
        cp_group: SGLang's coordinator.
        cuda_graph_buffers, comm_backend: SGLang's own buffers and exchanges, which have no part in this one.

    Returns:
        `[B, H/N, D]`. A group of one rank gets its partials back as they came.
    """
    return MERGERS.merge(  # type: ignore[no-any-return]
        cp_group, "heads", cp_attn_out, cp_attn_lse, is_lse_base_on_e, False, seq_lens, query_start_loc, valid_counts,
        channel, tag, None,
    )  # fmt: skip


def cp_lse_ag_out_rs_mha(
    cp_attn_out: torch.Tensor,
    cp_attn_lse: torch.Tensor,
    cp_group: Any,
    return_lse: bool = False,
    *,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    valid_counts: torch.Tensor | None = None,
    tag: int = 0,
    channel: int = 0,
) -> Any:
    """As `dcp_a2a_lse_reduce`, for an LSE in base e; with `return_lse` also `[B, H/N]` float32. The partials aren't
    written to, as SGLang's own does.
    """
    return MERGERS.merge(
        cp_group, "heads", cp_attn_out, cp_attn_lse, True, return_lse, seq_lens, query_start_loc, valid_counts, channel,
        tag, None,
    )  # fmt: skip


def cp_lse_ag_out_rs_mla(
    cp_attn_out: torch.Tensor,
    cp_attn_lse: torch.Tensor,
    cp_group: Any,
    ctx: Any = None,
    is_lse_base_on_e: bool = False,
    *,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    valid_counts: torch.Tensor | None = None,
    tag: int = 0,
    channel: int = 0,
) -> torch.Tensor:
    """As `dcp_a2a_lse_reduce`, heads first: `[H/N, B, D]`, contiguous. The base is 2 unless it is said to be e. A group
    of one rank gets its partials back as they came, rows first, as from SGLang.
    """
    size = size_of(cp_group)
    if size == 1:
        return cp_attn_out
    rows, heads, width = cp_attn_out.shape
    by_head = cp_attn_out.new_empty((heads // size, rows, width))
    MERGERS.merge(
        cp_group, "heads", cp_attn_out, cp_attn_lse, is_lse_base_on_e, False, seq_lens, query_start_loc, valid_counts,
        channel, tag, by_head.transpose(0, 1),
    )  # fmt: skip
    return by_head


# ---------------------------------------------------------------- the plug-in


_patch = Patch(
    "sglang",
    ("sglang.srt.layers.dcp.comm",),
    {
        "cp_lse_ag_out_rs_mha": [Replacement.of(cp_lse_ag_out_rs_mha)],
        "cp_lse_ag_out_rs_mla": [Replacement.of(cp_lse_ag_out_rs_mla)],
        "dcp_a2a_lse_reduce": [Replacement.of(dcp_a2a_lse_reduce)],
    },
)


def patch() -> Report:
    """Swap dcpcomm in for SGLang's merges, in every module that holds them. Before the model is built. What was done,
    and what not and why, is in the report and in the log.
    """
    return _patch.apply()


def unpatch() -> None:
    """Put SGLang's own functions back."""
    _patch.undo()


def register() -> None:
    """The entry point of `sglang.srt.plugins`: `patch`, where `DCPCOMM_SGLANG=1`.

    Raises:
        ConfigError: `DCPCOMM_SGLANG` is neither 0 nor 1.
    """
    if switched_on("DCPCOMM_SGLANG"):
        patch()
