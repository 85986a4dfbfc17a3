"""dcpcomm's CUDA kernels on a CPU, behind the interface of `Kernels`: the same source text, compiled by g++ with
tests/emulation.h.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from dcpcomm.combine.kernels import MOST_TEMPLATED_RANKS, UNITS, Kernels, defines_for
from dcpcomm.combine.nvrtc import sources_of

COMPILER = shutil.which("g++")
_HEADER = Path(__file__).with_name("emulation.h")
#: Defined in emulation.h, because the kernels say them in PTX.
_IN_PTX = (
    "load_acquire", "load_relaxed", "store_release", "store_relaxed", "nanoseconds", "from_float16", "to_bfloat16",
    "to_float16",
)  # fmt: skip
_LOAD_IF = "    if (wanted) v = load_vector(at);\n"
_ENTRIES = {
    "pack.cu": ([f"pack_{unit}" for unit in UNITS], "PackParams"),
    "combine.cu": (["combine_1", "combine_16"], "CombineParams"),
    "scale.cu": (["scale_1", "scale_16"], "ScaleParams"),
    "put.cu": (["put"], "PutParams"),
}


def host_source(name: str | Path, entries: list[tuple[str, str]] | None = None) -> str:
    """Kernel file `name` and what it includes, as one text that g++ takes.

    Args:
        entries: its kernels, each with the struct that it takes; those of _ENTRIES by default.
    """
    sources = sources_of(name)
    name = Path(name).name

    def inline(text: str) -> str:
        return re.sub(r'#include "([\w.]+)"\n', lambda found: inline(sources.pop(found[1], "")), text)

    text = inline(sources.pop(name)).replace("#pragma once\n", "").replace("#pragma unroll\n", "")
    for function in _IN_PTX:
        text = re.sub(rf"__device__ __forceinline__ \w+ {function}\([^{{]*{{.*?\n}}\n", "", text, flags=re.DOTALL)
    text = re.sub(r"    asm volatile\(.*?\"memory\"\);\n", _LOAD_IF, text, flags=re.DOTALL)
    assert "asm" not in text
    if entries is None:
        names, struct = _ENTRIES[name]
        entries = [(one, struct) for one in names] + ([("take", "TakeParams")] if name == "put.cu" else [])
    for one, params in entries:
        text += (
            f'extern "C" void run_{one}(const void *p, unsigned gx, unsigned gy, unsigned bx, unsigned by) {{\n'
            f"    run_grid([](const void *at) {{ {one}(*(const {params} *)at); }}, p, gx, gy, bx, by);\n}}\n"
        )
    return f'#include "{_HEADER}"\n{text}'


def compile_for_host(text: str, defines: dict[str, int], file: Path) -> None:
    """What `host_source` gave, as shared library `file`."""
    assert COMPILER is not None
    source = file.with_suffix(".cpp")
    source.write_text(text, encoding="utf-8")
    macros = [f"-D{key}={value}" for key, value in defines.items()]
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC"]
    made = subprocess.run(
        [COMPILER, *flags, *macros, "-o", str(file), str(source)], capture_output=True, text=True, timeout=100
    )
    assert made.returncode == 0, made.stderr[:4000]


class EmulatedKernels(Kernels):
    """`Kernels` whose launches run at once, on CPU tensors.

    Args:
        folder: keeps what was compiled.
        files: which to compile, where a test launches few of them.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        world_size: int,
        folder: Path,
        *,
        generic: bool = False,
        files: tuple[str, ...] = tuple(_ENTRIES),
    ) -> None:
        self.device, self.dtype, self.world_size = torch.device("cpu"), dtype, world_size
        self._processors, self._most_blocks, self._folder = 4, 16, folder
        ranks = MOST_TEMPLATED_RANKS + 1 if generic else world_size
        libraries = {name: self._library(name, ranks) for name in files}
        entries = [(file, name) for file, (names, _) in _ENTRIES.items() for name in names] + [("put.cu", "take")]
        self._functions: list[Any] = [
            libraries[file][f"run_{name}"] if file in libraries else None for file, name in entries
        ]
        self._pack = {unit: index for index, unit in enumerate(UNITS)}
        self._combine, self._scale = (4, 5), (6, 7)
        self._put, self._take = 8, 9

    def _library(self, name: str, ranks: int) -> ctypes.CDLL:
        defines = defines_for(name, self.dtype, ranks)
        mine = "-".join(str(value) for key, value in defines.items() if not key.endswith("_BYTES"))
        file = self._folder / f"{name}-{mine}.so"
        if not file.exists():
            compile_for_host(host_source(name), defines, file)
        return ctypes.CDLL(str(file))

    def _bind(self, function: int, name: str, grid: tuple[int, int, int, int], params: ctypes.Structure) -> Any:
        def launch(stream: int) -> None:
            self._functions[function](ctypes.byref(params), *grid)

        return launch

    def close(self) -> None:
        pass
