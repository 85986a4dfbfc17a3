"""The mergers behind the adapters: built when a group first brings partials of a kind, and then kept.

Engines hand over a group and tensors with each call and hold nothing. So a merger is found by the group, H, D, dtype,
device, base, and what is scattered.

Building one is collective over its group: every rank must come to it, in the same order as to the others. Ranks that
run the same model do. None is built while a CUDA graph is captured, because building talks to the peers.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch

from dcpcomm import topology
from dcpcomm.adapters.settings import settings, shape_for
from dcpcomm.errors import DCPCommError, ShapeError
from dcpcomm.log import log
from dcpcomm.merger import DCPMerger
from dcpcomm.transport import MergeShape

__all__ = ["MERGERS", "Entry", "Key", "Mergers", "size_of"]


class Key(NamedTuple):
    """What a merger is found by."""

    group: int  # its id: coordinators need not be hashable
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    base_e: bool
    scatter: str
    v_head_dim: int | None = None


class Entry(NamedTuple):
    """What is kept.

    Attributes:
        merger: None for a group of one rank, whose partials are the result.
        channels: how many it has.
        group: held, so that no other object gets its id.
    """

    merger: DCPMerger | None
    channels: int
    group: Any


class Mergers:
    """By `Key`. Used from several threads: an engine's micro-batches, or ranks that are threads."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Any, ...], Entry] = {}
        # One for each group: a lock over all would have ranks that are threads wait for each other's.
        self._locks: dict[int, threading.Lock] = {}
        self._guard = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def merge(
        self,
        group: Any,
        scatter: str,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        base_e: bool,
        return_lse: bool,
        seq_lens: torch.Tensor | None,
        query_start_loc: torch.Tensor | None,
        valid_counts: torch.Tensor | None,
        channel: int,
        tag: int,
        out: torch.Tensor | None,
    ) -> Any:
        """As `DCPMerger.merge`. A group of one rank gets its partials back as they came."""
        shape = partial_out.shape
        if len(shape) != 3:
            partial_out = _without_ones(partial_out, 3)
            shape = partial_out.shape
            if len(shape) != 3:
                raise ShapeError(f"cp_attn_out has shape {list(shape)}; expected [B, H, D], perhaps with an axis of 1")
        if partial_lse.dim() != 2:
            partial_lse = _without_ones(partial_lse, 2)
        # A plain tuple: it is equal to its `Key`, and made in a fraction of the time.
        key = (id(group), shape[1], shape[2], partial_out.dtype, partial_out.device, base_e, scatter, None)
        entry = self._entries.get(key) or self.entry(group, Key(*key))
        merger = entry.merger
        if merger is None:
            if out is not None:
                partial_out = out.copy_(partial_out)
            return (partial_out, partial_lse) if return_lse else partial_out
        if channel >= entry.channels:
            raise _no_channel(merger, channel)
        return merger.merge(
            partial_out,
            partial_lse,
            valid_counts=valid_counts,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            return_lse=return_lse,  # type: ignore[call-overload]
            channel=channel,
            out=out,
            tag=tag,
        )

    def merger(self, group: Any, key: Key, channel: int = 0) -> DCPMerger:
        """The one merger of `key`, built if it isn't there; not for a group of one rank, unless it projects."""
        entry = self._entries.get(key) or self.entry(group, key)
        assert entry.merger is not None
        if channel >= entry.channels:
            raise _no_channel(entry.merger, channel)
        return entry.merger

    def entry(self, group: Any, key: Key) -> Entry:
        """What is kept for `key`, built if it isn't there. Collective over the group then.

        Raises:
            DCPCommError: a CUDA graph is being captured; else as `DCPMerger`.
        """
        with self._guard:
            lock = self._locks.setdefault(key.group, threading.Lock())
        with lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = self._built(group, key)
            return entry

    def put(self, key: Key, entry: Entry) -> None:
        """Keep this one, in the place of any other of `key`."""
        self._entries[key] = entry

    def forget(self, group: Any) -> list[Entry]:
        """Keep none of this group, or of any where it is None; returns what was kept."""
        taken = [(key, entry) for key, entry in list(self._entries.items()) if group is None or entry.group is group]
        return [self._entries.pop(key) for key, _ in taken]

    def check_all(self) -> None:
        """Raise what a merge went wrong with since the last look: `DCPMerger.check` of each."""
        for entry in list(self._entries.values()):
            if entry.merger is not None:
                entry.merger.check()

    def close_all(self, group: Any = None) -> None:
        """Close those of one group, or all. Local, safe twice; graphs that captured their merges are void."""
        for entry in self.forget(group):
            if entry.merger is not None:
                entry.merger.close()

    def live(self) -> list[DCPMerger]:
        """The mergers there are, in the order in which they were built."""
        return [entry.merger for entry in self._entries.values() if entry.merger is not None]

    def _built(self, group: Any, key: Key) -> Entry:
        size = size_of(group)
        if size == 1 and key.v_head_dim is None:
            return Entry(None, 0, group)
        base = "e" if key.base_e else "2"
        shape = shape_for(
            num_heads=key.num_heads,
            head_dim=key.head_dim,
            dtype=key.dtype,
            lse_base=base,
            scatter=key.scatter,
            v_head_dim=key.v_head_dim,
            device=key.device,
        )
        if topology.on_gpu(key.device) and torch.cuda.is_current_stream_capturing():
            raise DCPCommError(_while_capturing(group, shape))
        merger = DCPMerger(group, shape, settings().config, key.device)
        log.info("rank %d of %d: built for %s", merger.group.rank, size, _words(shape))
        return Entry(merger, shape.channels, group)


