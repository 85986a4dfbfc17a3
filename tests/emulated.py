"""dcpcomm's CUDA kernels on a CPU, behind the interface of `Kernels`: the same source text, compiled by g++ with
tests/emulation.h.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import threading
import zlib
from pathlib import Path
from typing import Any

import torch

from dcpcomm.combine.kernels import MOST_TEMPLATED_RANKS, UNITS, FusedKernels, Kernels, defines_for
from dcpcomm.combine.nvrtc import sources_of

COMPILER = shutil.which("g++")
_HEADER = Path(__file__).with_name("emulation.h")
#: Defined in emulation.h, because the kernels say them in PTX.
_IN_PTX = (
    "load_acquire", "load_relaxed", "store_release", "store_relaxed", "nanoseconds", "from_float16", "to_bfloat16",
    "to_float16", "load_relaxed_u32", "load_words", "store_words", "pause", "wait_for_grid_before",
    "let_next_grid_begin",
)  # fmt: skip
_BEHIND = """
static inline Vector load_words(u64 at) {
    stir();
    Vector v;
    for (int i = 0; i < 4; i++) v.word[i] = ((volatile u32 *)at)[i];
    return v;
}
static inline void store_words(u64 at, const Vector &v) {
    stir();
    for (int i = 0; i < 4; i++) store_late(at + 4 * i, v.word[i], 4);
}
"""
_LOAD_IF = "    if (wanted) v = load_vector(at);\n"
_ENTRIES = {
    "pack.cu": ([f"pack_{unit}" for unit in UNITS], "PackParams"),
    "combine.cu": (["combine_1", "combine_16"], "CombineParams"),
    "scale.cu": (["scale_1", "scale_16"], "ScaleParams"),
    "fused.cu": (["fused_16", "fused_1"], "FusedParams"),
    "signals.cu": (["await_signals", "move_blocks"], ""),
}
_STRUCTS = {"await_signals": "AwaitParams", "move_blocks": "MoveParams"}
#: Whose blocks wait for other ranks', and so must all be there at once.
_TOGETHER = ("fused.cu", "signals.cu")
_AT_ONCE = tuple(name for name in _ENTRIES if name not in _TOGETHER)


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
        text = re.sub(
            rf"__device__ __forceinline__ \w+ {function}\([^{{]*{{.*?(?:\n}}|; }})\n", "", text, flags=re.DOTALL
        )
    text = re.sub(r"    asm volatile\(.*?\"memory\"\);\n", _LOAD_IF, text, flags=re.DOTALL)
    assert "asm" not in text
    if entries is None:
        names, struct = _ENTRIES[name]
        entries = [(one, struct or _STRUCTS[one]) for one in names]
    text += _BEHIND
    how = f"gx, gy, bx, by, {str(name in _TOGETHER).lower()}"
    for one, params in entries:
        text += (
            f'extern "C" void run_{one}(const void *p, unsigned gx, unsigned gy, unsigned bx, unsigned by) {{\n'
            f"    run_grid([](const void *at) {{ {one}(*(const {params} *)at); }}, p, {how});\n}}\n"
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
        files: which to compile at once, where a test launches few of them; fused.cu is when it is asked for.
        geometry: compile fused.cu for each geometry, as on a GPU, and not for all.
        planted: a text of fused.cu or signals.cu and what to put in its place: a mistake that a check must find.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        world_size: int,
        folder: Path,
        *,
        generic: bool = False,
        files: tuple[str, ...] = _AT_ONCE,
        geometry: bool = False,
        planted: tuple[str, str] | None = None,
    ) -> None:
        self.device, self.dtype, self.world_size = torch.device("cpu"), dtype, world_size
        self.processors, self._most_blocks, self._folder = 4, 16, folder
        self._ranks = ranks = MOST_TEMPLATED_RANKS + 1 if generic else world_size
        self.geometry, self._planted = geometry, planted
        self._fused: dict[Any, FusedKernels] = {}
        self._signals: dict[str, int] = {}
        self._one_at_a_time = threading.Lock()
        libraries = {name: self._library(name, ranks) for name in files}
        entries = [(file, name) for file in _AT_ONCE for name in _ENTRIES[file][0]]
        self._functions: list[Any] = [
            libraries[file][f"run_{name}"] if file in libraries else None for file, name in entries
        ]
        self._pack = {unit: index for index, unit in enumerate(UNITS)}
        self._combine, self._scale = (4, 5), (6, 7)

    def _library(self, name: str, ranks: int, **more: int) -> ctypes.CDLL:
        defines = defines_for(name, self.dtype, ranks) | more
        mine = "-".join(str(value) for key, value in defines.items() if not key.endswith("_BYTES"))
        text = host_source(self.fused_source if name == "fused.cu" else name)
        if self._planted is not None and name in _TOGETHER:
            assert text.count(self._planted[0]) == 1, f"{self._planted[0]} isn't once in {name}"
            text = text.replace(*self._planted)
        file = self._folder / f"{name}-{mine}-{zlib.crc32(text.encode()):x}.so"
        if not file.exists():
            compile_for_host(text, defines, file)
        return ctypes.CDLL(str(file))

    def fused(self, vectors: int, heads: int, *, strict: bool = False) -> FusedKernels:
        """In blocks of few threads, of which all must be there at once."""
        more = {"KERNEL_STRICT": int(strict)}
        if self.geometry:
            more |= {"KERNEL_VECTORS": vectors, "KERNEL_HEADS": heads}
        key = self.fused_source, vectors, heads, strict
        with self._one_at_a_time:
            if key not in self._fused:
                library = self._library("fused.cu", self._ranks, **more)
                self._functions += [library["run_fused_1"], library["run_fused_16"]]
                last = len(self._functions) - 1
                self._fused[key] = FusedKernels((last - 1, last), ({64: 8}, {64: 8}))
            return self._fused[key]

    def load_signals(self) -> None:
        with self._one_at_a_time:
            if not self._signals:
                library = self._library("signals.cu", self._ranks)
                for name in _ENTRIES["signals.cu"][0]:
                    self._signals[name] = len(self._functions)
                    self._functions.append(library[f"run_{name}"])

    @property
    def programmatic(self) -> bool:
        return False

    @property
    def origin(self) -> str:
        return "compiled for the CPU"

    def _bind(
        self, function: int, name: str, grid: tuple[int, int, int, int], params: ctypes.Structure, *_: bool
    ) -> Any:
        def launch(stream: int) -> None:
            self._functions[function](ctypes.byref(params), *grid)

        return launch

    def close(self) -> None:
        pass
