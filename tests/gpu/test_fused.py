"""The fused kernel on a GPU: the checks of tests/test_nvrtc_fused.py, with virtual ranks on streams of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dcpcomm.combine.kernels import Kernels
from dcpcomm.combine.peer_options import PeerOptions
from tests import fused_checks as checks
from tests import fused_trouble as trouble
from tests.kernel_rig import DTYPES, Rig

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
    pytest.mark.timeout(300),
]
_MADE: dict[Any, Kernels] = {}


@pytest.fixture
def rig(rng: torch.Generator) -> Rig:
    device = torch.device("cuda", torch.cuda.current_device())

    def make(dtype: torch.dtype, n: int, generic: bool) -> Kernels:
        key = dtype, n, generic
        if key not in _MADE:
            _MADE[key] = Kernels(device, dtype, n, generic=generic)
            _MADE[key].warm()
        return _MADE[key]

    return Rig(device, make, rng)


@pytest.mark.parametrize("d", [64, 128, 576, 72, 17])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_call_after_call_is_right_and_leaves_all_ready(rig: Rig, n: int, d: int) -> None:
    # Each case compiles kernels of its own, so dtypes and scatters take turns: test_nvrtc_fused.py has all of them.
    checks.check_calls(rig, DTYPES[(n + d // 8) % 3], n, d, ("heads", "tokens", "none")[(n + d) % 3], 8)


@pytest.mark.parametrize("n", [2, 3])
def test_for_any_number_of_ranks(rig: Rig, n: int) -> None:
    checks.check_calls(rig, torch.bfloat16, n, 128, "heads", 6, generic=True)


@pytest.mark.parametrize("n", [2, 4])
def test_the_strict_build(rig: Rig, n: int) -> None:
    checks.check_calls(rig, torch.bfloat16, n, 128, "heads", 6, PeerOptions(strict=True))


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("programmatic", [True, False])
def test_ranks_that_run_ahead_of_each_other(rig: Rig, n: int, programmatic: bool) -> None:
    checks.check_back_to_back(rig, n, 128, 200, PeerOptions(programmatic=programmatic))


def test_ranks_whose_grids_differ(rig: Rig) -> None:
    checks.check_grids_differ(rig, 4)


@pytest.mark.parametrize("n", [2, 8])
def test_a_payload_like_the_sentinel_arrives(rig: Rig, n: int) -> None:
    checks.check_sentinels_travel(rig, n)


@pytest.mark.parametrize("what", [{"tag": 7}, {"tokens": 2}, {"chunk": 1}], ids=str)
@pytest.mark.parametrize("n", [2, 4])
def test_ranks_in_different_calls_name_each_other(rig: Rig, n: int, what: dict[str, int]) -> None:
    trouble.check_mismatch(rig, n, what)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_call_called_off_is_told_and_the_next_is_right(rig: Rig, n: int) -> None:
    trouble.check_called_off(rig, n)


@pytest.mark.parametrize(("n", "missing"), [(2, 1), (4, 0), (8, 5)])
def test_a_rank_that_does_not_come_is_named(rig: Rig, n: int, missing: int) -> None:
    trouble.check_absence(rig, n, missing)


@pytest.mark.parametrize("n", [3, 8])
def test_who_waits_is_told_when_another_gives_up(rig: Rig, n: int) -> None:
    trouble.check_told_early(rig, n)


def test_a_refused_call_sends_nothing(rig: Rig) -> None:
    trouble.check_refused_calls_send_nothing(rig)


@pytest.mark.parametrize("n", [2, 4])
def test_chunks_with_counts(rig: Rig, n: int) -> None:
    checks.check_chunks(rig, n)


@pytest.mark.parametrize("n", [2, 4])
def test_rows_of_two_widths(rig: Rig, n: int) -> None:
    trouble.check_widths_differ(rig, n)


@pytest.mark.parametrize("what", [{"tokens": 2}, {"width": 128}], ids=str)
def test_another_call_called_off(rig: Rig, what: dict[str, int]) -> None:
    trouble.check_called_off_otherwise(rig, 3, what)
