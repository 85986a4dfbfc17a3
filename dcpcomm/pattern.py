"""Words that say where they belong: a function of (source, destination, round, place), for proofs of transports."""

from __future__ import annotations

import torch

__all__ = ["block", "describe", "words"]

_MASK = 0xFFFFFFFF


def _mix(index: torch.Tensor, source: int, destination: int, number: int) -> torch.Tensor:
    """32 well-spread bits for each index, as int64."""
    seed = (source * 0x85EBCA6B + destination * 0xC2B2AE35 + number * 0x27D4EB2F) & _MASK
    x = (index * 0x9E3779B1 + seed) & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & _MASK
    return x ^ (x >> 16)


def block(nbytes: int, source: int, destination: int, number: int) -> torch.Tensor:
    """`nbytes` bytes, uint8, that `source` sends to `destination` in round `number`."""
    count = -(-nbytes // 4)
    mixed = _mix(torch.arange(count, dtype=torch.int64), source, destination, number)
    signed = torch.where(mixed > 0x7FFFFFFF, mixed - (1 << 32), mixed).to(torch.int32)
    return signed.view(torch.uint8)[:nbytes]


def words(raw: torch.Tensor) -> torch.Tensor:
    """`raw`, uint8, as int32 words; up to three bytes at the end are dropped."""
    return raw[: raw.numel() // 4 * 4].contiguous().view(torch.int32)


def describe(
    value: int, index: int, source: int, destination: int, number: int, world_size: int, count: int, poison: int
) -> str:
    """What the wrong word `value`, found at `index` in what `source` sent in round `number`, really is."""
    value &= _MASK
    if value == int.from_bytes(bytes([poison] * 4), "little"):
        return "what was there before: it was never written"
    if value == 0:
        return "zero"
    place = torch.tensor([index], dtype=torch.int64)
    for earlier in range(number - 1, -1, -1):
        if int(_mix(place, source, destination, earlier)) == value:
            return f"stale: the word of {number - earlier} round(s) before"
    for other in range(world_size):
        for whose in range(world_size):
            if (other, whose) != (source, destination) and int(_mix(place, other, whose, number)) == value:
                return f"the word that rank {other} sent to rank {whose}"
    found = (_mix(torch.arange(count, dtype=torch.int64), source, destination, number) == value).nonzero()
    if found.numel():
        return f"shifted: the word that belongs {4 * (int(found[0]) - index):+d} bytes from there"
    return "none of the words that were sent"
