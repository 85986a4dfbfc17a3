"""What a wrong word is called, and how a difference is measured."""

from __future__ import annotations

import re

import pytest
import torch

from dcpcomm import pattern

WHO = 1, 0, 40, 2  # source, destination, round, ranks
ROW, ROWS = 256, 8


def told(change: dict[int, int], lses: int = 0) -> str:
    """The report where words (index -> value) of a message are others than were sent."""
    want = pattern.block(ROW * ROWS + 4 * lses, *WHO[:3])
    got = want.clone()
    for index, value in change.items():
        pattern.words(got)[index] = value
    return pattern.difference(got, want, *WHO, ROW, ROWS, 0xA5)


def word(index: int, number: int) -> int:
    return int(pattern.words(pattern.block(ROW * ROWS, WHO[0], WHO[1], number))[index])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (word(5, 36), "stale: the word of 4 round(s) before"),
        (word(5, 1), "stale: the word of 39 round(s) before"),
        (word(13, 36), "stale: the word of 4 round(s) before, which belonged +32 bytes from there"),
        (word(13, 40), "shifted: the word that belongs +32 bytes from there"),
        (word(13, 3), "none of the words that were sent"),
        (-1, "all bits set: memory that was filled before the first round"),
        (0, "zero"),
    ],
)
def test_a_wrong_word_is_called_what_it_is(value: int, said: str) -> None:
    text = told({5: value})
    assert text.endswith(f", {said}"), text
    assert text.startswith("rank 0 got 1 wrong words of 512 from rank 1 in round 40; the first in row 0, byte 20: ")


def test_a_difference_is_measured_in_rows_lses_and_runs() -> None:
    runs = {**{i: word(i, 36) for i in range(16, 32)}, **{i: word(i, 36) for i in range(80, 96)}, 513: 7, 515: 7}
    text = told(runs, lses=8)
    assert re.search(
        r"34 wrong words of 520 .* which lie in 2 row\(s\) and 2 LSEs, in 4 run\(s\) of at most 64 bytes", text
    )


def test_words_are_well_spread_and_differ_between_all_that_send() -> None:
    seen = [pattern.block(4096, s, d, n) for s in range(3) for d in range(3) for n in range(3)]
    together = torch.cat([pattern.words(one) for one in seen])
    assert together.unique().numel() > 0.9999 * together.numel()
    assert torch.equal(pattern.block(4093, 1, 2, 3), pattern.block(4096, 1, 2, 3)[:4093])
