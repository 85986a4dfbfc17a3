"""The CUDA kernels' own source, compiled for the CPU and run: their arithmetic and addresses, without a GPU.

What only a GPU has (concurrency, memory order, its exp2) is left to tests/gpu/test_kernels.py, which makes the same
checks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import kernel_checks as checks
from tests.emulated import COMPILER, EmulatedKernels
from tests.kernel_rig import DTYPES, Rig

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernels for the CPU with")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture
def rig(folder: Path, rng: torch.Generator) -> Iterator[Rig]:
    def make(dtype: torch.dtype, n: int, generic: bool) -> Any:
        return EmulatedKernels(dtype, n, folder, generic=generic)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Rig(torch.device("cpu"), make, rng)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pack_writes_what_the_torch_engine_writes(rig: Rig, dtype: torch.dtype) -> None:
    checks.check_pack_layouts(rig, dtype, (1, 3), (64, 72, 17))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_pack_knows_every_form_of_counts(rig: Rig, dtype: torch.dtype) -> None:
    checks.check_pack_counts(rig, dtype, 2)


def test_a_cancelled_call_sends_headers_alone(rig: Rig) -> None:
    checks.check_cancelled(rig, torch.bfloat16, 3)


def test_pack_loops_where_the_grid_is_smaller_than_the_work(rig: Rig) -> None:
    checks.check_big_pack(rig, torch.bfloat16, 2, 40, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 8, 17])
def test_combine_is_the_oracle(rig: Rig, dtype: torch.dtype, n: int) -> None:
    checks.check_combine(rig, dtype, n, (64, 80, 72, 17, 576))


def test_combine_of_one_rank_knows_counts(rig: Rig) -> None:
    checks.check_combine_counts(rig, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_survives_and_rounding_is_to_the_nearest_even(rig: Rig, dtype: torch.dtype) -> None:
    checks.check_halves(rig, dtype)


def test_combine_loops_where_the_grid_is_smaller_than_the_work(rig: Rig) -> None:
    checks.check_big_combine(rig, torch.bfloat16, 3, 60, 4, 64)


def test_extremes(rig: Rig) -> None:
    checks.check_extremes(rig)


def test_float32_at_odd_addresses(rig: Rig) -> None:
    checks.check_halved_float32(rig)


@pytest.mark.parametrize("n", [2, 3, 17])
def test_a_header_that_differs_makes_all_of_it_nan(rig: Rig, n: int) -> None:
    checks.check_headers(rig, torch.bfloat16, n)


@pytest.mark.parametrize("n", [1, 2, 17])
def test_warming_runs_every_variant_once_and_waits_for_nobody(
    rig: Rig, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = rig.kernels(torch.float16, n)
    ran: list[int] = []
    bind = kernels._bind

    def noting(function: int, name: str, grid: Any, params: Any) -> Any:
        ran.append(function)
        return bind(function, name, grid, params)

    monkeypatch.setattr(kernels, "_bind", noting)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    kernels.warm(stream=0)
    assert sorted(set(ran)) == list(range(8 if n > 1 else 6))