def size_of(group: Any) -> int:
    """How many ranks a coordinator, a ProcessGroup or a rank of a `LoopbackWorld` has."""
    size = group.world_size if hasattr(group, "world_size") else getattr(group, "size", None)
    size = size() if callable(size) else size
    if not isinstance(size, int):
        raise ShapeError(
            f"cp_group is a {type(group).__name__}; expected an engine's coordinator (rank_in_group, world_size, "
            "device_group) or a torch ProcessGroup"
        )
    return size


def _without_ones(tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """Engines' kernels also return [B, 1, H, D], [B, 1, H] and [B, H, 1]. Another shape stays: the merger tells of it,
    to the peers too.
    """
    if tensor.dim() == dims + 1:
        if dims == 2 and tensor.shape[-1] == 1:
            return tensor.squeeze(-1)
        if tensor.shape[1] == 1:
            return tensor.squeeze(1)
    return tensor


def _words(shape: MergeShape) -> str:
    width = f"D={shape.head_dim}" if shape.v_head_dim is None else f"L={shape.head_dim}, V={shape.v_head_dim}"
    dtype = str(shape.dtype).removeprefix("torch.")
    return f"H={shape.num_heads}, {width}, {dtype}, base {shape.lse_base}, scatter {shape.scatter}"


def _while_capturing(group: Any, shape: MergeShape) -> str:
    rank = getattr(group, "rank_in_group", None)
    who = "" if rank is None else f"rank {rank}: "
    more = "" if shape.v_head_dim is None else f", v_head_dim={shape.v_head_dim}"
    return (
        f"{who}a CUDA graph is being captured, and there is no merger yet for {_words(shape)}; expected one from "
        "before, because building it talks to the peers, which a capture forbids. On all ranks, in the same order and "
        f"before the first capture, call dcpcomm.adapters.warm_up(group, num_heads={shape.num_heads}, "
        f"head_dim={shape.head_dim}, dtype={shape.dtype}, lse_base={shape.lse_base!r}, scatter={shape.scatter!r}"
        f"{more}), or run one step of it eagerly"
    )


def _no_channel(merger: DCPMerger, channel: int) -> ShapeError:
    return ShapeError(
        f"rank {merger.group.rank}: micro-batch {channel}, and the mergers have {merger.shape.channels} channels; "
        f"expected one for each micro-batch in flight: call dcpcomm.adapters.configure(channels={channel + 1}) or set "
        f"DCPCOMM_CHANNELS={channel + 1} on all ranks, before the first merge"
    )


#: Those of this process.
MERGERS = Mergers()
