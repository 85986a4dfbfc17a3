"""Four launches over peers' memory, the put design of public engines; the kernels are in `cuda/four_launch.cu`."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch

from dcpcomm.bench.kernels import KernelFile
from dcpcomm.bench.peers import Peers
from dcpcomm.bench.ranks import Ranks
from dcpcomm.bench.rivals.rival import Rival
from dcpcomm.combine.driver import Launch
from dcpcomm.combine.params import divisor
from dcpcomm.combine.structs import Divisor
from dcpcomm.errors import DCPCommError, ShapeError
from dcpcomm.transport import MergeShape
from dcpcomm.workspace import aligned

__all__ = ["FourLaunchParams", "FourLaunchPut", "Memory", "defines"]

MOST_RANKS = 16
_LINE = 128
_THREADS = 256
_BLOCKS_PER_SM = 16
_WAITING_BLOCKS_PER_SM = 1  # of all ranks that share a GPU: their waits must leave room for what they wait for
_MOST_POLLS = 1 << 24
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_U32, _U64, _I64 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64


class FourLaunchParams(ctypes.Structure):
    """As in cuda/four_launch.cu."""

    _fields_ = [
        ("peers", _U64 * MOST_RANKS),
        *((name, _U64) for name in ("rows", "lse", "out", "state")),
        *((name, _I64) for name in ("slot_stride", "block_stride", "lse_offset", "flags_offset")),
        *((name, _U32) for name in ("rank", "heads", "vectors", "row_count", "vector_count", "base_two")),
        *((name, _U32) for name in ("most_polls", "unused")),
        *((name, Divisor) for name in ("by_heads", "by_slice", "by_vectors")),
    ]


def defines(dtype: torch.dtype, world_size: int) -> dict[str, int]:
    """What four_launch.cu is compiled with."""
    return {
        "KERNEL_DTYPE": _DTYPES[dtype],
        "KERNEL_RANKS": world_size,
        "KERNEL_FOUR_LAUNCH_PARAMS_BYTES": ctypes.sizeof(FourLaunchParams),
    }


class Memory:
    """Where things lie in every rank's memory: two slots of a block for each source, and a flag for each."""

    def __init__(self, shape: MergeShape, world_size: int) -> None:
        rows = shape.rows_per_destination(shape.max_tokens, world_size)
        self.lse_offset = aligned(rows * shape.head_dim * shape.dtype.itemsize)
        self.block_stride = self.lse_offset + aligned(4 * rows)
        self.slot_stride = world_size * self.block_stride
        self.flags_offset = 2 * self.slot_stride
        self.nbytes = self.flags_offset + world_size * _LINE

    def params(
        self, shape: MergeShape, addresses: tuple[int, ...], rank: int, tokens: int, state: int
    ) -> FourLaunchParams:
        """Of a merge of `tokens` rows, but for the addresses of what it merges."""
        heads, vectors = shape.num_heads // len(addresses), shape.head_dim * shape.dtype.itemsize // 16
        rows = tokens * heads
        return FourLaunchParams(
            (_U64 * MOST_RANKS)(*addresses), 0, 0, 0, state,
            self.slot_stride, self.block_stride, self.lse_offset, self.flags_offset,
            rank, heads, vectors, rows, rows * vectors, shape.lse_base == "2", _MOST_POLLS, 0,
            divisor(heads), divisor(heads * vectors), divisor(vectors),
        )  # fmt: skip


class FourLaunchPut(Rival):
    """Count, dispatch, signal, wait and combine.

    Only contiguous inputs of 16-byte rows, and float32 LSEs: the layout that such kernels are written for.
    """

    name: ClassVar[str] = "four_launch_put"
    _peers: Peers | None = None
    _file: KernelFile | None = None

    def __init__(self, ranks: Ranks, shape: MergeShape, device: torch.device) -> None:
        super().__init__(ranks, shape, device)
        if shape.head_dim * shape.dtype.itemsize % 16 or not 2 <= ranks.size <= MOST_RANKS:
            raise ShapeError(
                f"{self.name}: D={shape.head_dim} of {shape.dtype}, N={ranks.size}; expected rows of a multiple of 16 "
                f"bytes, and 2 to {MOST_RANKS} ranks"
            )
        self._made: dict[int, tuple[FourLaunchParams, list[Launch], torch.Tensor]] = {}

    def prepare(self) -> None:
        n, device = self.ranks.size, self.device
        self._memory = Memory(self.shape, n)
        self._peers = self.ranks.share(self._memory.nbytes, device)
        self._file = KernelFile("four_launch.cu", defines(self.shape.dtype, n), device)
        self._state = torch.zeros(2, dtype=torch.int64, device=device)
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        # Every kernel runs once on nothing and nobody: none is then first loaded where another rank waits.
        scratch = torch.zeros(n * _LINE, dtype=torch.uint8, device=device)
        nobody = FourLaunchParams((_U64 * MOST_RANKS)(*[scratch.data_ptr()] * n), state=self._state.data_ptr())
        for launch in self._launches(nobody):
            launch(torch.cuda.current_stream(device).cuda_stream)
        self._state.zero_()
        torch.cuda.current_stream(device).synchronize()
        self.ranks.meet()

    def _launches(self, params: FourLaunchParams) -> list[Launch]:
        assert self._file is not None
        peers = self.ranks.size - 1
        blocks = max(1, -(-params.vector_count // _THREADS))
        across = max(1, min(blocks, _BLOCKS_PER_SM * self._processors // peers))
        shared = self.ranks.on_this_gpu
        waiting = _BLOCKS_PER_SM * self._processors
        if shared > 1:
            waiting = _WAITING_BLOCKS_PER_SM * self._processors // shared
        grids = {
            "four_count": (1, 1, 1, 1),
            "four_dispatch": (across, peers, _THREADS, 1),
            "four_signal": (1, 1, 32, 1),
            "four_combine": (max(1, min(blocks, waiting)), 1, _THREADS, 1),
        }
        return [self._file.bind(name, grid, params) for name, grid in grids.items()]

    def bring(self, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> None:
        tokens = partial_out.shape[0]
        if tokens not in self._made:
            assert self._peers is not None
            addresses, state = self._peers.addresses, self._state.data_ptr()
            params = self._memory.params(self.shape, addresses, self.ranks.rank, tokens, state)
            out = torch.empty(
                (tokens, self.heads, self.shape.head_dim), dtype=self.shape.dtype, device=self.device
            )  # fmt: skip
            self._made[tokens] = params, self._launches(params), out

    def merge(self, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> torch.Tensor:
        params, launches, out = self._made[partial_out.shape[0]]
        params.rows, params.lse, params.out = partial_out.data_ptr(), partial_lse.data_ptr(), out.data_ptr()
        stream = torch.cuda.current_stream(self.device).cuda_stream
        for launch in launches:
            launch(stream)
        return out

    def check(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()
        if int(self._state[1]):
            raise DCPCommError(f"rank {self.ranks.rank}: {self.name}: a peer did not come")

    def close(self) -> None:
        self._made.clear()
        if self._file is not None:
            self._file.close()
        if self._peers is not None:
            self._peers.close()
        self._file, self._peers = None, None
