"""Pack, combine, scale, signals and the fused kernel on a GPU: which variant, which grid, and the launch.

    kernels = Kernels(device, torch.bfloat16, world_size)
    kernels.warm()                                                      # before the first capture
    kernels.pack(stream, pack_params(...)); kernels.combine(stream, combine_params(...))

Results are the canonical ones of cuda/canonical.cuh: the same bits whatever the variant, grid, B or layout.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dcpcomm.combine.driver import Context, Launch, Module
from dcpcomm.combine.nvrtc import Binary, compile_kernels
from dcpcomm.combine.params import WireAt, combine_params, pack_params, pack_unit, vectorised
from dcpcomm.combine.scale import scale_params
from dcpcomm.combine.structs import (
    AwaitParams,
    CombineParams,
    FusedParams,
    MoveParams,
    PackParams,
    ScaleParams,
    struct_sizes,
)
from dcpcomm.combine.wire import KIND_CANCELLED, Header, row_bytes

__all__ = [
    "MOST_TEMPLATED_RANKS",
    "FusedKernels",
    "Kernels",
    "defines_for",
    "fused_threads",
    "tile",
]

MOST_TEMPLATED_RANKS = 16
UNITS = (16, 8, 4, 2)
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_THREADS = 128
_MOST_WIDE = 256
_BLOCKS_PER_SM = 16


def defines_for(name: str, dtype: torch.dtype, world_size: int) -> dict[str, int]:
    """What kernel file `name` is compiled with. 0 ranks: any number, more than the kernels hold in registers."""
    defines = struct_sizes()
    if name == "pack.cu":
        defines["KERNEL_ITEM"] = dtype.itemsize
    if name in ("combine.cu", "scale.cu", "fused.cu"):
        defines["KERNEL_DTYPE"] = _DTYPES[dtype]
        defines["KERNEL_RANKS"] = world_size if world_size <= MOST_TEMPLATED_RANKS else 0
    if name == "fused.cu":
        defines |= dict.fromkeys(("KERNEL_VECTORS", "KERNEL_HEADS", "KERNEL_STRICT", "KERNEL_EARLY"), 0)
    return defines


@functools.lru_cache(maxsize=4096)
def tile(columns: int, rows: int, most_blocks: int) -> tuple[int, int, int, int]:
    """(grid x, grid y, block x, block y) for `rows` of `columns` threads each: a row lies along x, and isn't divided
    unless it is wider than a block. Beyond `most_blocks` the kernel loops over rows.
    """
    across = -(-columns // _MOST_WIDE)
    wide = -(-columns // across)
    tall = max(1, _THREADS // wide)
    down = -(-rows // tall)
    return max(1, min(down, most_blocks // across)), across, wide, tall


def fused_threads(ranks: int, vectors: bool) -> tuple[int, ...]:
    """Threads that a block of the fused kernel may have, by whether it moves 16 bytes at a time: fewer where what waits
    for many ranks takes many registers. Its launch bounds say the same.
    """
    many = (8 if vectors else 4) < ranks <= MOST_TEMPLATED_RANKS
    return (64, 128, 256) if many else (64, 128, 256, 512)


class FusedKernels(NamedTuple):
    """fused.cu, compiled for one geometry; both by whether they move 16 bytes at a time.

    Attributes:
        functions: the kernels.
        resident: blocks that a multiprocessor holds at once, by threads of a block.
    """

    functions: tuple[int, int]
    resident: tuple[dict[int, int], dict[int, int]]


class Kernels:
    """The kernels of one device, dtype and group size, compiled and loaded.

    Args:
        device: a CUDA device.
        dtype: of the partials.
        world_size: N.
        generic: take the kernels for any N also where there is one for this N. The same bits, slower: for tests.

    Attributes:
        fused_source: what `fused` compiles. The benchmark puts another file in its place, to see what a part costs.

    Raises:
        KernelsUnavailable: nothing to compile them with, or no driver.
    """

    fused_source: str | Path = "fused.cu"

    def __init__(self, device: torch.device, dtype: torch.dtype, world_size: int, *, generic: bool = False) -> None:
        self.device, self.dtype, self.world_size = device, dtype, world_size
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._capability = torch.cuda.get_device_capability(device)
        self._most_blocks = self.processors * _BLOCKS_PER_SM
        self._context = Context(device)
        self._loaded: list[tuple[Module, Binary]] = []
        ranks = MOST_TEMPLATED_RANKS + 1 if generic else world_size
        pack = self._load("pack.cu", [f"pack_{unit}" for unit in UNITS], ranks)
        self._pack = {unit: pack[f"pack_{unit}"] for unit in UNITS}
        combine = self._load("combine.cu", ["combine_1", "combine_16"], ranks)
        self._combine = combine["combine_1"], combine["combine_16"]
        scale = self._load("scale.cu", ["scale_1", "scale_16"], ranks) if world_size > 1 else {}
        self._scale = scale.get("scale_1", 0), scale.get("scale_16", 0)
        self._ranks = ranks
        self._signals: dict[str, int] = {}
        self._fused: dict[Any, FusedKernels] = {}
        self._one_at_a_time = threading.Lock()

    def _load(self, file: str | Path, names: list[str], ranks: int, **more: int) -> dict[str, int]:
        defines = defines_for(Path(file).name, self.dtype, ranks) | more
        binary = compile_kernels(file, defines, self._capability)
        module = Module(self._context, binary.image)
        self._loaded.append((module, binary))
        return {name: module.function(name) for name in names}

    def _bind(
        self,
        function: int,
        name: str,
        grid: tuple[int, int, int, int],
        params: ctypes.Structure,
        programmatic: bool = False,
    ) -> Launch:
        return Launch(self._context, function, name, grid, params, programmatic=programmatic)

    def fused(self, vectors: int, heads: int, *, strict: bool = False) -> FusedKernels:
        """For rows of `vectors` 16-byte vectors and results of `heads` heads, compiled and loaded at the first call.

        Raises:
            KernelsUnavailable, DCPCommError: as the constructor.
        """
        key = self.fused_source, vectors, heads, strict
        with self._one_at_a_time:  # ranks that are threads of one process
            if key not in self._fused:
                more = {"KERNEL_VECTORS": vectors, "KERNEL_HEADS": heads, "KERNEL_STRICT": int(strict)}
                found = self._load(self.fused_source, ["fused_1", "fused_16"], self._ranks, **more)
                functions = found["fused_1"], found["fused_16"]
                module = self._loaded[-1][0]
                resident = [
                    {n: module.resident_blocks(one, n) for n in fused_threads(self._ranks, bool(by_16))}
                    for by_16, one in enumerate(functions)
                ]
                self._fused[key] = FusedKernels(functions, (resident[0], resident[1]))
            return self._fused[key]

    @property
    def programmatic(self) -> bool:
        """Whether a launch may overlap the end of the one before it."""
        return self._capability >= (9, 0)

    def bind_fused(
        self, function: int, params: FusedParams, blocks: int, threads: int, *, programmatic: bool
    ) -> Launch:
        """`params` with one of `fused`'s functions."""
        return self._bind(function, "fused", (blocks, 1, threads, 1), params, programmatic)

    @property
    def origin(self) -> str:
        """Where they came from, in words."""
        fresh = sum(not binary.cached for _, binary in self._loaded)
        return f"{self._loaded[0][1].target}, {fresh} of {len(self._loaded)} files compiled now, the rest from disk"

    def load_signals(self) -> None:
        """Have signals.cu compiled and loaded, for what binds its kernels.

        Raises:
            KernelsUnavailable, DCPCommError: as the constructor.
        """
        with self._one_at_a_time:
            if not self._signals:
                self._signals = self._load("signals.cu", ["await_signals", "move_blocks"], self._ranks)

    def bind_await(self, params: AwaitParams) -> Launch:
        """`params` with its kernel: one block, a thread for each rank as far as it has that many."""
        threads = min(_MOST_WIDE, -(-params.ranks // 32) * 32)
        return self._bind(self._signals["await_signals"], "await_signals", (1, 1, threads, 1), params)

    def bind_move(self, params: MoveParams) -> Launch:
        """`params` with its kernel and grid: as many blocks as all peers' vectors fill, but not more than the GPU's."""
        peers = self.world_size - 1
        threads = max(32, min(_MOST_WIDE, -(-params.vectors // 32) * 32))
        across = max(1, min(-(-params.vectors // threads), self._most_blocks // peers))
        return self._bind(self._signals["move_blocks"], "move_blocks", (across, peers, threads, 1), params)

    def bind_pack(self, params: PackParams, unit: int | None = None) -> Launch:
        """`params` with its variant and grid; `unit`: bytes loaded at once, if not as many as can be."""
        unit = pack_unit(params, self.dtype.itemsize) if unit is None else unit
        grid = tile(params.vectors + 1, params.row_count, self._most_blocks)
        return self._bind(self._pack[unit], "pack", grid, params)

    def bind_combine(self, params: CombineParams, vectors: bool | None = None) -> Launch:
        """`params` with its variant and grid; `vectors`: whether by 16 bytes, if not wherever that can be.

        Sets `params.columns`, as the variant counts: bound twice, it serves the later launch.
        """
        vectors = vectorised(params) if vectors is None else vectors
        params.columns = params.width * self.dtype.itemsize // 16 if vectors else params.width
        grid = tile(params.columns, params.row_count, self._most_blocks)
        return self._bind(self._combine[vectors], "combine", grid, params)

    def bind_scale(self, params: ScaleParams, vectors: bool | None = None) -> Launch:
        """`params` with its variant and grid, and `params.columns` and `lanes` as in `bind_combine`. Only for groups of
        two and more.
        """
        vectors = params.rows_unit == 16 if vectors is None else vectors
        params.columns = params.width * self.dtype.itemsize // 16 if vectors else params.width
        params.lanes = -(-params.columns // 2) if vectors else params.columns
        grid = tile(params.lanes, params.row_count, self._most_blocks)
        return self._bind(self._scale[vectors], "scale", grid, params)

    def pack(self, stream: int, params: PackParams) -> None:
        """Headers and rows into blocks, one for each destination; advances the channel's ordinal."""
        self.bind_pack(params)(stream)

    def combine(self, stream: int, params: CombineParams) -> None:
        """The LSE-weighted sum over sources; NaN and a record where a header isn't what it must be."""
        self.bind_combine(params)(stream)

    def scale(self, stream: int, params: ScaleParams) -> None:
        """This rank's rows times their shares, in the order of a reduce-scatter, and its merged LSEs."""
        self.bind_scale(params)(stream)

    def warm(self, stream: int | None = None) -> None:
        """Run every variant once, on scratch memory: none is then first loaded in a capture. Waits for the device."""
        with torch.cuda.device(self.device), torch.inference_mode(False):
            stream = torch.cuda.current_stream().cuda_stream if stream is None else stream
            n, width = self.world_size, 16 // self.dtype.itemsize
            pitch = row_bytes(width, self.dtype.itemsize)
            wire = torch.zeros((n, 2, pitch), dtype=torch.uint8, device=self.device)
            at = WireAt(wire.data_ptr(), 2 * pitch, pitch, 16)
            rows = torch.zeros((n, 1, 1, width), dtype=self.dtype, device=self.device)
            lse = torch.zeros((n, 1, 1), dtype=torch.float32, device=self.device)
            counter = torch.zeros(1, dtype=torch.int64, device=self.device)
            torch.cuda.synchronize()
            ordinal = counter.data_ptr()
            header = Header(0, 0, 1, 0, width)
            for unit in UNITS:
                self.bind_pack(pack_params(at, rows, lse, 0, header, ordinal), unit)(stream)
            self.pack(stream, pack_params(at, rows, lse, 0, Header(0, 0, 1, 0, width, KIND_CANCELLED), ordinal))
            merge = combine_params(rows, lse, rows[0], lse[0], "e", wire=at, header=header, ordinal=ordinal)
            for vectors in (False, True):
                self.bind_combine(merge, vectors)(stream)
            if n > 1:
                scaling = scale_params(rows[0], lse, rows[:1], lse[0], 0, "none", "e")
                for vectors in (False, True):
                    self.bind_scale(scaling, vectors)(stream)
            torch.cuda.synchronize()

    def close(self) -> None:
        """Unload them. Safe twice; no captured launch may be replayed afterwards."""
        for module, _ in self._loaded:
            module.unload()
        self._loaded.clear()
        self._context.release()
