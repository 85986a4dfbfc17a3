"""FlashInfer's exchange, as `flashinfer_helix` sees it: queues of four entries in every receiver's memory.

Written from its documented calls and what was measured of it; nothing is copied. Environment:

    HELIX_STAND_IN_TEARS    n: of n 128-byte lines one arrives with an old half, as on Hopper (old: four entries ago)
    HELIX_STAND_IN_FAILS    what compiling says instead of working
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.helix_stand_in.comm import mnnvl
from tests.helix_stand_in.comm.mapping import Mapping

__all__ = [
    "Mapping", "decode_cp_a2a_allocate_mnnvl_workspace", "decode_cp_a2a_alltoall", "decode_cp_a2a_init_workspace",
    "decode_cp_a2a_workspace_size", "mnnvl",
]  # fmt: skip

LINE, HALF, DEPTH = 128, 64, 4
SLOT = 1 << 16
PATIENCE_S = 20.0
#: Calls of each name, for tests.
calls: dict[str, int] = {}
_kept: list[torch.Tensor] = []


def _count(name: str) -> None:
    calls[name] = calls.get(name, 0) + 1


def decode_cp_a2a_workspace_size(cp_size: int) -> int:
    said = os.environ.get("HELIX_STAND_IN_FAILS")
    if said:
        raise RuntimeError(said)
    return cp_size * (DEPTH * SLOT + LINE)


def decode_cp_a2a_allocate_mnnvl_workspace(mapping: Mapping, *, mnnvl_config: Any = None) -> torch.Tensor:
    _count("allocate")
    comm = mnnvl_config.comm_backend.Split(mapping.pp_rank * mapping.tp_size + mapping.tp_rank, mapping.cp_rank)
    n = comm.Get_size()
    assert all(one == ("host", None, b"\0") for one in comm.allgather(("host", None, b"\0")))
    words = decode_cp_a2a_workspace_size(n) // 8
    name = ""
    if comm.Get_rank() == 0:
        handle, name = tempfile.mkstemp(prefix="helix-stand-in-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        os.ftruncate(handle, n * words * 8)
        os.close(handle)
    name = comm.bcast(name, 0)
    workspace = torch.from_file(name, shared=True, size=n * words, dtype=torch.int64).view(n, words)
    comm.barrier()
    if comm.Get_rank() == 0:
        Path(name).unlink()
    _kept.append(workspace)
    return workspace


def decode_cp_a2a_init_workspace(workspace: torch.Tensor, cp_rank: int, cp_size: int) -> None:
    _count("init")
    own = workspace[cp_rank].view(torch.uint8).numpy()
    own[: cp_size * DEPTH * SLOT] = 0xFF
    own[cp_size * DEPTH * SLOT :] = 0


class _Queue:
    """From one sender to one receiver: four slots and two counters in the receiver's memory."""

    def __init__(self, workspace: torch.Tensor, receiver: int, sender: int) -> None:
        n = workspace.shape[0]
        own = workspace[receiver].view(torch.uint8).numpy()
        self.slots = own[sender * DEPTH * SLOT : (sender + 1) * DEPTH * SLOT].reshape(DEPTH, SLOT)
        at = n * DEPTH * SLOT + sender * LINE
        self.counters = own[at : at + 16].view(np.int64)  # sent, taken

    @property
    def ready(self) -> bool:
        return bool(self.counters[1] < self.counters[0])

    @property
    def full(self) -> bool:
        return bool(self.counters[0] - self.counters[1] >= DEPTH)

    def put(self, lines: np.ndarray, tears: int) -> None:
        to = self.slots[self.counters[0] % DEPTH, : lines.size].reshape(-1, 2, HALF)
        wanted = np.ones(to.shape[:2], dtype=bool)
        if tears:
            for line in range(len(to)):
                if random.randrange(tears) == 0:
                    wanted[line, random.randrange(2)] = False
        to[wanted] = lines.reshape(-1, 2, HALF)[wanted]
        self.counters[0] += 1

    def take(self, nbytes: int) -> np.ndarray:
        lines = self.slots[self.counters[1] % DEPTH, :nbytes].copy()
        self.counters[1] += 1
        return lines


def decode_cp_a2a_alltoall(
    partial_o: torch.Tensor,
    softmax_stats: torch.Tensor,
    workspace: torch.Tensor,
    cp_rank: int,
    cp_size: int,
    enable_pdl: bool | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _count("alltoall")
    assert partial_o.dtype in (torch.float16, torch.bfloat16), "partial_o must be half or bfloat16"
    assert softmax_stats.dtype == torch.float32
    for one in (partial_o, softmax_stats, *(out or ())):
        assert one.is_contiguous(), "must be contiguous"
        assert one.data_ptr() % 16 == 0, "a bulk copy from here would be a fault of the device"
    assert partial_o.shape[-2] == softmax_stats.shape[-2] == cp_size
    assert partial_o.shape[:-2] == softmax_stats.shape[:-2]
    row, statistics = partial_o.shape[-1] * 2, softmax_stats.shape[-1]
    assert row % 16 == 0
    assert statistics == 2 or statistics % 4 == 0, "a bulk copy of this length would be a fault of the device"
    if out is None:
        out = torch.empty_like(partial_o), torch.empty_like(softmax_stats)
    each = -(-(row + 4 * statistics) // LINE) * LINE
    per_slot = SLOT // each
    assert per_slot, "a message longer than a slot runs over what lies behind it"
    rows = _bytes(partial_o).reshape(-1, cp_size, row)
    stats = _bytes(softmax_stats).reshape(-1, cp_size, 4 * statistics)
    rows_out, stats_out = _bytes(out[0]).reshape(rows.shape), _bytes(out[1]).reshape(stats.shape)
    tears = int(os.environ.get("HELIX_STAND_IN_TEARS", "0"))

    begins = range(0, len(rows), per_slot)
    sending = {peer: list(begins) for peer in range(cp_size)}
    taking = {peer: list(begins) for peer in range(cp_size)}
    outward = {peer: _Queue(workspace, peer, cp_rank) for peer in range(cp_size)}
    inward = {peer: _Queue(workspace, cp_rank, peer) for peer in range(cp_size)}
    ends = time.monotonic() + PATIENCE_S
    while any(sending.values()) or any(taking.values()):
        moved = False
        for peer in range(cp_size):
            if sending[peer] and not outward[peer].full:
                first = sending[peer].pop(0)
                part = slice(first, first + per_slot)
                lines = np.zeros((len(rows[part]), each), dtype=np.uint8)
                lines[:, :row], lines[:, row : row + 4 * statistics] = rows[part, peer], stats[part, peer]
                outward[peer].put(lines, tears)
                moved = True
            if taking[peer] and inward[peer].ready:
                first = taking[peer].pop(0)
                count = min(per_slot, len(rows) - first)
                lines = inward[peer].take(count * each).reshape(count, each)
                rows_out[first : first + count, peer] = lines[:, :row]
                stats_out[first : first + count, peer] = lines[:, row : row + 4 * statistics]
                moved = True
        if not moved:
            assert time.monotonic() < ends, "the real one would wait for ever"
            time.sleep(0.0002)
    return out


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(-1).view(torch.uint8).numpy()
