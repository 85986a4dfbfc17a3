"""What is found of GPUs: NVML and CUDA agree, and what is tuned on two of them is what their mergers are priced by."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dcpcomm.nvml import machine_by_nvml
from dcpcomm.probe import probe

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
    pytest.mark.timeout(300),
]


def test_nvml_and_cuda_see_the_same_gpus() -> None:
    found = machine_by_nvml("here")
    assert found.driver
    visible = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    for properties in visible:
        gpu = found.gpu(str(properties.uuid))
        assert gpu is not None, "the two write UUIDs differently"
        assert gpu.name == properties.name
        assert gpu.architecture == f"sm_{properties.major}{properties.minor}"
    for a, b in itertools.combinations(range(len(visible)), 2):
        pair = found.pair(str(visible[a].uuid), str(visible[b].uuid))
        assert pair is not None
        assert pair.access == torch.cuda.can_device_access_peer(a, b)
        assert pair.link != "?"


def test_a_probe_knows_the_nccl_that_is_loaded() -> None:
    (nccl,) = (one for one in probe().libraries if one.name == "NCCL")
    assert nccl.loaded == ".".join(map(str, torch.cuda.nccl.version()[:3]))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each of two ranks")
def test_what_is_tuned_on_two_gpus_is_what_their_mergers_are_priced_by(tmp_path: Path) -> None:
    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            env={**os.environ, "DCPCOMM_CACHE_DIR": str(tmp_path), "PYTHONSAFEPATH": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    found = json.loads(run("dcpcomm", "tune", "--rows", "1,16", "--passes", "2", "--rounds", "5", "--json"))
    assert found["key"]["device"] == torch.cuda.get_device_name(0)
    assert {"nccl_a2a"} <= set(found["table"]["merges"])
    assert len(found["table"]["projections"]["bfloat16"]) == 2
    script = tmp_path / "explained.py"
    script.write_text(
        "import os, torch, torch.distributed as dist, dcpcomm\n"
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
        "dist.init_process_group('gloo')\n"
        "shape = dcpcomm.MergeShape(max_tokens=16, num_heads=128, head_dim=512, v_head_dim=128,\n"
        "                           dtype=torch.bfloat16, lse_base='e')\n"
        "with dcpcomm.DCPMerger(None, shape) as merger:\n"
        "    print(merger.explain())\n"
        "dist.destroy_process_group()\n"
    )
    said = run("torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    assert "measured here" in said
    assert "(model" not in said
