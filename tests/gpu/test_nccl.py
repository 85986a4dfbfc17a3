"""NCCL between two GPUs: the conformance suite, the tests of one GPU over it, and how processes end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from dcpcomm.testing import TransportConformance

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each of two ranks"),
    pytest.mark.timeout(200),
]
HERE = Path(__file__).parent
LIMIT_S = 60


class TestNcclA2A(TransportConformance):
    transport = "nccl_a2a"
    ranks = (2,)
    device: ClassVar[str | None] = "cuda"


class TestNcclAgRs(TransportConformance):
    transport = "nccl_ag_rs"
    ranks = (2,)
    device: ClassVar[str | None] = "cuda"


@pytest.mark.parametrize("file", ["test_merges_gpu.py", "test_graphs.py", "test_streams.py"])
def test_what_holds_on_one_gpu_holds_over_nccl(file: str) -> None:
    """Rows 14 to 28 of the list of faults, between processes."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / file)],
        env={**os.environ, "DCPCOMM_TEST_OVER": "nccl_a2a", "PYTHONSAFEPATH": "1"},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


BEGIN = """
import os, sys, time
import torch, torch.distributed as dist, dcpcomm
from dcpcomm.graphs import captured
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group("gloo")
shape = dcpcomm.MergeShape(max_tokens=4, num_heads=4, head_dim=32, dtype=torch.float32, lse_base="e")
def build(timeout_s=20, **more):
    config = {"transport": os.environ["OVER"], "verify": {"level": "quick"}, "watchdog": {"timeout_s": timeout_s}}
    return dcpcomm.DCPMerger(None, shape, {**config, **more})
partial, lse = torch.randn(3, 4, 32, device="cuda"), torch.randn(3, 4, device="cuda")
out = torch.full((3, 2, 32), torch.nan, device="cuda")
def with_graph():
    merger = build()
    merger.merge(partial, lse, out=out)
    graph = captured(lambda: merger.merge(partial, lse, out=out), torch.device("cuda", torch.cuda.current_device()))
    graph.replay()
    torch.cuda.synchronize()
    merger.check()
    assert bool(out.isfinite().all())
    return merger, graph
"""

WAYS = {
    "without close, with a live graph": "kept = with_graph()",
    "closed, with a live graph": "merger, graph = with_graph(); merger.close(); merger.close()",
    "the merger dropped, with a live graph": "graph = with_graph()[1]",
    "the graph dropped before the merger": "merger, graph = with_graph(); del graph; merger.close()",
    "closed by one rank only": "merger, graph = with_graph()\nif rank == 0: merger.close()",
    "made and never used": "merger = build()",
    "closed, another made, closed": "build().close(); build().close()",
    "the process group destroyed before close": "merger = build(); dist.destroy_process_group(); merger.close()",
    "reset with a live graph": "merger, graph = with_graph(); merger.reset(); merger.merge(partial, lse)",
}


def two_processes(text: str, tmp_path: Path, transport: str, limit_s: float = LIMIT_S) -> list[tuple[int, str]]:
    """Status and output of each of two ranks that run `text`."""
    script = tmp_path / "script.py"
    script.write_text(text, encoding="utf-8")
    command = [sys.executable, "-W", "error", str(script)]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "OVER": transport}
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **place, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=limit_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


@pytest.mark.parametrize("transport", ["nccl_a2a", "nccl_ag_rs"])
@pytest.mark.parametrize("way", WAYS)
def test_processes_end_cleanly(way: str, transport: str, tmp_path: Path) -> None:
    """Row 31: status 0, no hang, no message."""
    for rank, (status, output) in enumerate(two_processes(BEGIN + WAYS[way], tmp_path, transport)):
        assert status == 0, f"{way}, rank {rank}: status {status}: {output}"
        assert not output.strip(), f"{way}, rank {rank}: {output}"


ABSENT = """
merger = build(timeout_s=2)
merger.merge(partial, lse, out=out)
graph = captured(lambda: merger.merge(partial, lse, out=out), torch.device("cuda", torch.cuda.current_device()))
graph.replay()
torch.cuda.synchronize()
dist.barrier()
if rank == 0:
    began = time.monotonic()
    HOW
    torch.cuda.synchronize()
    try:
        merger.check()
        raise SystemExit("nothing was raised")
    except dcpcomm.TransportTimeout as error:
        assert error.ranks == (1,), error
        assert "rank 1 did not arrive" in str(error), error
    assert time.monotonic() - began < 4.5, time.monotonic() - began
    assert bool(out.isnan().all())
    try:
        merger.merge(partial, lse, out=out)
        raise SystemExit("a spent channel took a call")
    except dcpcomm.TransportTimeout:
        pass
dist.barrier()
merger.reset()
merger.merge(partial, lse, out=out)
torch.cuda.synchronize()
merger.check()
assert bool(out.isfinite().all())
"""


@pytest.mark.parametrize(
    "how", ["merger.merge(partial, lse, out=out)", "graph.replay()", "[graph.replay() for _ in range(61)]"]
)
def test_a_rank_that_does_not_come_is_named_and_the_process_lives(how: str, tmp_path: Path) -> None:
    """Row 40, with NCCL: one deadline for however many merges wait, and reset() makes the merger whole."""
    for rank, (status, output) in enumerate(two_processes(BEGIN + ABSENT.replace("HOW", how), tmp_path, "nccl_a2a")):
        assert status == 0, f"{how}, rank {rank}: status {status}: {output}"


UNEQUAL = """
merger = build(timeout_s=2)
merger.merge(partial, lse, out=out)
torch.cuda.synchronize()
dist.barrier()
began = time.monotonic()
rows = 3 - rank
mine = torch.zeros(rows, 2, 32, device="cuda")
merger.merge(partial[:rows], lse[:rows], out=mine)
torch.cuda.synchronize()
try:
    merger.check()
    raise SystemExit("nothing was raised")
except (dcpcomm.CallMismatch, dcpcomm.TransportTimeout) as error:
    assert f"rank {1 - rank}" in str(error), error
assert time.monotonic() - began < 5.5, time.monotonic() - began
assert bool(mine.isnan().all())
dist.barrier()
merger.reset()
merger.merge(partial, lse, out=out)
torch.cuda.synchronize()
merger.check()
assert bool(out.isfinite().all())
"""


def test_ranks_that_come_with_unequal_rows_are_told_so(tmp_path: Path) -> None:
    """Row 40a: NCCL can't tell, and may wait for ever; nothing is merged, and it ends."""
    for rank, (status, output) in enumerate(two_processes(BEGIN + UNEQUAL, tmp_path, "nccl_a2a")):
        assert status == 0, f"rank {rank}: status {status}: {output}"
