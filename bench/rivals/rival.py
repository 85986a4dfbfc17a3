"""What all rivals have in common: one merge, the way somebody else does it, and the judge of its result."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch

from dcpcomm.bench.checked import count_wrong
from dcpcomm.bench.ranks import Ranks
from dcpcomm.reference import merge_partials
from dcpcomm.transport import MergeShape

__all__ = ["Rival"]


class Rival(ABC):
    """A merge with scatter "heads": `[B, H, D]` and `[B, H]` float32 in, `[B, H/N, D]` out.

    Life: `__init__` -> `prepare` -> for each B: `bring`, then `merge`, many times -> `close`. All of it is collective.

    Attributes:
        name: in tables.
        needs_processes: whether it can't run between threads of one process.
        needs: a library that no CPU has, or "". Without it `prepare` raises TransportUnavailable on all ranks.
        sums_rounded: whether it adds terms that were rounded before, and is judged by that.

    Args:
        shape: of all merges to come; the most rows of one in `max_tokens`.
        device: this rank's.
    """

    name: ClassVar[str]
    needs_processes: ClassVar[bool] = False
    needs: ClassVar[str] = ""
    sums_rounded: ClassVar[bool] = False

    def __init__(self, ranks: Ranks, shape: MergeShape, device: torch.device) -> None:
        self.ranks, self.shape, self.device = ranks, shape, device
        self.heads = shape.num_heads // ranks.size

    @abstractmethod
    def prepare(self) -> None:
        """Allocate, meet the peers, load what is loaded at first use."""

    def bring(self, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> None:  # noqa: B027
        """The inputs of the merges to come, for what is not part of a merge: compiling for this B, say."""

    @abstractmethod
    def merge(self, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> torch.Tensor:
        """One merge, on the current stream. What it returns may be overwritten by the next."""

    def call(self, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> Callable[[], torch.Tensor]:
        """A merge of these that only needs to be called, as an engine calls it."""
        return functools.partial(self.merge, partial_out, partial_lse)

    @abstractmethod
    def close(self) -> None:
        """Free everything. Nothing is in flight on any rank. Safe twice."""

    def want(self, outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
        """What `merge` must return, from every rank's inputs `[N, B, H, D]` and `[N, B, H]`; the oracle's float64."""
        own = slice(self.ranks.rank * self.heads, (self.ranks.rank + 1) * self.heads)
        return merge_partials(outs[:, :, own], lses[:, :, own], lse_base=self.shape.lse_base, scatter="none")[0][0]

    def count_wrong(self, got: torch.Tensor, want: torch.Tensor) -> int:
        """Elements of `got` that are not what `want` is, rounded."""
        return count_wrong(got, want, sums_rounded=self.sums_rounded)

    def check(self) -> None:  # noqa: B027
        """Raise what went wrong unseen since the last time."""
