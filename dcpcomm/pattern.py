"""Words that say where they belong: a function of (source, destination, round, place), for proofs of transports."""

from __future__ import annotations

import torch

__all__ = ["block", "describe", "difference", "words"]

_MASK = 0xFFFFFFFF
_LOOKED_BACK = 16  # rounds in which a stale word is searched for at every place, not only at its own


def _signed(value: int) -> int:
    """The int32 with the low 32 bits of `value`."""
    value &= _MASK
    return value - (1 << 32) if value > 0x7FFFFFFF else value


def _mix(index: torch.Tensor, source: int, destination: int, number: int) -> torch.Tensor:
    """32 well-spread bits for each index, int32; in place."""
    # In 32 bits and in place: between virtual ranks of one GPU the allocator must not ask the driver for memory.
    x = index.mul_(_signed(0x9E3779B1))
    x.add_(_signed(source * 0x85EBCA6B + destination * 0xC2B2AE35 + number * 0x27D4EB2F))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_signed(0x7FEB352D))
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x2C1B3C6D))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def block(nbytes: int, source: int, destination: int, number: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """`nbytes` bytes, uint8 on `device`, that `source` sends to `destination` in round `number`."""
    index = torch.arange(-(-nbytes // 4), dtype=torch.int32, device=device)
    return _mix(index, source, destination, number).view(torch.uint8)[:nbytes]


def words(raw: torch.Tensor) -> torch.Tensor:
    """`raw`, uint8, as int32 words; up to three bytes at the end are dropped."""
    return raw[: raw.numel() // 4 * 4].contiguous().view(torch.int32)


def describe(
    value: int, index: int, source: int, destination: int, number: int, world_size: int, count: int, poison: int
) -> str:
    """What the wrong word `value`, found at `index` in what `source` sent in round `number`, really is."""
    value = _signed(value)
    if value & _MASK == int.from_bytes(bytes([poison] * 4), "little"):
        return "what was there before: it was never written"
    if value == 0:
        return "zero"

    def at_its_place(whose: int, to: int, when: int) -> bool:
        return int(_mix(torch.tensor([index], dtype=torch.int32), whose, to, when)) == value

    def anywhere(when: int) -> list[int]:
        """By how many bytes the word is from where it belongs."""
        all_words = _mix(torch.arange(count, dtype=torch.int32), source, destination, when)
        return [4 * (int(one) - index) for one in (all_words == value).nonzero().flatten()[:1]]

    for earlier in range(number - 1, -1, -1):
        if at_its_place(source, destination, earlier):
            return f"stale: the word of {number - earlier} round(s) before"
    for other in range(world_size):
        for whose in range(world_size):
            if (other, whose) != (source, destination) and at_its_place(other, whose, number):
                return f"the word that rank {other} sent to rank {whose}"
    for shift in anywhere(number):
        return f"shifted: the word that belongs {shift:+d} bytes from there"
    for earlier in range(number - 1, max(-1, number - 1 - _LOOKED_BACK), -1):
        for shift in anywhere(earlier):
            return f"stale: the word of {number - earlier} round(s) before, which belonged {shift:+d} bytes from there"
    if value == -1:
        return "all bits set: memory that was filled before the first round"
    return "none of the words that were sent"


def difference(
    got: torch.Tensor,
    want: torch.Tensor,
    source: int,
    destination: int,
    number: int,
    world_size: int,
    row: int,
    rows: int,
    poison: int,
) -> str:
    """How much of what `source` sent to `destination` in round `number` is wrong, where it begins, and what is there.

    Args:
        got, want: uint8, of the same length, and not equal.
        row: bytes of one.
        rows: how many there are; behind them are float32 LSEs.
        poison: the byte that memory was filled with before.
    """
    words_got, words_want = words(got).cpu(), words(want).cpu()
    wrong = (words_got != words_want).nonzero().flatten()
    first = int(wrong[0])
    value = int(words_got[first])
    at, inside = divmod(first * 4, row)
    what = describe(value, first, source, destination, number, world_size, words_want.numel(), poison)
    return (
        f"rank {destination} got {wrong.numel()} wrong words of {words_want.numel()} from rank {source} in round "
        f"{number}{_extent(wrong, row, rows)}; the first in row {at}, byte {inside}: wanted "
        f"0x{int(words_want[first]) & _MASK:08x}, got 0x{value & _MASK:08x}, {what}"
    )


def _extent(wrong: torch.Tensor, row: int, rows: int) -> str:
    """How many rows and LSEs the `wrong` words (sorted, int64) lie in, and in which runs of bytes; nothing of one word
    alone.
    """
    if wrong.numel() == 1:
        return ""
    in_row = wrong[wrong < rows * row // 4]
    begins = torch.cat([torch.tensor([0]), (wrong.diff() > 1).nonzero().flatten() + 1])
    longest = int(torch.cat([begins, torch.tensor([wrong.numel()])]).diff().max()) * 4
    lses = wrong.numel() - in_row.numel()
    return (
        f", which lie in {(in_row * 4 // row).unique().numel()} row(s){f' and {lses} LSEs' if lses else ''}, in "
        f"{begins.numel()} run(s) of at most {longest} bytes"
    )
