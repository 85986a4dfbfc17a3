"""Row 31 of the list of faults: however a process leaves, it leaves cleanly: status 0, no hang, no message."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from tests.nursery import Nursery

BEGIN = """
import sys, torch, torch.distributed as dist, dcpcomm
dist.init_process_group("gloo")
rank = dist.get_rank()
shape = dcpcomm.MergeShape(max_tokens=4, num_heads=4, head_dim=32, dtype=torch.float32, lse_base="e")
def build():
    return dcpcomm.DCPMerger(None, shape, {"transport": "gloo_a2a", "watchdog": {"timeout_s": 90}})
def step(merger):
    out = merger.merge(torch.randn(3, 4, 32), torch.randn(3, 4))
    assert out.isfinite().all()
"""

# Gloo would wait for the peer of the exchange under way, for all of the watchdog's time.
CALLED_OFF = """
merger = build(); step(merger)
if rank == 1:
    try:
        merger.merge(torch.randn(3, 4, 33), torch.randn(3, 4))
    except dcpcomm.ShapeError:
        pass
    else:
        sys.exit("nobody noticed")
dist.barrier()
"""
LIMIT_S = 60  # below the watchdog's time

WAYS = {
    "without close": "merger = build(); step(merger)",
    "closed": "merger = build(); step(merger); merger.close(); merger.close(); dist.destroy_process_group()",
    "dropped on one rank only": """
merger = build(); step(merger)
if rank == 0:
    del merger
    import gc; gc.collect()
dist.barrier()
""",
    "the group destroyed before close": "merger = build(); step(merger); dist.destroy_process_group(); merger.close()",
    "closed on one rank only": "merger = build(); step(merger)\nif rank == 1:\n    merger.close()\ndist.barrier()",
    "a construction that failed half-way": """
try:
    dcpcomm.DCPMerger(None, shape, {"transport": "loopback"})
except dcpcomm.TransportUnavailable:
    pass
else:
    sys.exit("loopback between processes?")
merger = build(); step(merger)
""",
    "an error in a call": """
merger = build()
try:
    merger.merge(torch.randn(3, 4, 32 + rank), torch.randn(3, 4))
except dcpcomm.DCPCommError:
    pass
else:
    sys.exit("nobody noticed")
step(merger)
""",
    "a call called off that no peer makes": CALLED_OFF,
    "the same, and closed": CALLED_OFF + "merger.close()",
    "a cycle that holds the merger": "merger = build(); step(merger); merger.me = merger; del merger",
    "held by a module": "merger = build(); step(merger); sys.modules['keeper'] = merger",
}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def both() -> list[dict[str, str]]:
    """The environments of two ranks."""
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    return [{**shared, "RANK": str(rank)} for rank in range(2)]


def judge(rank: int, way: str, status: int, out: str, err: str) -> None:
    assert status == 0, f"rank {rank}, {way}: {err}"
    assert not out.strip(), f"rank {rank}, {way}: {out}"
    assert not err.strip(), f"rank {rank}, {way}: {err}"


@pytest.mark.parametrize("way", WAYS)
def test_leaving_is_clean(way: str, nursery: Nursery) -> None:
    ranks = [nursery.python("-c", BEGIN + WAYS[way], environment=one, warned="error") for one in both()]
    for rank, process in enumerate(ranks):
        done = process.wait(LIMIT_S)
        judge(rank, way, done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("way", ["without close", "held by a module"])
def test_leaving_is_clean_for_who_imported_torch_itself(way: str) -> None:
    command = [sys.executable, "-W", "error", "-c", BEGIN + WAYS[way]]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command, env=one, **pipes) for one in both()]
    try:
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=LIMIT_S)
            judge(rank, way, process.returncode, out, err)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
