"""Row 31 of the list of faults on one GPU: a process that ends with captured graphs ends cleanly: status 0, no hang, no
message.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.rig import DEVICE, ON_GPU, ONE_GPU

pytestmark = ONE_GPU
LIMIT_S = 150

BEGIN = f"""
import gc, sys, threading, types
import torch, dcpcomm
from dcpcomm.graphs import captured
from dcpcomm.testing import LoopbackWorld
DEVICE, N = torch.device({str(DEVICE)!r}), 2
shape = dcpcomm.MergeShape(max_tokens=4, num_heads=4, head_dim=32, dtype=torch.float32, lse_base="e")
config = {{"transport": "loopback_peer", "verify": {{"level": "quick"}}, "watchdog": {{"timeout_s": 20}}}}
barrier = threading.Barrier(N)
def together():
    if {ON_GPU}: torch.cuda.current_stream().synchronize()
    barrier.wait(60)
def build(group):
    merger = dcpcomm.DCPMerger(group, shape, config, DEVICE)
    partial, lse = torch.randn(3, 4, 32, device=DEVICE), torch.randn(3, 4, device=DEVICE)
    out = torch.full((3, 2, 32), torch.nan, device=DEVICE)
    step = lambda: merger.merge(partial, lse, out=out)
    step()
    together()
    graph = captured(step, DEVICE) if {ON_GPU} else types.SimpleNamespace(replay=step)
    together()
    graph.replay()
    together()
    merger.check()
    assert bool(out.isfinite().all())
    return merger, graph, out
"""

WAYS = {
    "with a live graph": "kept = LoopbackWorld(N).run(build)",
    "with a live graph, held by a module": "sys.modules['keeper'] = LoopbackWorld(N).run(build)",
    "closed, with a live graph": """
kept = LoopbackWorld(N).run(build)
for merger, _, _ in kept:
    merger.close(); merger.close()
""",
    "closed by one rank only": "kept = LoopbackWorld(N).run(build)\nkept[0][0].close()",
    "the graphs dropped before the mergers": """
kept = LoopbackWorld(N).run(build)
mergers = [merger for merger, _, _ in kept]
del kept; gc.collect()
for merger in mergers:
    merger.close()
""",
    "the mergers dropped, with live graphs": """
graphs = [graph for _, graph, _ in LoopbackWorld(N).run(build)]
gc.collect()
""",
    "a replay left under way": """
kept = LoopbackWorld(N).run(build)
def replay(group):
    for _ in range(20): kept[group.rank][1].replay()
LoopbackWorld(N).run(replay)
""" if ON_GPU else "",
    "a cycle that holds all of it": """
kept = LoopbackWorld(N).run(build)
for one in kept:
    one[0].me = kept
del kept, one
""",
    "a merger made and never used": """
def only(group):
    merger = dcpcomm.DCPMerger(group, shape, config, DEVICE)
    return merger
kept = LoopbackWorld(N).run(only)
""",
    "two worlds, the first one's graphs alive": """
kept = LoopbackWorld(N).run(build)
more = LoopbackWorld(N).run(build)
del kept
""",
}  # fmt: skip


@pytest.mark.parametrize("way", [way for way, text in WAYS.items() if text])
def test_leaving_with_graphs_is_clean(way: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BEGIN + WAYS[way]],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{way}: status {done.returncode}: {done.stderr}"
    assert not done.stdout.strip(), f"{way}: {done.stdout}"
    assert not done.stderr.strip(), f"{way}: {done.stderr}"
