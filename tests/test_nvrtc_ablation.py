"""The fused kernel without one of its parts: it compiles, and good calls are answered as by the whole."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpcomm.bench import ablation
from dcpcomm.combine.kernels import defines_for
from dcpcomm.combine.nvrtc import compile_kernels, sources_of
from tests import fused_checks as checks
from tests.emulated import COMPILER, EmulatedKernels
from tests.kernel_rig import Rig
from tests.pretend_gpu import pretend

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernels for the CPU with")


@pytest.fixture
def rig(tmp_path: Path, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    def make(dtype: torch.dtype, n: int, generic: bool) -> Any:
        return EmulatedKernels(dtype, n, tmp_path, generic=generic, files=("combine.cu",))

    pretend(monkeypatch, tmp_path)
    yield Rig(torch.device("cpu"), make, rng)
    ablation.use(None)


@pytest.mark.parametrize("part", ["headers", "deadline", "all"])
def test_what_lacks_a_part_answers_good_calls(rig: Rig, part: str) -> None:
    ablation.use(part)
    checks.check_back_to_back(rig, 2, 64)


@pytest.mark.skipif(importlib.util.find_spec("cupy_backends") is None, reason="CuPy is not installed")
@pytest.mark.parametrize("part", ["poison", "sentinels", "all"])
def test_what_lacks_a_part_compiles(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCPCOMM_CACHE_DIR", str(tmp_path))
    file = tmp_path / "fused.cu"
    file.write_text(ablation.source_without(part), encoding="utf-8")
    binary = compile_kernels(file, defines_for("fused.cu", torch.bfloat16, 2), (9, 0))
    assert b"fused_16\0" in binary.image


def test_every_part_is_in_the_kernel() -> None:
    for part in ablation.PARTS:
        assert len(ablation.source_without(part)) < len(sources_of("fused.cu")["fused.cu"])


def test_an_unknown_part_is_told() -> None:
    with pytest.raises(ValueError, match=r"'wings' is no part.*headers"):
        ablation.use("wings")
