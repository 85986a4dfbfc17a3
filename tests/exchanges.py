"""Exchanges over a bare transport, without a merger: what one rank received, held against what was sent."""

from __future__ import annotations

from typing import Any

import torch

from dcpcomm.group import Group
from dcpcomm.testing import LoopbackWorld
from dcpcomm.transport import MergeShape, MergeTransport

ROWS, WIDTH = 5, 64
SHAPE = MergeShape(max_tokens=4, num_heads=4, head_dim=8, dtype=torch.float32, lse_base="e", channels=2)


def block(source: int, destination: int, call: int, channel: int = 0) -> torch.Tensor:
    """`[ROWS, WIDTH]` uint8: what `source` sends; no two words of all the blocks of a test are equal."""
    first = (((source * 8 + destination) * 32 + call) * 2 + channel) * ROWS * WIDTH
    return torch.arange(first, first + ROWS * WIDTH // 4, dtype=torch.int32).view(torch.uint8).view(ROWS, WIDTH)


class Arrivals:
    """`blocks[call][source]` as one rank received them."""

    def __init__(self, rank: int, blocks: list[torch.Tensor], channel: int = 0) -> None:
        self.rank, self.blocks, self.channel = rank, blocks, channel

    def wrong(self) -> set[tuple[int, int]]:
        """(call, source) whose block isn't what was sent."""
        return {
            (call, source)
            for call, blocks in enumerate(self.blocks)
            for source in range(len(blocks))
            if not torch.equal(blocks[source], self.sent(source, call))
        }

    def sent(self, source: int, call: int) -> torch.Tensor:
        return block(source, self.rank, call, self.channel)


def rounds(cls: type[MergeTransport], n: int = 3, calls: int = 4, channel: int = 0) -> list[Arrivals]:
    """`calls` exchanges among `n` ranks; `recv` holds 0xEE before the first."""

    def rank(handle: Any) -> Arrivals:
        transport = connected(cls, handle)
        recv = torch.full((n, ROWS, WIDTH), 0xEE, dtype=torch.uint8)
        got = []
        for call in range(calls):
            send = torch.stack([block(transport.group.rank, to, call, channel) for to in range(n)])
            got.append(transport.exchange(send, channel, recv=recv).clone())
        transport.close()
        return Arrivals(transport.group.rank, got, channel)

    return LoopbackWorld(n).run(rank)


def connected(cls: type[MergeTransport], handle: Any) -> MergeTransport:
    group = Group.of(handle)
    transport = cls(group, SHAPE, None)
    transport.connect(group.control.exchange(transport.prepare()))
    return transport
