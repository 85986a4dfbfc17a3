"""Views of partials as the entries that FlashInfer's exchange moves: rows and statistics of one destination, together.

An entry is what one warp moves at a time: `k` heads of one row, for one destination. With all heads of the destination
in it, rows and LSEs of contiguous partials are entries as they lie, and nothing is copied.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from dcpcomm.errors import TransportUnavailable
from dcpcomm.transport import MergeShape

__all__ = ["Entries", "EntryLayout", "Sent", "lines_of"]

_LINE = 128  # bytes that FlashInfer's protocol flags as a whole
_PER_FLAG_LINE = 15  # lines whose words, replaced by flags, travel in one more
_MOST_LINES = 1024  # of one entry of its queue: nothing there checks that a message fits
_VECTOR = 16  # bytes that its bulk copies come in multiples of


class Sent(NamedTuple):
    """What one call hands to FlashInfer, and gets back from it in the same shapes.

    Attributes:
        rows: `[E, N, W]` float16 or bfloat16, contiguous, 16-byte aligned.
        statistics: `[E, N, S]` float32, likewise; S even, and a multiple of 4 above 2.
    """

    rows: torch.Tensor
    statistics: torch.Tensor


def lines_of(row_bytes: int, statistics: int) -> int:
    """128-byte lines of an entry's message, flags included."""
    nbytes = _up(row_bytes, _VECTOR) + _up(4 * statistics, _VECTOR)
    lines = -(-nbytes // _LINE)
    return lines + -(-lines // _PER_FLAG_LINE)


class Entries:
    """How views become entries, and entries views again.

    Args:
        shape, world_size: the merger's.
    """

    def __init__(self, shape: MergeShape, world_size: int) -> None:
        self.shape, self.world_size = shape, world_size
        self.tokens, self.heads = shape.result_rows(shape.tokens_per_exchange(world_size), world_size)

    own_bytes = 0  # of device memory that it keeps

    def capacity(self) -> tuple[int, int]:
        """2-byte elements of rows, and float32 of statistics, of the largest call."""
        raise NotImplementedError

    def sent(self, out: torch.Tensor, lse: torch.Tensor, channel: int) -> Sent:
        """`out [B, N, h, D]`, `lse [B, N, h]` float32, any strides -> entries."""
        raise NotImplementedError

    def arrived(self, got: Sent, like: tuple[int, int, int, int], channel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries -> `out [B, N, h, D]`, `lse [B, N, h]`, the source in the N axis. `like`: the shape of `out`."""
        raise NotImplementedError

    def warm(self, device: torch.device) -> None:
        """Run once what stands around an exchange, small and at its largest: to load a kernel, and to get memory from
        the driver, may wait for the device, and there for a peer that waits for this rank.
        """
        for width, t in itertools.product(self.shape.widths, (1, self.tokens)):
            out = torch.zeros((t, self.world_size, self.heads, width), dtype=self.shape.dtype, device=device)
            lse = torch.zeros(out.shape[:3], dtype=torch.float32, device=device)
            # As a merge brings them where a destination's heads don't lie side by side: with every copy there may be.
            strided = out.transpose(0, 1).contiguous().transpose(0, 1), lse.transpose(0, 1).contiguous().transpose(0, 1)
            for views in ((out, lse), strided):
                self.arrived(self.sent(*views, 0), (t, self.world_size, self.heads, width), 0)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def poll(self, channel: int) -> None:
        """Raise what was found wrong in what arrived. No wait."""

    @property
    def words(self) -> str:
        """The entry in words: what a soak proves, it proves for this one."""
        raise NotImplementedError


class EntryLayout(Entries):
    """Rows as they are.

    Args:
        heads_per_entry: k, a divisor of h; None: all of them, or the most that fit.

    Raises:
        TransportUnavailable: k doesn't divide h, or an entry of it is longer than what a queue holds.
    """

    def __init__(self, shape: MergeShape, world_size: int, heads_per_entry: int | None) -> None:
        super().__init__(shape, world_size)
        size, widest = shape.dtype.itemsize, max(shape.widths)
        fitting = [
            k
            for k in range(self.heads, 0, -1)
            if self.heads % k == 0 and lines_of(k * widest * size, _statistics(k)) <= _MOST_LINES
        ]
        if not fitting:
            raise TransportUnavailable(
                f"a row of one head has {widest * size} bytes; FlashInfer's queue takes {_MOST_LINES} lines of {_LINE} "
                "bytes in one message: use another transport"
            )
        if heads_per_entry is not None and heads_per_entry not in fitting:
            raise TransportUnavailable(
                f"options.flashinfer_helix.heads_per_entry is {heads_per_entry}; expected a divisor of the "
                f"{self.heads} heads that a destination gets, of which {fitting[0]} fit into one message at the most"
            )
        self.k = heads_per_entry or fitting[0]
        self.parts = self.heads // self.k

    @property
    def words(self) -> str:
        row = self.k * max(self.shape.widths) * self.shape.dtype.itemsize
        return f"{self.k} heads, {lines_of(row, _statistics(self.k))} lines an entry"

    def capacity(self) -> tuple[int, int]:
        entries = self.tokens * self.parts * self.world_size
        row = _up(self.k * max(self.shape.widths) * self.shape.dtype.itemsize, _VECTOR)
        return entries * row // 2, entries * _statistics(self.k)

    def sent(self, out: torch.Tensor, lse: torch.Tensor, channel: int) -> Sent:
        rows = self._entries(out)
        if rows.dtype == torch.float32:
            rows = rows.view(torch.bfloat16)  # it moves bits
        return Sent(
            _padded(rows, _up(2 * rows.shape[2], _VECTOR) // 2), _padded(self._entries(lse), _statistics(self.k))
        )

    def _entries(self, one: torch.Tensor) -> torch.Tensor:
        t, n = one.shape[:2]
        if self.parts == 1:
            return one.reshape(t, n, -1)
        return one.reshape(t, n, self.parts, -1).transpose(1, 2).reshape(t * self.parts, n, -1)

    def arrived(self, got: Sent, like: tuple[int, int, int, int], channel: int) -> tuple[torch.Tensor, torch.Tensor]:
        t, n, h, d = like
        size = self.shape.dtype.itemsize
        rows = got.rows[..., : self.k * d * size // 2].view(self.shape.dtype)
        lses = got.statistics[..., : self.k]
        if self.parts == 1:
            return rows.unflatten(2, (h, d)), lses
        rows = rows.view(t, self.parts, n, self.k, d).transpose(1, 2).reshape(t, n, h, d)
        return rows, lses.view(t, self.parts, n, self.k).transpose(1, 2).reshape(t, n, h)


def _statistics(heads: int) -> int:
    """Float32 words for so many LSEs: a pair, or whole vectors."""
    return 2 if heads <= 2 else _up(heads, 4)


def _padded(entries: torch.Tensor, width: int) -> torch.Tensor:
    """`entries`, `width` wide, dense and aligned; itself where it is so already."""
    if entries.shape[2] != width:
        entries = torch.nn.functional.pad(entries, (0, width - entries.shape[2]))
    entries = entries.contiguous()
    # A bulk copy from an odd address ends the process's CUDA context.
    return entries if entries.data_ptr() % _VECTOR == 0 else entries.clone()


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
