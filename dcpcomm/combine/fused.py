"""A whole merge of a peer-memory transport in one launch of `cuda/fused.cu`; docs/fused-kernel.md has the protocol.

Epochs, slots and what was given up are kept in device memory, so that replays of a captured graph and eager calls mix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dcpcomm import topology
from dcpcomm.combine.absences import Absences, deadline_of
from dcpcomm.combine.driver import Launch
from dcpcomm.combine.engine import Layout, Partials
from dcpcomm.combine.gpu import GpuEngine
from dcpcomm.combine.kernels import MOST_TEMPLATED_RANKS, FusedKernels, Kernels
from dcpcomm.combine.params import MOST_ROWS, counts_of, divisor, lse_kind, row_unit, strides_of
from dcpcomm.combine.structs import FusedParams
from dcpcomm.combine.wire import KIND_CANCELLED, Header, payload_bytes
from dcpcomm.errors import ShapeError, TransportUnavailable
from dcpcomm.group import Group
from dcpcomm.transport import MergeShape, PeerBuffers
from dcpcomm.workspace import aligned

if TYPE_CHECKING:
    from dcpcomm.combine.peer_options import PeerOptions

__all__ = ["MOST_BLOCKS", "FusedCall", "FusedPeer", "Places", "fused_bytes", "grid_of", "places_of"]

MOST_BLOCKS = 2048  # of any launch: each has an epoch of its own
_SLOTS = 2
_HEADER_BYTES = 128
_HEADER_THREADS = 32  # of each block, which have no rows
_LAUNCHES_KEPT = 64
_SENTINEL = 0xFF  # in every byte of a payload that nobody has sent


class Places(NamedTuple):
    """Where things lie in one channel's memory on one rank, in bytes; see FusedParams in cuda/params.cuh.

    Attributes:
        shared: bytes that peers write to.
        epochs, table: behind those, of this rank alone.
        total: bytes of the channel.
    """

    source_stride: int
    lse_offset: int
    lse_stride: int
    header_offset: int
    slot_stride: int
    poison_offset: int
    shared: int
    epochs: int
    table: int
    total: int


def places_of(shape: MergeShape, world_size: int) -> Places:
    """The layout of every channel of `shape`."""
    rows = shape.rows_per_destination(shape.tokens_per_exchange(world_size), world_size)
    source = aligned(rows * max(payload_bytes(width, shape.dtype.itemsize) for width in shape.widths))
    lse = aligned(8 * rows)
    lse_offset = world_size * source
    header_offset = lse_offset + world_size * lse
    slot = header_offset + world_size * _HEADER_BYTES
    poison = _SLOTS * slot
    shared = poison + aligned(8 * world_size)
    table = shared + aligned(4 * MOST_BLOCKS)
    total = table + aligned(8 * world_size)
    return Places(source, lse_offset, lse, header_offset, slot, poison, shared, shared, table, total)


def fused_bytes(shape: MergeShape, world_size: int) -> int:
    """Bytes that each rank offers to its peers."""
    return shape.channels * places_of(shape, world_size).total


def grid_of(vectors: int, resident: dict[int, int], sms: int, sharing: int, options: PeerOptions) -> tuple[int, int]:
    """Blocks and threads of a launch that merges `vectors` vectors.

    Args:
        resident: blocks that a multiprocessor holds at once, by threads of a block.
        sms, sharing: how many such launches must fit at once into how many multiprocessors.
    """
    threads: int | None = options.threads
    if threads is None:
        # Small ones spread over the GPU, one vector a thread; large ones have few blocks to start and to loop.
        threads = 128 if vectors <= 64 << 10 else 256 if vectors <= 256 << 10 else 512
    threads = min(threads, max(resident))
    most = max(1, min(MOST_BLOCKS, resident[threads] * sms // sharing))
    if options.blocks is not None:
        most = min(most, options.blocks)
    workers = threads - _HEADER_THREADS
    return max(1, min(most, -(-vectors // (workers * (options.vectors_per_thread or 1))))), threads


class FusedPeer:
    """Merges over one peer-memory transport.

    Raises:
        KernelsUnavailable, DCPCommError: the kernel can't be compiled here.
        TransportUnavailable: what may wait at once doesn't fit on the GPU.
    """

    def __init__(
        self, group: Group, shape: MergeShape, buffers: PeerBuffers, kernels: Kernels, options: PeerOptions
    ) -> None:
        self.group, self.shape, self.kernels, self.options = group, shape, kernels, options
        self.places = places_of(shape, group.size)
        self.device = buffers.own.device
        self._absences = Absences(group, shape.channels)
        #: Raise what the kernel has noted on a channel of ranks that did not come; no wait for the device.
        self.poll = self._absences.check
        self.state = self._absences.state
        self.take_deadline()
        self._buffers = buffers  # kept: nobody else may
        # Half of the GPU is left to other mergers, whose kernels may wait at the same time.
        half = max(1, kernels.processors // 2)
        self.sms = half if group.max_sms is None else min(group.max_sms, kernels.processors)
        self.sharing = buffers.sharing * shape.channels
        #: By width, all of which are known beforehand: nothing is compiled later.
        self.kernels_for = {width: self._compiled(width) for width in shape.widths}
        fewest = min(one[64] for found in self.kernels_for.values() for one in found.resident) * self.sms
        if fewest < self.sharing:
            raise TransportUnavailable(
                f"{self.sharing} launches ({shape.channels} channels, {buffers.sharing} ranks on this GPU) may wait at "
                f"once, and {fewest} blocks fit on {self.sms} multiprocessors; expected fewer channels, or more max_sms"
            )
        with torch.inference_mode(False):
            for channel in range(shape.channels):
                self._prepare(channel)
        # All of it is there before a peer or a kernel looks.
        torch.cuda.current_stream(self.device).synchronize()

    def _prepare(self, channel: int) -> None:
        places, n = self.places, self.group.size
        begin = channel * places.total
        own = self._buffers.own[begin : begin + places.total]
        own.zero_()
        for slot in range(_SLOTS):
            own[slot * places.slot_stride :][: places.lse_offset].fill_(_SENTINEL)
        table = torch.tensor(self.addresses(channel), dtype=torch.int64).view(torch.uint8)
        own[places.table : places.table + 8 * n].copy_(table)

    def addresses(self, channel: int) -> list[int]:
        """Where the channel's memory begins on each rank, as this rank addresses it."""
        return [begin + channel * self.places.total for begin in self._buffers.addresses]

    def absence_record(self, channel: int) -> int:
        """The address of what the kernel writes where a rank doesn't come."""
        return self._absences.address(channel)

    def _compiled(self, width: int) -> FusedKernels:
        heads = self.shape.result_rows(self.group.size, self.group.size)[1]
        vectors = payload_bytes(width, self.shape.dtype.itemsize) // 16
        return self.kernels.fused(vectors, heads, strict=self.options.strict)

    def call(self, engine: GpuEngine | None, channel: int, layout: Layout) -> FusedCall:
        """What merges calls of this layout.

        Args:
            engine: whose counts and records of the channel it keeps up; None: nobody's, as while it is proven.
        """
        return FusedCall(self, engine, channel, layout)

    def merge_once(self, out: torch.Tensor, lse: torch.Tensor, channel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B, H, D]` and `[B, H]`, at most a chunk, merged on the current stream: for a proof of the transport."""
        tokens, _, width = out.shape
        t, h = self.shape.result_rows(tokens, self.group.size)
        layout = Layout(tokens, t, width, out.stride(), lse.stride(), lse.dtype)
        merged = torch.empty((t, h, width), dtype=out.dtype, device=out.device)
        merged_lse = torch.empty((t, h), dtype=torch.float32, device=out.device)
        header = Header(0, 0, tokens, 0, width)
        self.call(None, channel, layout).merge(Partials(out, lse, None), 0, header, merged, merged_lse)
        return merged, merged_lse

    def take_deadline(self) -> int:
        """Of a call that begins now, in the kernel's unit; 0: it waits on. `deadline` is that of `limit` seconds."""
        self.limit = self.group.exchange_timeout_s
        self.deadline = deadline_of(self.limit)
        return self.deadline

    @property
    def given_up(self) -> bool:
        """Whether a call did not end in time: a peer may still store to this rank's memory."""
        return self._absences.any


class FusedCall:
    """One layout's merges: parameters filled in once for each alignment of what the caller brings."""

    def __init__(self, peer: FusedPeer, engine: GpuEngine | None, channel: int, layout: Layout) -> None:
        self._peer, self._channel, self._layout = peer, channel, layout
        shape, n = peer.shape, peer.group.size
        size, lse_size = shape.dtype.itemsize, layout.lse_dtype.itemsize
        rows, lse = layout.strides(shape, n)
        self._row_bytes, self._lse_bytes = rows[1] * size, lse[1] * lse_size  # from one t to the next
        self.token_n = layout.tokens // n if shape.scatter == "tokens" else 0
        self._ordinal = self._progress = self._headers = 0
        if engine is not None:
            assert engine.ordinals is not None
            self._ordinal = engine.ordinals[channel].data_ptr()
            self._progress = engine.records.progress[channel].data_ptr()
            self._headers = engine.records.memory[channel].data_ptr()
        self._engine = engine
        self._launches: dict[Any, tuple[Launch, FusedParams]] = {}

    def merge(
        self, partials: Partials, start: int, header: Header, out: torch.Tensor, out_lse: torch.Tensor | None
    ) -> None:
        """Merge rows `start` to `start` + t of the result into `out [t, h, D]` (any strides) and `out_lse [t, h]`
        (contiguous), on the current stream.
        """
        rows = partials.out.data_ptr() + start * self._row_bytes
        lse = partials.lse.data_ptr() + start * self._lse_bytes
        to = out.data_ptr()
        key = rows & 15, lse & 3, to & 15, out.stride()
        found = self._launches.get(key)
        if found is None:
            if len(self._launches) >= _LAUNCHES_KEPT:
                self._launches.clear()
            found = self._launches[key] = self.bind(partials, start, out)
        launch, params = found
        params.rows, params.lse, params.out = rows, lse, to
        params.out_lse = 0 if out_lse is None else out_lse.data_ptr()
        params.tag, params.chunk = header.tag & 0xFFFFFFFF, header.chunk
        params.deadline = self.deadline()
        if partials.counts is not None or params.counts.mode:
            params.counts = counts_of(partials.counts, start, self.token_n)
        launch(self.stream())

    def call_off(self, header: Header) -> None:
        """Tell the peers that this rank has no rows in this call, and take theirs."""
        n, shape = self._peer.group.size, self._peer.shape
        t, h = self._layout.t, shape.result_rows(n, n)[1]
        params = self._params(h, t * h)
        params.kind = KIND_CANCELLED
        params.chunk, params.deadline = header.chunk, self._peer.take_deadline()
        self._launch(params, aligned_rows=True)(self.stream())

    def stream(self) -> int:
        """The current one; an engine waits for it before memory is given back."""
        return topology.current_stream(self._peer.device) if self._engine is None else self._engine.stream()

    def deadline(self) -> int:
        """Of a call that begins now, as the kernel takes it."""
        peer = self._peer
        return peer.deadline if peer.group.exchange_timeout_s == peer.limit else peer.take_deadline()

    def bind(self, partials: Partials, start: int, out: torch.Tensor) -> tuple[Launch, FusedParams]:
        """A launch for what lies and is aligned like this, and its parameters, of which a call sets addresses, tag,
        chunk, counts and deadline.
        """
        shape, n = self._peer.shape, self._peer.group.size
        size, width = shape.dtype.itemsize, self._layout.width
        t, h = out.shape[:2]
        rows, lse = partials.part(shape.scatter, n, start, t)
        params = self._params(h, t * h)
        rows_n, rows_t, rows_h, params.rows_d = strides_of(rows, size)
        params.rows_n, params.rows_t, params.rows_h = rows_n, rows_t, rows_h
        lse_n, lse_t, lse_h, _ = strides_of(lse, lse.element_size())
        params.lse_n, params.lse_t, params.lse_h = lse_n, lse_t, lse_h
        out_t, out_h, params.out_d, _ = strides_of(out, size)
        params.out_t, params.out_h = out_t, out_h
        params.lse_kind = lse_kind(lse, lse.data_ptr(), lse_n | lse_t | lse_h)
        params.rows_unit = row_unit(rows.data_ptr() | rows_n | rows_t | rows_h, params.rows_d, width, size)
        params.out_unit = row_unit(out.data_ptr() | out_t | out_h, params.out_d, width, size)
        return self._launch(params, aligned_rows=params.rows_unit == params.out_unit == 16), params

    def _params(self, heads: int, row_count: int) -> FusedParams:
        """All that doesn't depend on what the caller brings."""
        peer, places, layout = self._peer, self._peer.places, self._layout
        n, channel, row_bytes = peer.group.size, self._channel, layout.width * peer.shape.dtype.itemsize
        vectors = payload_bytes(layout.width, peer.shape.dtype.itemsize) // 16
        if row_count * vectors > MOST_ROWS:
            raise ShapeError(f"{row_count * vectors} vectors of 16 bytes in one exchange; expected at most {MOST_ROWS}")
        addresses = peer.addresses(channel)
        own = addresses[peer.group.rank]
        params = FusedParams(
            tokens=layout.tokens, width=layout.width,
            slot_stride=places.slot_stride, source_stride=places.source_stride, lse_offset=places.lse_offset,
            lse_stride=places.lse_stride, header_offset=places.header_offset, poison_offset=places.poison_offset,
            epochs=own + places.epochs, table=own + places.table, ordinal=self._ordinal, progress=self._progress,
            headers=self._headers, record=peer.absence_record(channel), ranks=n, rank=peer.group.rank, heads=heads,
            vectors=vectors, row_bytes=row_bytes, row_count=row_count, base_two=peer.shape.lse_base == "2",
            most_blocks=MOST_BLOCKS, by_vectors=divisor(vectors), by_heads=divisor(heads or 1),
        )  # fmt: skip
        if n <= MOST_TEMPLATED_RANKS:
            params.peer[:n] = addresses
        return params

    def _launch(self, params: FusedParams, *, aligned_rows: bool) -> Launch:
        peer = self._peer
        kernels, options = peer.kernels_for[self._layout.width], peer.options
        resident = kernels.resident[aligned_rows]
        blocks, threads = grid_of(params.row_count * params.vectors, resident, peer.sms, peer.sharing, options)
        return peer.kernels.bind_fused(
            kernels.functions[aligned_rows], params, blocks, threads,
            programmatic=options.programmatic and peer.kernels.programmatic,
        )  # fmt: skip
