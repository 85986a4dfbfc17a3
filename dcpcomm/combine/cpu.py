"""Pack and combine on CPU: by the compiled engine where it can, else in torch operations; the same arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dcpcomm.combine import native, torch_engine
from dcpcomm.combine.wire import Header, WireViews

__all__ = ["combine", "engine", "pack"]


def engine() -> str:
    """What merges on CPU are combined by, in words."""
    return "torch operations (native.c was not compiled)" if native.library is None else "native code"


def pack(send: WireViews, partial_out: torch.Tensor, lse: torch.Tensor, rank: int, header: Header) -> None:
    """See `torch_engine.pack`."""
    one = native if native.can_pack(partial_out, lse) else torch_engine
    one.pack(send, partial_out, lse, rank, header)


def combine(
    rows: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], lse_base: str, dtype: torch.dtype, want_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `torch_engine.combine`."""
    if native.can_combine(rows, lses):
        return native.combine(rows, lses, lse_base, dtype, want_lse)
    return torch_engine.combine(rows, lses, lse_base, dtype, want_lse)
