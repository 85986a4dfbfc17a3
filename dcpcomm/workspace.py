"""How much memory a merger takes, region by region, before anything exists. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dcpcomm.combine.wire import block_bytes
from dcpcomm.errors import ShapeError
from dcpcomm.transport import MergeShape
from dcpcomm.trtllm_workspace import (
    trtllm_sparse_mla_bytes,
    trtllm_sparse_mla_max_tokens,
    trtllm_sparse_mla_parts,
)

__all__ = [
    "ALIGNMENT",
    "Region",
    "Workspace",
    "WorkspacePlan",
    "aligned",
    "block_capacity",
    "counter_bytes",
    "plan",
    "plan_bytes",
    "trtllm_sparse_mla_bytes",
    "trtllm_sparse_mla_max_tokens",
    "trtllm_sparse_mla_parts",
]

ALIGNMENT = 128  # a cache line pair on the GPU: no region shares a line with another


@dataclass(frozen=True)
class Region:
    """`nbytes` bytes at `offset` of a workspace; both multiples of 128."""

    name: str
    offset: int
    nbytes: int

    def of(self, workspace: torch.Tensor) -> torch.Tensor:
        return workspace[self.offset : self.offset + self.nbytes]


@dataclass(frozen=True)
class WorkspacePlan:
    """Where each buffer of one rank lies in its single allocation of `total` bytes."""

    regions: list[Region]
    total: int

    def region(self, name: str) -> Region:
        return next(region for region in self.regions if region.name == name)


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of 128."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def block_capacity(shape: MergeShape, world_size: int) -> int:
    """Bytes of the largest block that one rank may send to one other, rounded up to 128."""
    rows = shape.rows_per_destination(shape.tokens_per_exchange(world_size), world_size)
    return aligned(max(block_bytes(rows, width, shape.dtype.itemsize) for width in shape.widths))


def wire_bytes(shape: MergeShape, world_size: int, tokens: int, width: int) -> int:
    """Bytes that one rank sends to its peers in a merge of `tokens` rows of `width` columns, all chunks together."""
    most = shape.tokens_per_exchange(world_size)
    chunks = [most] * (tokens // most) + ([tokens % most] if tokens % most else [])
    rows = (shape.rows_per_destination(chunk, world_size) for chunk in chunks)
    return (world_size - 1) * sum(block_bytes(count, width, shape.dtype.itemsize) for count in rows)


def plan(shape: MergeShape, world_size: int) -> WorkspacePlan:
    """The framework's own buffers on each rank: per channel, N blocks to send and N blocks to receive.

    Raises:
        ShapeError: the heads don't divide over `world_size` ranks.
    """
    shape.check_world_size(world_size)
    regions: list[Region] = []
    offset = 0
    if world_size > 1:
        nbytes = world_size * block_capacity(shape, world_size)
        for channel in range(shape.channels):
            for what in ("send", "recv"):
                regions.append(Region(f"{what}[{channel}]", offset, nbytes))
                offset += nbytes
    return WorkspacePlan(regions, offset)


class Workspace:
    """The framework's own device memory of one merger: nothing until a transport needs it, then one allocation."""

    def __init__(self, shape: MergeShape, world_size: int, device: torch.device) -> None:
        self.plan = plan(shape, world_size)
        self.memory: torch.Tensor | None = None
        self.device = device

    def regions(self) -> dict[str, torch.Tensor]:
        """uint8 by name: "send[0]", "recv[0]", ..., a pair for each channel."""
        if self.memory is None:
            with torch.inference_mode(False):  # an inference tensor could not be written outside of inference mode
                self.memory = torch.empty(self.plan.total, dtype=torch.uint8, device=self.device)
        memory = self.memory
        return {region.name: region.of(memory) for region in self.plan.regions}

    def release(self) -> None:
        """Give the memory back; the transports in use don't need it."""
        self.memory = None


def counter_bytes(shape: MergeShape, world_size: int, on_gpu: bool) -> int:
    """What the engine itself holds: on a GPU a count of calls for each channel."""
    return 8 * shape.channels if on_gpu and world_size > 1 else 0


def plan_bytes(shape: MergeShape, world_size: int, config: Any = None, device: str | None = None) -> int:
    """Device bytes that a merger of `shape` takes on each rank of a group of `world_size`.

    Exact where `config` names a transport; with several candidates, the most that `max_live` of them take together.
    Temporaries of a call (its result, a layout copy, a projection) come on top.

    Args:
        config: as for `DCPMerger`.
        device: "cuda" or "cpu", where the merger will be; by default, as for `DCPMerger`, a GPU if there is one here.

    Raises:
        ShapeError: the heads don't divide over `world_size` ranks; another `device`.
        ConfigError: as `load_config`.
    """
    from dcpcomm.config import load_config, options_for
    from dcpcomm.registry import try_load
    from dcpcomm.screen import candidate_names

    shape.check_world_size(world_size)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ShapeError(f"device is {device!r}; expected 'cpu' or 'cuda'")
    on_gpu = device == "cuda"
    if world_size == 1:
        return 0
    loaded = load_config(config)
    own = 0
    extra: list[int] = []
    for name in candidate_names(loaded):
        cls, _ = try_load(name)
        if cls is None:
            continue
        if cls.needs_workspace(on_gpu):
            own = plan(shape, world_size).total
        extra.append(cls.device_bytes(shape, world_size, options_for(loaded, cls)))
    return own + counter_bytes(shape, world_size, on_gpu) + sum(sorted(extra, reverse=True)[: loaded.max_live])
