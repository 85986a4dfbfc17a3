"""Pack and combine on a GPU by the CUDA kernels of `cuda/`: two launches, whatever the strides and counts."""

from __future__ import annotations

import functools
import threading

import torch

from dcpcomm.combine.driver import Launch
from dcpcomm.combine.engine import Layout, PackedCall, Partials
from dcpcomm.combine.gpu import GpuEngine
from dcpcomm.combine.kernels import Kernels
from dcpcomm.combine.nvrtc import KernelsUnavailable
from dcpcomm.combine.params import combine_params, counts_of, pack_params
from dcpcomm.combine.structs import CombineParams, PackParams
from dcpcomm.combine.wire import Header, WireViews
from dcpcomm.log import log
from dcpcomm.transport import MergeShape

__all__ = ["WORDS", "CudaEngine", "kernels_for"]

WORDS = "CUDA kernels"
_BINDINGS_KEPT = 64
_one_at_a_time = threading.Lock()


def kernels_for(device: torch.device, dtype: torch.dtype, world_size: int) -> Kernels | None:
    """The kernels, compiled, loaded and run once; kept for good: captured graphs launch them. None, and said loudly
    once, where they can't be compiled.
    """
    with _one_at_a_time:  # ranks that are threads of one process
        return _kernels_for(device, dtype, world_size)


@functools.cache
def _kernels_for(device: torch.device, dtype: torch.dtype, world_size: int) -> Kernels | None:
    try:
        kernels = Kernels(device, dtype, world_size)
    except KernelsUnavailable as error:
        log.error("merges on %s are combined by torch operations, many times slower: %s", device, error)
        return None
    kernels.warm()
    return kernels


class CudaEngine(GpuEngine):
    """The canonical arithmetic of cuda/canonical.cuh, bit-equal whatever the transport."""

    reads_counts = True

    def __init__(self, shape: MergeShape, rank: int, world_size: int, kernels: Kernels) -> None:
        super().__init__(shape, rank, world_size, kernels.device)
        self.kernels = kernels

    @property
    def words(self) -> str:
        return f"{WORDS} ({self.kernels.origin})"

    def packed_call(self, channel: int, layout: Layout, send: WireViews, recv: WireViews) -> PackedCall:
        return _CudaCall(self, channel, layout, send, recv)

    def combine(self, rows: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, out_lse: torch.Tensor | None) -> None:
        self.kernels.combine(self.stream(), combine_params(rows, lses, out, out_lse, self.shape.lse_base))


class _CudaCall(PackedCall):
    """Parameters filled in once for each alignment of what the caller brings; then only addresses change."""

    def __init__(self, engine: CudaEngine, channel: int, layout: Layout, send: WireViews, recv: WireViews) -> None:
        assert engine.ordinals is not None
        self._engine, self._send, self._recv = engine, send, recv
        shape, n = engine.shape, engine.world_size
        rows, lse = layout.strides(shape, n)
        size, lse_size = shape.dtype.itemsize, layout.lse_dtype.itemsize
        self._row_bytes, self._lse_bytes = rows[1] * size, lse[1] * lse_size  # from one t to the next
        self._own_bytes = rows[0] * size * engine.rank
        self._token_n = layout.tokens // n if shape.scatter == "tokens" else 0
        self._ordinal = engine.ordinals[channel].data_ptr()
        self._record = engine.records.memory[channel].data_ptr()
        self._progress = engine.records.progress[channel].data_ptr()
        self._packs: dict[tuple[int, int], tuple[Launch, PackParams]] = {}
        self._combines: dict[tuple[int, ...], tuple[Launch, CombineParams]] = {}

    def call_off(self, header: Header) -> None:
        n = self._engine.world_size
        nothing, no_lse = torch.empty((n, 0, 0, 0), dtype=self._engine.shape.dtype), torch.empty((n, 0, 0))
        # Not counted as begun: nothing of it will end.
        params = pack_params(self._send, nothing, no_lse, self._engine.rank, header, self._ordinal)
        self._engine.kernels.pack(self._engine.stream(), params)

    def pack(self, partials: Partials, start: int, header: Header) -> None:
        rows = partials.out.data_ptr() + start * self._row_bytes
        lse = partials.lse.data_ptr() + start * self._lse_bytes
        key = rows & 15, lse & 3
        found = self._packs.get(key)
        if found is None:
            out_part, lse_part = self._part(partials, start)
            params = pack_params(
                self._send, out_part, lse_part, self._engine.rank, header, self._ordinal, progress=self._progress
            )
            found = self._packs[key] = self._engine.kernels.bind_pack(params), params
        launch, params = found
        params.rows, params.lse = rows, lse
        _, params.word1, params.word2, params.kind = header.words()
        if partials.counts is not None or params.counts.mode:
            params.counts = counts_of(partials.counts, start, self._token_n)
        launch(self._engine.stream())

    def combine(
        self, partials: Partials, start: int, header: Header, out: torch.Tensor, out_lse: torch.Tensor | None
    ) -> bool:
        rows, to = partials.out.data_ptr() + start * self._row_bytes, out.data_ptr()
        key = rows & 15, to & 15, *out.stride()
        found = self._combines.get(key)
        if found is None:
            if len(self._combines) >= _BINDINGS_KEPT:
                self._combines.clear()
            found = self._combines[key] = self._bind_combine(partials, start, header, out)
        launch, params = found
        params.own_rows, params.out = rows + self._own_bytes, to
        params.out_lse = 0 if out_lse is None else out_lse.data_ptr()
        _, params.word1, params.word2, params.word3 = header.words()
        launch(self._engine.stream())
        return True

    def _bind_combine(
        self, partials: Partials, start: int, header: Header, out: torch.Tensor
    ) -> tuple[Launch, CombineParams]:
        rank, engine = self._engine.rank, self._engine
        params = combine_params(
            self._recv.payload,
            self._recv.lse,
            out,
            None,
            engine.shape.lse_base,
            own=rank,
            own_rows=self._part(partials, start)[0][rank],
            own_lse=self._send.lse[rank],  # pack has put it there, counts looked at
            wire=self._recv,
            header=header,
            ordinal=self._ordinal,
            record=self._record,
            progress=self._progress,
        )
        return engine.kernels.bind_combine(params), params

    def _part(self, partials: Partials, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        t = self._send.payload.shape[1]
        return partials.part(self._engine.shape.scatter, self._engine.world_size, start, t)
