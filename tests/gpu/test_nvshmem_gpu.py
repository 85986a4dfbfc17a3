"""`nvshmem_put` between two GPUs, on both paths: the conformance suite, replays by the thousand, worlds that are
joined, and how processes end.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dcpcomm.testing import run_conformance
from tests.gpu.test_nccl import BEGIN, two_processes

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.device_count() < (1 if os.environ.get("DCPCOMM_TEST_SHARED_GPU") else 2),
        reason="NVSHMEM wants a GPU for each of two ranks, or MPS; with MPS set DCPCOMM_TEST_SHARED_GPU=1",
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("nvshmem") is None, reason="nvshmem4py is not installed: pip install 'dcpcomm[cu12]'"
    ),
    pytest.mark.timeout(600),
]
PATHS = ("peer", "put_signal")
LIMIT_S = 200.0  # every merger is tried in child processes first


@pytest.mark.parametrize("path", PATHS)
def test_it_conforms(path: str) -> None:
    config = {"options": {"nvshmem_put": {"path": path}}}
    report = run_conformance("nvshmem_put", ranks=(2,), config=config, device="cuda")
    failed = {result.case: result.detail[:600] for result in report.results if result.outcome == "failed"}
    assert not failed
    assert report.verdict == "PASS"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", ["1", "1,7", "1,7,3"], ids=["1 merge", "2 merges", "3 merges"])
def test_a_thousand_replays_among_eager_calls(path: str, rows: str) -> None:
    """A graph of that many merges, with fresh data and late ranks; every bit is compared."""
    words = ["--transport", f"nvshmem_put:path={path}", "--replays", "1000", "--rows", rows]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29537",
         "-m", "dcpcomm.bench.replays", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " 0 wrong" in done.stdout


BUILD = BEGIN.replace(
    'config = {"transport": os.environ["OVER"],',
    'config = {"transport": "nvshmem_put", "options": {"nvshmem_put": {"path": os.environ["OVER"]}},',
)

WAYS = {
    "without close, with a live graph": "kept = with_graph()",
    "closed, with a live graph": "merger, graph = with_graph(); merger.close(); merger.close()",
    "made and never used": "merger = build()",
    "closed, another made, closed, thrice": "for _ in range(3): build().close()",
    "two at once": "one, other = build(), build(); one.merge(partial, lse); other.close(); one.close()",
    "reset with a live graph": "merger, graph = with_graph(); merger.reset(); merger.merge(partial, lse)",
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("way", WAYS)
def test_processes_end_cleanly(way: str, path: str, tmp_path: Path) -> None:
    for rank, (status, output) in enumerate(two_processes(BUILD + WAYS[way], tmp_path, path, LIMIT_S)):
        assert status == 0, f"{way}, rank {rank}: status {status}: {output}"


JOINED = """
from dcpcomm.backends import nvshmem_library
library = nvshmem_library.library()
held = [library.unique_id() if rank == 0 else b""]
dist.broadcast_object_list(held)
library.initialise(held[0], 1 - rank, 2)
library.name = ""
merger = build()
merger.merge(partial, lse, out=out)
torch.cuda.synchronize()
merger.check()
assert bool(out.isfinite().all())
assert merger.transports == ["nvshmem_put"]
merger.close()
"""


@pytest.mark.parametrize("path", PATHS)
def test_a_world_that_is_there_is_joined(path: str, tmp_path: Path) -> None:
    """An engine's, whose PEs are in another order than the group's ranks."""
    for rank, (status, output) in enumerate(two_processes(BUILD + JOINED, tmp_path, path, LIMIT_S)):
        assert status == 0, f"rank {rank}: status {status}: {output}"


ABSENT = """
merger = build(timeout_s=2)
merger.merge(partial, lse, out=out)
graph = captured(lambda: merger.merge(partial, lse, out=out), torch.device("cuda", torch.cuda.current_device()))
graph.replay()
torch.cuda.synchronize()
dist.barrier()
if rank == 0:
    began = time.monotonic()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert time.monotonic() - began < 10, "a deadline for each replay"
    assert bool(out.isnan().all())
    try:
        merger.check()
    except dcpcomm.TransportTimeout as error:
        assert error.ranks == (1,), error.ranks
    else:
        raise AssertionError("nothing was raised")
dist.barrier()
merger.reset()
merger.merge(partial, lse, out=out)
torch.cuda.synchronize()
merger.check()
assert bool(out.isfinite().all())
merger.close()
"""


@pytest.mark.parametrize("path", PATHS)
def test_replays_end_at_one_deadline_and_a_reset_heals(path: str, tmp_path: Path) -> None:
    for rank, (status, output) in enumerate(two_processes(BUILD + ABSENT, tmp_path, path, LIMIT_S)):
        assert status == 0, f"rank {rank}: status {status}: {output}"
