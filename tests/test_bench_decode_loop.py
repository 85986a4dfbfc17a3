"""`dcpcomm.bench.decode_loop` but for the GPU: every layer is compared, and the time in merges is a difference."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dcpcomm
from dcpcomm.bench.decode_loop import Found, Plan, rows_of, run
from dcpcomm.bench.ranks import Meeting, ThreadRanks
from dcpcomm.testing import LoopbackWorld

PLAN = Plan(("loopback", "loopback_peer"), layers=3, rows=3, heads=4, latent=32, value=16, work=8, rounds=4)


def found_by(plan: Plan, n: int = 2) -> list[Found]:
    meeting = Meeting(n)

    def body(group: Any) -> Found:
        return run(group, ThreadRanks(meeting, group.rank), torch.device("cpu"), plan, lambda text: None)

    return LoopbackWorld(n).run(body, timeout_s=60)


def test_each_transport_is_right_and_timed_in_turns_with_none() -> None:
    found = found_by(PLAN)
    for one in found:
        assert set(one.us) == {"no merges", "loopback", "loopback_peer"}
        assert all(len(us) == PLAN.rounds and min(us) > 0 for us in one.us.values())
        assert one.wrong == {"loopback": 0, "loopback_peer": 0}
        assert one.chosen["loopback_peer"].startswith("loopback_peer, W_UV ")
    for row in rows_of(found):
        assert row.wrong == 0
        assert 0 < row.merges_us < row.step_us


@pytest.mark.parametrize("layer", [0, 2])
def test_one_wrong_element_of_any_layer_is_counted(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dcpcomm.DCPMerger.merge_and_project

    def wrong(self: Any, *given: Any, **keywords: Any) -> Any:
        out = whole(self, *given, **keywords)
        if keywords["tag"] == layer and self.group.rank == 1:
            out[1, 1, 3] += 1
        return out

    monkeypatch.setattr(dcpcomm.DCPMerger, "merge_and_project", wrong)
    zero, one = found_by(PLAN)
    assert zero.wrong == {"loopback": 0, "loopback_peer": 0}
    assert all(count > 0 for count in one.wrong.values())
    assert all(row.wrong for row in rows_of([zero, one]))


def test_a_layer_that_is_left_out_is_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dcpcomm.DCPMerger.merge_and_project

    def lazy(self: Any, *given: Any, **keywords: Any) -> Any:
        return whole(self, *given, **keywords) if keywords["tag"] != 1 else keywords["out"]

    monkeypatch.setattr(dcpcomm.DCPMerger, "merge_and_project", lazy)
    comparisons, elements = 2, PLAN.rows * PLAN.heads // 2 * PLAN.value
    for one in found_by(PLAN):
        assert set(one.wrong.values()) == {comparisons * elements}


def test_rows_take_the_slowest_rank_of_each_step() -> None:
    times = [
        Found(None, {"no merges": [10, 30, 10], "auto": [50, 60, 90]}, {}, {"auto": "x"}, {"auto": 0}),
        Found(None, {"no merges": [20, 10, 20], "auto": [70, 10, 80]}, {}, {"auto": "x"}, {"auto": 2}),
    ]
    (row,) = rows_of(times)
    assert (row.step_us, row.merges_us, row.spread_us, row.eager_step_us, row.wrong) == (70, 50, 10 + 0, None, 2)


def command(*words: str, ranks: int = 0) -> Any:
    start = [sys.executable, "-m"]
    if ranks:
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    return subprocess.run(
        [*start, "dcpcomm.bench.decode_loop", *words], capture_output=True, text=True, timeout=100, check=False
    )


def test_under_torchrun_on_cpu(tmp_path: Path) -> None:
    file = tmp_path / "loop.json"
    words = "--layers 3 --rows 2 --heads 4 --latent 32 --value 16 --work 16 --rounds 3 --device cpu --transport auto"
    done = command(*words.split(), "--json", str(file), ranks=2)
    assert done.returncode == 0, done.stderr
    assert "3 layers, B=2, H=4, L=32, V=16, bfloat16" in done.stdout
    read = json.loads(file.read_text(encoding="utf-8"))
    assert read["rows"][0]["chosen"].startswith("gloo_a2a, W_UV ")
    assert read["rows"][0]["wrong"] == 0
    assert len(read["ranks"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cpu"], "expected a process for each rank"),
        (["--device", "tpu"], "expected cpu or cuda"),
        (["--transport", "cupy_ipc:threads"], "is no KEY=VALUE"),
        pytest.param([], "torch sees none", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")),
    ],
)
def test_wrong_usage_and_no_gpu_exit_2(words: list[str], said: str) -> None:
    done = command(*words)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
