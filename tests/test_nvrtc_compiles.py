"""The CUDA kernels compile, for every architecture, dtype and kind of group, by NVRTC alone; no GPU is needed."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpcomm.combine import kernels, nvrtc, params, structs
from dcpcomm.combine.wire import Header
from dcpcomm.errors import DCPCommError

with_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cupy_backends") is None, reason="CuPy is not installed: pip install 'dcpcomm[cu12]'"
)
ARCHITECTURES = [(8, 0), (9, 0), (10, 0), (12, 0)]
NAMES = {
    "pack.cu": ["pack_16", "pack_8", "pack_4", "pack_2"],
    "combine.cu": ["combine_16", "combine_1"],
    "scale.cu": ["scale_16", "scale_1"],
    "fused.cu": ["fused_16", "fused_1"],
    "signals.cu": ["await_signals", "move_blocks"],
}
FILES = [("pack.cu", torch.bfloat16, 2), ("pack.cu", torch.float32, 2), ("signals.cu", torch.bfloat16, 2)]
#: N by architecture: all of it once, samples elsewhere.
RANKS = {(9, 0): (1, 2, 3, 8, 16, 17)}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DCPCOMM_CACHE_DIR", str(tmp_path))
    return tmp_path


def build(name: str, dtype: torch.dtype, n: int, capability: tuple[int, int]) -> nvrtc.Binary:
    return nvrtc.compile_kernels(name, kernels.defines_for(name, dtype, n), capability)


@with_nvrtc
@pytest.mark.parametrize("capability", ARCHITECTURES, ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_every_kernel_compiles_without_spilling(
    capability: tuple[int, int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What ptxas says of a kernel's registers stands in the log that NVRTC gives where this option is set.
    logs: list[str] = []
    real = nvrtc._compile

    def with_log(module: Any, *rest: Any) -> bytes:
        class Listening:
            def __getattr__(self, name: str) -> Any:
                return getattr(module, name)

            def destroyProgram(self, program: Any) -> None:
                logs.append(module.getProgramLog(program))
                module.destroyProgram(program)

        return real(Listening(), *rest)

    monkeypatch.setattr(nvrtc, "_OPTIONS", (*nvrtc._OPTIONS, "--ptxas-options=-v"))
    monkeypatch.setattr(nvrtc, "_compile", with_log)
    ranks = RANKS.get(capability, (2, 17))
    by_ranks = itertools.product(("combine.cu", "scale.cu"), kernels._DTYPES, ranks)
    fused = [("fused.cu", torch.bfloat16, n) for n in ranks if n > 1 and (n == 2 or capability == (9, 0))]
    for name, dtype, n in [*FILES, *by_ranks, *fused]:
        binary = build(name, dtype, n, capability)
        assert binary.image.startswith(b"\x7fELF")
        assert binary.target == f"sm_{capability[0]}{capability[1]}"
        for kernel in NAMES[name]:
            assert kernel.encode() + b"\0" in binary.image, f"{kernel} is not in {name}"
        stacks = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", logs[-1])
        assert len(stacks) >= len(NAMES[name])
        # A word or two is ptxas's own affair, and differs by its version; an array that fell out of registers isn't.
        assert all(int(stack) <= 16 >= int(spilled) for stack, spilled in stacks), f"{name} {dtype} N={n}: {stacks}"


@with_nvrtc
def test_all_that_one_merger_needs_compiles_in_seconds(cache: Path) -> None:
    started = time.process_time()
    for name in NAMES:
        assert not build(name, torch.bfloat16, 8, (9, 0)).cached
    assert time.process_time() - started < 10


@with_nvrtc
def test_an_unknown_newer_gpu_gets_ptx(cache: Path) -> None:
    binary = build("pack.cu", torch.bfloat16, 2, (19, 9))
    assert binary.target.startswith("compute_")
    assert b".visible .entry pack_16" in binary.image
    assert binary.image.endswith(b"\0")


@with_nvrtc
def test_an_older_gpu_than_nvrtc_knows_is_told_so(cache: Path) -> None:
    with pytest.raises(nvrtc.KernelsUnavailable, match="sm_20 is older"):
        build("pack.cu", torch.bfloat16, 2, (2, 0))


@with_nvrtc
@pytest.mark.parametrize("name", ["combine.cu", "scale.cu"])
def test_nothing_is_contracted_or_approximated(name: str, cache: Path) -> None:
    """In PTX, the canonical arithmetic is what it says: rounded multiplications and additions, and nothing fused but
    the one fused multiply-add of the sum.
    """
    text = build(name, torch.float32, 2, (19, 9)).image.decode()
    assert "fma.rn.f32" in text
    assert "rcp.rn.f32" in text
    assert not re.search(r"(div|rcp|sqrt)\.(approx|full)", text)
    assert not re.search(r"(?<!mad)\.ftz\.f32", re.sub(r"ex2\.approx\.ftz\.f32|lg2\.approx\.ftz\.f32", "", text))


@with_nvrtc
def test_a_struct_changed_on_one_side_does_not_compile(cache: Path) -> None:
    defines = kernels.defines_for("pack.cu", torch.bfloat16, 2)
    defines["KERNEL_PACK_PARAMS_BYTES"] += 8
    with pytest.raises(DCPCommError, match=r"pack\.cu does not compile[\s\S]*PackParams differs"):
        nvrtc.compile_kernels("pack.cu", defines, (9, 0))


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(nvrtc.importlib, "import_module", absent)
    with pytest.raises(nvrtc.KernelsUnavailable, match=r"CuPy can't be imported.*pip install 'dcpcomm\[cu12\]'"):
        build("pack.cu", torch.bfloat16, 2, (9, 0))


# ---------------------------------------------------------------- structs

_C_TYPES = {"u64": ctypes.c_uint64, "i64": ctypes.c_int64, "u32": ctypes.c_uint32, "i32": ctypes.c_int32}
_C_TYPES |= {"Counts": structs.Counts, "Divisor": structs.Divisor}
STRUCTS = ["Divisor", "Counts", "PackParams", "CombineParams", "ScaleParams", "FusedParams"]


@pytest.mark.parametrize("name", STRUCTS)
def test_each_struct_is_mirrored_field_by_field(name: str) -> None:
    text = re.sub(r"//.*", "", nvrtc.sources_of("pack.cu")["params.cuh"])
    body = re.search(rf"struct {name} \{{(.*?)\}};", text, re.DOTALL)
    assert body is not None
    fields = re.findall(r"(\w+) (\w+)(?:\[(\d+)\])?;", body[1])
    declared = [(field, _C_TYPES[kind] * int(many) if many else _C_TYPES[kind]) for kind, field, many in fields]
    assert declared == [(field[0], field[1]) for field in getattr(structs, name)._fields_]


# ---------------------------------------------------------------- arithmetic of the host's side


def test_a_divisor_divides(rng: torch.Generator) -> None:
    most = 2**31 - 1
    for by in [*range(1, 300), 2**16 - 1, 2**16, 2**16 + 1, 2**30, 2**30 + 1, most]:
        magic, shift = params.divisor_of(by)
        assert 0 <= magic < 2**32
        assert 0 <= shift < 32
        some = torch.randint(0, 2**31, (50,), generator=rng).tolist()
        for n in [0, 1, by - 1, by, min(most, by + 1), most // by * by, max(0, most // by * by - 1), most, *some]:
            assert (n * magic >> 32 >> shift if magic else n) == n // by, (n, by)


def wire(rows: int, pitch: int) -> params.WireAt:
    return params.WireAt(1 << 20, (1 + rows) * pitch, pitch, pitch - 16)


@pytest.mark.parametrize(
    ("dtype", "width", "pitch", "offset", "last", "unit"),
    [
        (torch.bfloat16, 128, 128, 0, 1, 16),
        (torch.bfloat16, 128, 136, 0, 1, 16),
        (torch.bfloat16, 128, 132, 0, 1, 8),
        (torch.bfloat16, 128, 130, 0, 1, 4),
        (torch.bfloat16, 128, 129, 0, 1, 2),
        (torch.bfloat16, 128, 128, 4, 1, 8),
        (torch.bfloat16, 128, 128, 2, 1, 4),
        (torch.bfloat16, 128, 128, 1, 1, 2),
        (torch.bfloat16, 128, 256, 0, 2, 2),
        (torch.bfloat16, 60, 64, 0, 1, 8),
        (torch.bfloat16, 62, 64, 0, 1, 4),
        (torch.bfloat16, 63, 64, 0, 1, 2),
        (torch.float32, 64, 64, 0, 1, 16),
        (torch.float32, 64, 66, 0, 1, 8),
        (torch.float32, 64, 65, 0, 1, 4),
        (torch.float32, 64, 128, 0, 2, 4),
        (torch.float32, 64, 129, 1, 2, 4),
    ],
)
def test_pack_loads_as_much_at_once_as_can_be(
    dtype: torch.dtype, width: int, pitch: int, offset: int, last: int, unit: int
) -> None:
    whole = torch.zeros(64 + 4 * pitch, dtype=dtype)
    start = -(whole.data_ptr() % 64) // dtype.itemsize % (64 // dtype.itemsize)
    rows = whole.as_strided((2, 1, 2, width), (2 * pitch, 2 * pitch, pitch, last), start + offset)
    lse = torch.zeros(2, 1, 2)
    filled = params.pack_params(wire(2, 272), rows, lse, 0, Header(0, 0, 1, 0, width), 64)
    assert params.pack_unit(filled, dtype.itemsize) == unit


def test_a_float32_at_an_odd_address_is_loaded_by_halves() -> None:
    raw = torch.zeros(4096, dtype=torch.uint8)
    lse = torch.zeros(2, 1, 2)
    filled = params.pack_params(wire(2, 272), raw[:2048].view(torch.float32).view(2, 1, 2, 128), lse, 0,
                                Header(0, 0, 1, 0, 128), 64)  # fmt: skip
    filled.rows += 2
    assert params.pack_unit(filled, 4) == 2
    assert params.lse_kind(lse, lse.data_ptr(), 4) == 0
    assert params.lse_kind(lse, lse.data_ptr() + 2, 4) == 3
    assert params.lse_kind(lse.bfloat16(), lse.data_ptr() + 2, 2) == 1


def test_combine_goes_by_vectors_unless_wire_or_result_is_odd() -> None:
    rows, lse = torch.zeros(2, 3, 2, 64, dtype=torch.bfloat16), torch.zeros(2, 3, 2)
    odd = torch.zeros(3, 2, 65, dtype=torch.bfloat16)[..., :64]
    aligned = torch.zeros(3, 2, 64, dtype=torch.bfloat16)

    def filled(rows: torch.Tensor, out: torch.Tensor, own: torch.Tensor) -> structs.CombineParams:
        return params.combine_params(rows, lse, out, None, "e", own=1, own_rows=own, own_lse=lse[1])

    assert params.vectorised(filled(rows, aligned, aligned))
    one = filled(rows, aligned, odd)
    assert params.vectorised(one), "odd own rows are no reason to merge the others slowly"
    assert one.own_unit == 2
    assert not params.vectorised(filled(rows, odd, aligned))
    assert not params.vectorised(filled(torch.zeros(2, 3, 2, 65, dtype=torch.bfloat16)[..., :64], aligned, aligned))
    assert not params.vectorised(filled(rows[..., :60], aligned[..., :60], aligned[..., :60]))


@pytest.mark.parametrize("columns", [1, 2, 9, 17, 65, 128, 129, 255, 256, 257, 576, 1025])
@pytest.mark.parametrize("rows", [0, 1, 7, 1000, 10**6])
def test_a_grid_covers_its_work(columns: int, rows: int) -> None:
    across, down, wide, tall = kernels.tile(columns, rows, 2112)
    assert wide * tall <= 256
    assert down * wide >= columns > (down - 1) * wide
    assert across >= 1
    assert across * down <= max(2112, down)
    assert across * tall >= min(rows, 1)
    if across * down < 2112 - down:
        assert across * tall >= rows, "few blocks, and yet a loop"
