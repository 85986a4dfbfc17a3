"""The fused kernel's own source, compiled for the CPU: its blocks take turns at random, and what they store arrives
late, word by word, in any order. tests/gpu/test_fused.py makes the same checks on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpcomm.errors import TransportTimeout
from tests import fused_checks as checks
from tests import fused_rig
from tests import fused_trouble as trouble
from tests.emulated import COMPILER, EmulatedKernels
from tests.kernel_rig import DTYPES, Rig
from tests.pretend_gpu import pretend

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernels for the CPU with")
FILES = ("combine.cu",)


def _ahead(rig: Rig) -> None:
    checks.check_back_to_back(rig, 2, 64)


#: A text of the kernel, what is planted in its place, and the check that must find it; whether it makes a rank wait in
#: vain, so that the deadline is how it is found.
PLANTED: dict[str, tuple[str, str, Callable[[Rig], None], bool]] = {
    "the sentinel not put back": ("if (whole) store_words(from,", "if (0) store_words(from,", _ahead, False),
    "re-armed before it is whole": ("if (whole) store_words(from,", "store_words(from,", _ahead, True),
    "one word looked at": ("whole &= v.word[w] != SENTINEL;", "whole &= v.word[0] != SENTINEL;", _ahead, False),
    "an LSE of another call": (
        "pending >> i & 1 && stamp_of(word[i]) == now.epoch", "pending >> i & 1", _ahead, False,
    ),
    "one slot": (
        "now.slot = (now.epoch & 1) * p.slot_stride;", "now.slot = 0;",
        lambda rig: checks.check_back_to_back(rig, 3, 64), True,
    ),
    "blocks left behind": (
        "at < p.most_blocks; at += gridDim.x", "at < gridDim.x; at += gridDim.x", _ahead, True,
    ),
    "a payload like the sentinel": (
        "v[i].word[w] -= v[i].word[w] == SENTINEL;", ";", lambda rig: checks.check_sentinels_travel(rig, 2), True,
    ),
    "headers not looked at": (
        "trouble |= await_headers(p, now, own, since);", ";",
        lambda rig: trouble.check_mismatch(rig, 2, {"tag": 7}), False,
    ),
    "an early poison not looked at": (
        "if (since) told = GIVEN_UP;", ";", lambda rig: trouble.check_absence(rig, 2, 1), False,
    ),
    "calls sent after a poison": (
        "< 0) trouble = GIVEN_UP;", "< 0) ;", trouble.check_refused_calls_send_nothing, False,
    ),
    "a poison not looked for in waiting": (
        "if (was_given_up(p, now.epoch, own)) return GIVEN_UP;", ";",
        lambda rig: trouble.check_told_early(rig, 3), False,
    ),
    "poison told to nobody": (
        "for (u32 n = 0; n < p.ranks; n++)\n        store_release(poison_at(p, base_of<N>(p, n), p.rank)",
        "for (u32 n = p.rank; n == p.rank; n++)\n        store_release(poison_at(p, base_of<N>(p, n), p.rank)",
        lambda rig: trouble.check_absence(rig, 2, 1), False,
    ),
    "rows of a call called off not taken": (
        "if (index < total && trouble <= CALLED_OFF) trouble |=",
        "if (index < total && trouble <= CALLED_OFF && p.kind == 0) trouble |=",
        lambda rig: trouble.check_called_off(rig, 2), False,
    ),
    "counts from the first row on": (
        "row_is_empty(p.counts, p.counts.token0 + (i64)n", "row_is_empty(p.counts, (i64)n",
        lambda rig: checks.check_chunks(rig, 2), False,
    ),
    "widths not compared": (
        "same &= (value_of(word[3]) & ~KIND_BIT) == p.width;", ";",
        lambda rig: trouble.check_called_off_otherwise(rig, 2, {"width": 128}), True,
    ),
    "B of a call called off not compared": (
        "bool same = value_of(word[1]) == p.tokens &&",
        "bool same = (off || p.kind || value_of(word[1]) == p.tokens) &&",
        lambda rig: trouble.check_called_off_otherwise(rig, 2, {"tokens": 2}), True,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture
def rig(
    folder: Path, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Rig]:
    def make(dtype: torch.dtype, n: int, generic: bool) -> Any:
        return EmulatedKernels(dtype, n, folder, generic=generic, files=FILES, **given)

    given = getattr(request, "param", {})
    pretend(monkeypatch, folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Rig(torch.device("cpu"), make, rng)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "d", "scatter"), [(2, 128, "heads"), (3, 72, "tokens"), (2, 17, "none")])
def test_call_after_call_is_right_and_leaves_all_ready(
    rig: Rig, dtype: torch.dtype, n: int, d: int, scatter: str
) -> None:
    checks.check_calls(rig, dtype, n, d, scatter)


@pytest.mark.parametrize("n", [2, 3])
def test_ranks_that_run_ahead_of_each_other(rig: Rig, n: int) -> None:
    checks.check_back_to_back(rig, n, 64, 30)


@pytest.mark.parametrize("rig", [{"geometry": True}], indirect=True, ids=["compiled for it"])
def test_for_one_geometry(rig: Rig) -> None:
    checks.check_calls(rig, torch.bfloat16, 2, 96, "heads", 3)


def test_for_any_number_of_ranks(rig: Rig) -> None:
    checks.check_calls(rig, torch.bfloat16, 3, 80, "heads", 4, generic=True)


def test_ranks_whose_grids_differ(rig: Rig) -> None:
    checks.check_grids_differ(rig, 3)


def test_a_payload_like_the_sentinel_arrives(rig: Rig) -> None:
    checks.check_sentinels_travel(rig, 2)


@pytest.mark.parametrize("what", [{"tag": 7}, {"tokens": 2}, {"chunk": 1}], ids=str)
def test_ranks_in_different_calls_name_each_other(rig: Rig, what: dict[str, int]) -> None:
    trouble.check_mismatch(rig, 3, what)


@pytest.mark.parametrize("n", [2, 4])
def test_a_call_called_off_is_told_and_the_next_is_right(rig: Rig, n: int) -> None:
    trouble.check_called_off(rig, n)


@pytest.mark.parametrize(("n", "missing"), [(2, 1), (4, 0)])
def test_a_rank_that_does_not_come_is_named(rig: Rig, n: int, missing: int) -> None:
    trouble.check_absence(rig, n, missing)


@pytest.mark.parametrize("n", [3, 4])
def test_who_waits_is_told_when_another_gives_up(rig: Rig, n: int) -> None:
    trouble.check_told_early(rig, n)


def test_a_refused_call_sends_nothing(rig: Rig) -> None:
    trouble.check_refused_calls_send_nothing(rig)


def test_chunks_with_counts(rig: Rig) -> None:
    checks.check_chunks(rig, 3)


def test_rows_of_two_widths(rig: Rig) -> None:
    trouble.check_widths_differ(rig, 2)


@pytest.mark.parametrize("what", [{"tokens": 2}, {"width": 128}], ids=str)
def test_another_call_called_off(rig: Rig, what: dict[str, int]) -> None:
    trouble.check_called_off_otherwise(rig, 3, what)


@pytest.mark.parametrize(
    ("rig", "check", "waits"),
    [({"planted": (there, instead)}, check, waits) for there, instead, check, waits in PLANTED.values()],
    indirect=["rig"],
    ids=list(PLANTED),
)
def test_a_planted_mistake_is_found(
    rig: Rig, check: Callable[[Rig], None], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_rig, "DEADLINE_S", 2.0 if waits else 30.0)

    def often() -> None:
        for _ in range(10):  # as it may take luck
            check(rig)

    with pytest.raises((AssertionError, TransportTimeout) if waits else AssertionError):
        often()
