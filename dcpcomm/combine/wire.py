"""What travels: one block per destination, a header row and then one row per (token, head), its LSE in the row.

    block      = [1 + R, W] bytes;  R = rows per destination
    row        = D x itemsize bytes of payload, padded to 16, then 16 bytes that begin with the LSE as float32
    header row = ordinal int64 | tag int32 | B int32 | chunk int32 | width int32 | kind int64   (32 bytes; W >= 32)

The size of a block follows from (B, shape) alone, never from a rank's layout, LSE dtype or counts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

__all__ = [
    "HEADER_WORDS",
    "KIND_CANCELLED",
    "KIND_ROWS",
    "Header",
    "WireViews",
    "block_bytes",
    "payload_bytes",
    "row_bytes",
    "wire_views",
]

HEADER_WORDS = 4
KIND_ROWS = 0
KIND_CANCELLED = 1
_LOW = 0xFFFFFFFF


def payload_bytes(width: int, itemsize: int) -> int:
    """Bytes of a row before its LSE."""
    return -(-width * itemsize // 16) * 16


def row_bytes(width: int, itemsize: int) -> int:
    """W: bytes of one row on the wire."""
    return payload_bytes(width, itemsize) + 16


def block_bytes(rows: int, width: int, itemsize: int) -> int:
    """Bytes that one rank sends to one other in one exchange of `rows` rows."""
    return (1 + rows) * row_bytes(width, itemsize)


class Header(NamedTuple):
    """Which call a block belongs to. Two ranks may merge each other's rows only where their headers are equal."""

    ordinal: int
    tag: int
    tokens: int
    chunk: int
    width: int
    kind: int = KIND_ROWS

    def words(self) -> tuple[int, int, int, int]:
        return (
            self.ordinal,
            (self.tag & _LOW) | self.tokens << 32,
            (self.chunk & _LOW) | self.width << 32,
            self.kind,
        )

    @classmethod
    def from_words(cls, words: np.ndarray) -> Header:
        ordinal, tag_tokens, chunk_width, kind = (int(w) for w in words)
        tag = tag_tokens & _LOW
        return cls(
            ordinal=ordinal,
            tag=tag - (1 << 32) if tag >> 31 else tag,
            tokens=tag_tokens >> 32,
            chunk=chunk_width & _LOW,
            width=chunk_width >> 32,
            kind=kind,
        )

    def __str__(self) -> str:
        chunk = f", chunk {self.chunk}" if self.chunk else ""
        return f"call {self.ordinal}, tag {self.tag}, B={self.tokens}, width {self.width}{chunk}"


def wire_views(
    send: torch.Tensor,
    recv: torch.Tensor,
    world_size: int,
    t: int,
    h: int,
    width: int,
    dtype: torch.dtype,
    ragged: bool,
) -> tuple[WireViews, WireViews]:
    """Two regions of a workspace, uint8 `[nbytes]`, as N blocks of `t * h` rows of `width` columns each.

    Blocks to send lie back to back. So do those to receive, unless the transport is ragged: then each has an equal
    share of the whole region, room for the largest message that may come.
    """
    w = row_bytes(width, dtype.itemsize)
    shape = (world_size, 1 + t * h, w)
    compact = shape[1] * w
    stride = recv.numel() // world_size if ragged else compact
    with torch.inference_mode(False):  # views made in inference mode could not be written outside of it
        sending = send.as_strided(shape, (compact, w, 1))
        receiving = recv.as_strided(shape, (stride, w, 1))
        return WireViews(sending, t, h, width, dtype), WireViews(receiving, t, h, width, dtype)


class WireViews:
    """A wire buffer `[N, 1 + t * h, W]` uint8 seen as what it holds.

    Attributes:
        blocks: the buffer itself.
        payload: `[N, t, h, D]` in the partials' dtype.
        lse: `[N, t, h]` float32.
        headers: `[N, 4]` int64.
        words: the same as a numpy view; of nothing where the buffer isn't on CPU.
        address, block_stride, pitch, lse_at: where block 0 begins, and bytes from block to block, from row to row, and
            from a row's begin to its LSE.
    """

    __slots__ = ("address", "block_stride", "blocks", "headers", "lse", "lse_at", "payload", "pitch", "words")

    def __init__(self, blocks: torch.Tensor, t: int, h: int, width: int, dtype: torch.dtype) -> None:
        self.lse_at = lse_at = payload_bytes(width, dtype.itemsize)
        self.blocks = blocks
        self.address = blocks.data_ptr()
        self.block_stride, self.pitch, _ = blocks.stride()
        self.payload = blocks[:, 1:, : width * dtype.itemsize].view(dtype).unflatten(1, (t, h))
        self.lse = blocks[:, 1:, lse_at : lse_at + 4].view(torch.float32).squeeze(-1).unflatten(1, (t, h))
        self.headers = blocks[:, 0, : 8 * HEADER_WORDS].view(torch.int64)
        self.words: np.ndarray = self.headers.numpy() if blocks.is_cpu else np.empty((0, HEADER_WORDS), np.int64)
