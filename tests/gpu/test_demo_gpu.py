"""The demonstration on GPUs: one rank's tokens, whatever carries the merges, eagerly and replayed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from dcpcomm.demo.judge import judge
from dcpcomm.demo.run import Settings, run_threads
from tests.gpu.rig import ON_GPU, ONE_GPU, needs_gpu

pytestmark = [*ONE_GPU, needs_gpu]
TOKENS = 256
TEXT = b"A rank that holds none of the chosen entries has nothing to say, and must not be heard. " * 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [2, 4])
def test_ranks_on_one_gpu_decode_as_one_does(n: int, dtype: str) -> None:
    told: list[Any] = []
    reports = run_threads(Settings(context=TEXT, tokens=TOKENS, dtype=dtype), n, lambda rank, event: told.append(event))
    assert judge(reports, dtype) == (True, [])
    found = {(one.transport, one.mode, one.projection) for one in reports[0].variants}
    assert found == {("loopback_peer", mode, order) for mode in ("eager", "graph") for order in ("before", "after")}
    assert reports[0].empty < reports[0].pairs
    for one in reports[0].variants:
        assert 0 < sum(one.merge_us) < one.step_us
    assert told


@pytest.mark.skipif(not ON_GPU or torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_processes_with_a_gpu_each_over_every_transport(dtype: str) -> None:
    n = max(n for n in (2, 4, 8) if n <= torch.cuda.device_count())
    words = ["--ranks", str(n), "--tokens", str(TOKENS), "--transport", "all", "--dtype", dtype, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "dcpcomm", "demo", *words], capture_output=True, text=True, timeout=230, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert {"nccl_a2a", "nccl_ag_rs", "cupy_ipc"} <= {one["transport"] for one in found["variants"]}
