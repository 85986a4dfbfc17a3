"""What stands on either side of an exchange: pack before it, combine after it. One engine per device and shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from dcpcomm.combine.wire import Header, WireViews
from dcpcomm.rows import RowCounts
from dcpcomm.transport import MergeShape

__all__ = ["Engine", "Layout", "PackedCall", "Partials", "by_destination", "cpu_engine_in_words", "engine_for"]


class Partials(NamedTuple):
    """What one rank brings to a merge.

    Attributes:
        out: `[B, H, D]`, any strides.
        lse: `[B, H]`, any strides, and any float dtype; -inf, NaN or +inf where the row is empty.
        counts: which rows are empty besides, or None.
    """

    out: torch.Tensor
    lse: torch.Tensor
    counts: RowCounts | None

    def part(self, scatter: str, world_size: int, start: int, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views `[N, t, h, D]` and `[N, t, h]`, destination first, of `t` rows of the result from `start` on."""
        part = slice(start, start + t)
        out = by_destination(self.out, scatter, world_size)
        return out[:, part], by_destination(self.lse, scatter, world_size)[:, part]


def by_destination(tensor: torch.Tensor, scatter: str, world_size: int) -> torch.Tensor:
    """A view of `[B, H, ...]` with the destination rank first: `[N, t, h, ...]`, (t, h) being the result's rows. Any
    strides.
    """
    b, h, *rest = tensor.shape
    if scatter == "heads":
        return tensor.view(b, world_size, h // world_size, *rest).transpose(0, 1)
    if scatter == "tokens":
        return tensor.view(world_size, b // world_size, h, *rest)
    return tensor.expand(world_size, b, h, *rest)


class Layout(NamedTuple):
    """Where a merge's partials lie, their addresses left out: what calls must share to share a `PackedCall`.

    Attributes:
        tokens: B of the whole call.
        t: rows of the result in this exchange.
        width: D.
        out, lse: strides of the partials, in elements.
        lse_dtype: the partial LSE's.
    """

    tokens: int
    t: int
    width: int
    out: tuple[int, ...]
    lse: tuple[int, ...]
    lse_dtype: torch.dtype

    def strides(self, shape: MergeShape, world_size: int) -> tuple[tuple[int, int, int, int], tuple[int, int, int]]:
        """Of `Partials.part`: `[N, t, h, D]` and `[N, t, h]`, in elements."""
        out_t, out_h, out_d = self.out
        lse_t, lse_h = self.lse
        if shape.scatter == "heads":
            heads = shape.num_heads // world_size
            return (heads * out_h, out_t, out_h, out_d), (heads * lse_h, lse_t, lse_h)
        rows = self.tokens // world_size if shape.scatter == "tokens" else 0
        return (rows * out_t, out_t, out_h, out_d), (rows * lse_t, lse_t, lse_h)


class PackedCall(ABC):
    """Pack and combine for one layout and one pair of wire buffers; made once, used by every call like it."""

    @abstractmethod
    def pack(self, partials: Partials, start: int, header: Header) -> None:
        """Write header and rows of every destination but this rank itself, whose rows don't travel.

        Args:
            start: the first of the result's rows that this exchange is about.
        """

    @abstractmethod
    def combine(
        self, partials: Partials, start: int, header: Header, out: torch.Tensor, out_lse: torch.Tensor | None
    ) -> bool:
        """Merge what arrived, and this rank's rows from where they are, into `out [t, h, D]` (any strides) and
        `out_lse [t, h]` (contiguous).

        Returns:
            False where a peer's header isn't `header`: nothing was written. On a GPU always True: it can't be known
            yet (`Engine.failure`).
        """


class Engine(ABC):
    """Pack and combine on one device.

    Attributes:
        reads_counts: whether a `PackedCall` reads `Partials.counts` itself; else the LSE comes with -inf in empty rows.
    """

    reads_counts = False

    def __init__(self, shape: MergeShape, rank: int, world_size: int) -> None:
        self.shape, self.rank, self.world_size = shape, rank, world_size

    @property
    @abstractmethod
    def words(self) -> str:
        """What merges are combined by, in words."""

    @abstractmethod
    def packed_call(self, layout: Layout, send: WireViews, recv: WireViews) -> PackedCall:
        """What packs into `send` and combines from `recv`."""

    @abstractmethod
    def combine(self, rows: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, out_lse: torch.Tensor | None) -> None:
        """Merge `rows [N, t, h, D]` and `lses [N, t, h]`, source first, any strides, into `out [t, h, D]` and
        `out_lse [t, h]`.
        """


def engine_for(shape: MergeShape, rank: int, world_size: int, device: torch.device) -> Engine:
    """The engine that merges of `shape` on `device` use."""
    from dcpcomm.combine import native, torch_engine

    if device.type == "cpu" and native.library is not None:
        return native.NativeEngine(shape, rank, world_size)
    return torch_engine.TorchEngine(shape, rank, world_size)


def cpu_engine_in_words() -> str:
    """What merges on CPU are combined by here: the same on every rank, or their results may differ in a bit."""
    from dcpcomm.combine import native, torch_engine

    return torch_engine.WORDS if native.library is None else native.WORDS
