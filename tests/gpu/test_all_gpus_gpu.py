"""`dcpcomm.bench.all_gpus` on what is here, one short step for each N: it begins, ends, and its results are there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dcpcomm.bench.all_gpus import sizes_for

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
    pytest.mark.timeout(400),
]


def test_a_short_check_by_replays_passes(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    transport = "loopback_peer" if count == 1 else "cupy_ipc"
    words = ["--minutes", "5", "--only", "replays", "--transport", transport, "--replays", "500"]
    command = [sys.executable, "-m", "dcpcomm.bench.all_gpus", "--out", str(tmp_path), *words]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=350, env=environment, check=False)
    errors = "".join(path.read_text() for path in tmp_path.glob("*.err"))
    assert done.returncode == 0, done.stdout + done.stderr + errors
    read = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    checks = [one for one in read["steps"] if one["kind"] == "replays"]
    assert [one["ranks"] for one in checks] == list(sizes_for(count))
    for one in checks:
        assert one["state"] == "passed"
        found = json.loads((tmp_path / f"{one['name']}.json").read_text(encoding="utf-8"))
        assert len(found["ranks"]) == one["ranks"]
        assert all(rank["wrong"] == 0 and rank["words"] > 0 for rank in found["ranks"])
