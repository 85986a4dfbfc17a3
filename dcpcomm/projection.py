"""W_UV, the up-projection of latent partials: gathered once per layer, applied before or after the merge.

`merge(o) @ W_UV == merge(o @ W_UV)` in exact arithmetic, so the order is free. Before the merge, the wire carries V
instead of L columns, but every rank projects all heads (the idea of vLLM PR #48196); after it, only its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dcpcomm.arguments import check_w_uv
from dcpcomm.errors import ShapeError

if TYPE_CHECKING:
    from dcpcomm.merger import DCPMerger

__all__ = ["GatheredWUV", "check_gathered", "project"]


def project(latent: torch.Tensor, w_uv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`latent [B, h, L] @ w_uv [h, L, V]` head by head: `[B, h, V]`, into `out` where it is given."""
    if out is None:
        out = latent.new_empty((*latent.shape[:2], w_uv.shape[2]))
    torch.bmm(latent.transpose(0, 1), w_uv, out=out.transpose(0, 1))
    return out


def check_gathered(w_uv: Any, merger: DCPMerger) -> None:
    """Raise `ShapeError` unless `w_uv` is what `merger.gather_w_uv`, or that of a merger just like it, returned."""
    if not isinstance(w_uv, GatheredWUV):
        raise ShapeError(f"w_uv is a {type(w_uv).__name__}; expected what gather_w_uv returned")
    check_w_uv(merger.shape, merger.group, merger.device, w_uv.local)
    if w_uv.full is None and merger.projects_all_heads:
        raise ShapeError("w_uv was gathered by a merger that never projects all heads; gather it by this one")
    w_uv.pass_for(merger)


class GatheredWUV:
    """One layer's W_UV as a merger needs it. Made by `DCPMerger.gather_w_uv`.

    Attributes:
        local: `[H/N, L, V]`, this rank's heads.
        full: `[H, L, V]`, all heads in the order of the group's ranks; None where no projection order of the merger
            needs it.
    """

    def __init__(self, merger: DCPMerger, w_uv_local: torch.Tensor, needs_full: bool) -> None:
        self._merger = merger
        self._needs_full = needs_full
        self._number = merger.count_weights()  # the layer, as a rule; ranks that refresh different ones are told
        self.full: torch.Tensor | None = None
        self._passed: tuple[Any, Any, Any] = (None, None, None)
        with torch.inference_mode(False):
            self.local = self._checked(w_uv_local).clone()
            if needs_full:
                self.full = self._gather(self.local)

    def pass_for(self, merger: DCPMerger) -> None:
        """`merger` has found nothing wrong with these weights."""
        self._passed = merger, self.local, self.full

    def passed(self, merger: DCPMerger) -> bool:
        """Whether that holds, and they are still the same tensors."""
        of, local, full = self._passed
        return of is merger and local is self.local and full is self.full

    @property
    def whole(self) -> torch.Tensor:
        """`full`, where it was gathered."""
        assert self.full is not None, "this merger never projects all heads"
        return self.full

    def refresh(self, w_uv_local: torch.Tensor) -> None:
        """Take new weights, in place, so that captured graphs see them. Collective over the group.

        Args:
            w_uv_local: `[H/N, L, V]`, as for `gather_w_uv`.
        """
        fresh = self._checked(w_uv_local)
        gathered = self._gather(fresh) if self._needs_full else None
        with torch.inference_mode(False), torch.no_grad():
            self.local.copy_(fresh)
            if self.full is not None and gathered is not None:
                self.full.copy_(gathered)

    def _gather(self, local: torch.Tensor) -> torch.Tensor:
        gathered = self._merger.group.all_gather(local.detach(), f"gathering W_UV number {self._number}")
        return gathered.reshape(-1, *local.shape[1:])

    def _checked(self, w_uv_local: torch.Tensor) -> torch.Tensor:
        """Contiguous. Whatever is raised here, the peers are told: they come to the gathering meanwhile."""
        try:
            checked = check_w_uv(self._merger.shape, self._merger.group, self._merger.device, w_uv_local)
            return checked.detach().contiguous()
        except Exception as error:
            if self._needs_full:
                self._merger.group.control.fail(f"{type(error).__name__}: {error}")
            if isinstance(error, ShapeError):
                raise ShapeError(f"rank {self._merger.group.rank}: {error}") from None
            raise
