"""What stands on either side of an exchange: pack before it, combine after it. One engine per device and shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch

from dcpcomm import topology
from dcpcomm.combine.wire import Header, WireViews
from dcpcomm.rows import RowCounts, clean_lse
from dcpcomm.transport import MergeShape

__all__ = ["Engine", "Failure", "Layout", "PackedCall", "Partials", "by_destination", "engine_for", "engine_in_words"]


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

    def cleaned(self) -> Partials:
        """The same with a float32 LSE that says by -inf, and nothing else, which rows are empty."""
        empty = None if self.counts is None else self.counts.empty(len(self.out))
        return Partials(self.out, clean_lse(self.lse, empty), None)

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
    def call_off(self, header: Header) -> None:
        """Write the headers alone: this rank has no rows to send."""

    @abstractmethod
    def combine(
        self, partials: Partials, start: int, header: Header, out: torch.Tensor, out_lse: torch.Tensor | None
    ) -> bool:
        """Merge what arrived, and this rank's rows from where they are, into `out [t, h, D]` (any strides) and
        `out_lse [t, h]` (contiguous).

        Returns:
            False where a peer's header isn't `header`: nothing was written. On a GPU always True: it isn't known yet,
            and then everything is NaN (`Engine.failure`).
        """


class Failure(NamedTuple):
    """Headers that didn't fit, as a GPU noted them.

    Attributes:
        mine: this rank's.
        came: `[N, 4]` int64, by source.
    """

    mine: Header
    came: np.ndarray


class Engine(ABC):
    """Pack and combine on one device.

    Attributes:
        ordinals: int64 by channel on the device, where an engine counts calls there; set before the first `reset`, None
            where no transport in use packs.
        reads_counts: whether a `PackedCall` reads `Partials.counts` itself; else the LSE comes with -inf in empty rows.
    """

    reads_counts = False
    ordinals: torch.Tensor | None = None

    def __init__(self, shape: MergeShape, rank: int, world_size: int) -> None:
        self.shape, self.rank, self.world_size = shape, rank, world_size

    @property
    @abstractmethod
    def words(self) -> str:
        """What merges are combined by, in words."""

    @abstractmethod
    def packed_call(self, channel: int, layout: Layout, send: WireViews, recv: WireViews) -> PackedCall:
        """What packs into `send` and combines from `recv`."""

    @abstractmethod
    def combine(self, rows: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, out_lse: torch.Tensor | None) -> None:
        """Merge `rows [N, t, h, D]` and `lses [N, t, h]`, source first, any strides, into `out [t, h, D]` and
        `out_lse [t, h]`.
        """

    def state(self, channel: int) -> memoryview:
        """Its first word is 0 as long as `failure` has nothing to tell. A read is cheaper than a call."""
        return memoryview(b"\0")

    def failure(self, channel: int) -> Failure | None:
        """The first headers that didn't fit since the channel was made or `settle` was called; None on CPU, where
        `PackedCall.combine` says so at once. No wait for the device.
        """
        return None

    @property
    def progress(self) -> np.ndarray | None:
        """int64 `[channels, 2 or more]`, as it is now: calls that have begun on the device, and that have ended; None
        on CPU, where they have when they return.
        """
        return None

    def settle(self, channel: int) -> None:  # noqa: B027
        """Forget the failure: it has been told."""

    def finish(self) -> None:  # noqa: B027
        """Wait until this rank's calls have ended on the device."""

    def reset(self) -> None:  # noqa: B027
        """Every channel begins again, with no call in flight. Must not wait for more than the current stream: in a
        process of several ranks another's call may be waiting for this one's.
        """


def engine_for(shape: MergeShape, rank: int, world_size: int, device: torch.device) -> Engine:
    """The engine that merges of `shape` on `device` use."""
    from dcpcomm.combine import cuda_engine, native, torch_cuda, torch_engine

    if topology.on_gpu(device):
        kernels = cuda_engine.kernels_for(device, shape.dtype, world_size)
        if kernels is None:
            return torch_cuda.TorchCudaEngine(shape, rank, world_size, device)
        return cuda_engine.CudaEngine(shape, rank, world_size, kernels)
    if native.library is not None:
        return native.NativeEngine(shape, rank, world_size)
    return torch_engine.TorchEngine(shape, rank, world_size)


def engine_in_words(device: torch.device, dtype: torch.dtype, world_size: int) -> str:
    """What merges are combined by here: the same on every rank, or their results may differ in a bit."""
    from dcpcomm.combine import cuda_engine, native, torch_engine

    if topology.on_gpu(device):
        kernels = cuda_engine.kernels_for(device, dtype, world_size)
        return cuda_engine.WORDS if kernels is not None else torch_engine.WORDS
    return torch_engine.WORDS if native.library is None else native.WORDS
