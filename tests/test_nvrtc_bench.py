"""The benchmark's own kernels compile, for every architecture, by NVRTC alone; no GPU is needed."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpcomm.bench import kernels, limits
from dcpcomm.bench.rivals import four_launch_put
from dcpcomm.combine.structs import Divisor

with_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cupy_backends") is None, reason="CuPy is not installed: pip install 'dcpcomm[cu12]'"
)
ARCHITECTURES = [(8, 0), (9, 0), (10, 0), (12, 0)]
ARCHITECTURE = pytest.mark.parametrize("capability", ARCHITECTURES, ids=lambda c: f"sm_{c[0]}{c[1]}")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DCPCOMM_CACHE_DIR", str(tmp_path))
    return tmp_path


@with_nvrtc
@ARCHITECTURE
def test_the_limits_compile(capability: tuple[int, int]) -> None:
    binary = kernels.build("limits.cu", limits.defines(), capability)
    assert binary.target == f"sm_{capability[0]}{capability[1]}"
    for name in ("nothing", "nothing_programmatic", "exchange", "exchange_programmatic", "copy", "spin"):
        assert name.encode() + b"\0" in binary.image


@with_nvrtc
@ARCHITECTURE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_four_launches_compile(capability: tuple[int, int], dtype: torch.dtype) -> None:
    for n in (2, 8, 16) if capability == (9, 0) else (4,):
        binary = kernels.build("four_launch.cu", four_launch_put.defines(dtype, n), capability)
        assert binary.target == f"sm_{capability[0]}{capability[1]}"
        for name in ("four_count", "four_dispatch", "four_signal", "four_combine"):
            assert name.encode() + b"\0" in binary.image


@with_nvrtc
def test_a_programmatic_kernel_waits_before_it_touches_memory() -> None:
    text = kernels.build("limits.cu", limits.defines(), (19, 9)).image.decode()
    for name in ("nothing", "exchange"):
        (plain,) = re.findall(rf"\.entry {name}\((.*?)\n}}", text, re.DOTALL)
        assert "griddepcontrol" not in plain
        (body,) = re.findall(rf"\.entry {name}_programmatic\((.*?)\n}}", text, re.DOTALL)
        before, wait, behind = body.partition("griddepcontrol.wait")
        assert wait
        assert not re.search(r"\b(ld|st)\.(?!param)", before)
        assert name == "nothing" or "st.relaxed.sys" in behind


@with_nvrtc
def test_a_kernel_file_elsewhere_is_kept_on_disk_too(cache: Path) -> None:
    first, second = (kernels.build("limits.cu", limits.defines(), (9, 0)) for _ in range(2))
    assert (first.cached, second.cached) == (False, True)
    assert len(list((cache / "kernels").iterdir())) == 1


_C_TYPES: dict[str, Any] = {"u64": ctypes.c_uint64, "i64": ctypes.c_int64, "u32": ctypes.c_uint32, "Divisor": Divisor}
STRUCTS = [
    ("limits.cu", limits.ExchangeParams), ("limits.cu", limits.CopyParams), ("limits.cu", limits.SpinParams),
    ("four_launch.cu", four_launch_put.FourLaunchParams),
]  # fmt: skip


@pytest.mark.parametrize(("file", "struct"), STRUCTS, ids=lambda s: getattr(s, "__name__", s))
def test_each_struct_is_mirrored_field_by_field(file: str, struct: Any) -> None:
    text = re.sub(r"//.*", "", (kernels.FOLDER / file).read_text(encoding="utf-8"))
    body = re.search(rf"struct {struct.__name__} \{{(.*?)\}};", text, re.DOTALL)
    assert body is not None
    most = int(re.findall(r"MOST_RANKS = (\d+);", text)[0])
    declared = []
    for kind, field, many in re.findall(r"(\w+) (\w+)(\[MOST_RANKS\])?;", body[1]):
        declared.append((field, ctypes.sizeof(_C_TYPES[kind]) * (most if many else 1)))
    assert declared == [(field[0].rstrip("_"), ctypes.sizeof(field[1])) for field in struct._fields_]
