"""The program that shows FlashInfer's fault tells what a wrong word is, and says what it needs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dcpcomm.bench import helix_fault
from dcpcomm.bench.helix_fault import FILL, Tally, call_of, words

ROWS, PER_ROW = 4, 64


def test_a_word_says_who_sent_it_and_when() -> None:
    seen = {
        int(word)
        for call in (0, 1, 1000)
        for source in range(2)
        for to in range(2)
        for word in words(call, source, to, ROWS, PER_ROW, "cpu").flatten()
    }
    assert len(seen) == 3 * 4 * ROWS * PER_ROW
    assert FILL not in seen
    assert call_of(int(words(1000, 1, 0, ROWS, PER_ROW, "cpu")[3, 5])) == 1000
    assert call_of(FILL) is None


@pytest.mark.parametrize(("repeats", "old"), [(1, "4"), (5, "20")])
def test_stale_halves_are_dated_and_measured(repeats: int, old: str) -> None:
    want, got = (words(9, 1, 0, ROWS, PER_ROW, "cpu") for _ in range(2))
    got[2, 8:16] = words(5, 1, 0, ROWS, PER_ROW, "cpu")[2, 8:16]
    got[3, 16:24] = FILL
    tally = Tally()
    tally.compare(9, repeats, 0, 1, got, want)
    tally.compare(9, repeats, 0, 0, want, want)
    assert (tally.wrong_words, tally.wrong_rows, tally.wrong_calls, tally.of_own_slice) == (16, 2, 1, 0)
    assert tally.ages == {old: 8, "initial fill": 8}
    assert tally.runs == {64: 2}
    assert tally.starts == {64: 1, 0: 1}
    assert tally.first.startswith("call 9, rank 0, row 2 from rank 1, byte 64: wanted 0x")


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("is about machines without a GPU")
    done = subprocess.run(
        [sys.executable, helix_fault.__file__], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs a CUDA GPU" in done.stderr


def test_it_can_be_sent_as_it_is() -> None:
    """No line of it imports dcpcomm."""
    tree = ast.parse(Path(helix_fault.__file__).read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} & {"dcpcomm", "tests"} == set()
    assert {"torch", "flashinfer"} <= imported
