"""Where `dcpcomm bench` runs: processes with a GPU each, virtual ranks that share one, or those of torchrun."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import dcpcomm.cli.bench
from dcpcomm.bench import replays
from dcpcomm.bench import run as runner
from dcpcomm.bench.measure import Answer
from dcpcomm.bench.result import Group, Result
from dcpcomm.bench.run import Place
from dcpcomm.bench.sweep import Sweep
from tests.bench_rig import LIMITS, answers, sweep


def test_ranks_are_processes_where_each_has_a_gpu_and_else_share_one() -> None:
    assert not Place("cuda", gpus=2).virtual(2)
    assert Place("cuda", gpus=2).virtual(4)
    assert Place("cuda", gpus=2).virtual(2, ["loopback_peer:threads=128"])
    assert not Place("cuda", gpus=2).virtual(2, ["loopback_peer", "cupy_ipc"])
    assert not Place("cuda", gpus=1, world=2).virtual(2)
    assert not Place("cpu").virtual(2)
    assert Place("cuda", gpus=1).transports(2) == ("loopback_peer",)
    assert {"nccl_a2a", "cupy_ipc"} <= set(Place("cuda", gpus=2).transports(2))
    assert Place("cpu").transports(2) == ("gloo_a2a",)


def test_processes_with_a_gpu_each_do_not_get_the_settings_of_virtual_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # the user's own
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    place = runner.place_of(None)
    assert (place.device, place.gpus, place.settings) == ("cuda", 2, ("CUDA_MODULE_LOADING",))
    seen: list[tuple[str | None, str | None]] = []

    def on_ranks(*args: Any, **keywords: Any) -> list[Answer]:
        seen.append((os.environ.get("CUDA_MODULE_LOADING"), os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")))
        return answers()

    monkeypatch.setattr(runner, "versions", dict)
    found = runner.run(sweep(transport=("nccl_a2a",)), place, "words", lambda event: None, on_ranks)
    assert seen == [(None, "8")]
    assert found is not None
    assert found.groups[0].are == "processes"


def test_what_torchrun_did_not_start_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(runner, "_answers", lambda *args: answers())
    monkeypatch.setattr(runner, "versions", dict)
    found = runner.run(sweep(ranks=(2, 4)), Place("cuda", 8, world=2), "words", lambda event: None)
    assert found is not None
    assert {(one.cell.ranks, one.why) for one in found.skipped if one.cell} == {(4, "torchrun started 2 ranks")}
    assert [group.count for group in found.groups] == [2]
    default = Sweep(rows=(1,), transport=("loopback_peer",))
    found = runner.run(default, Place("cuda", 8, world=8), "words", lambda event: None)
    assert found is not None
    assert not found.skipped, "without --ranks, torchrun's count"


def test_a_result_is_what_was_found_and_comes_back_from_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_answers", lambda *args: answers())
    monkeypatch.setattr(runner, "versions", lambda: {"torch": "2"})
    found = runner.run(sweep(), Place("cuda", 1), "dcpcomm bench", lambda event: None, of_commit="abc")
    assert found is not None
    assert found.groups == (Group(2, "threads on one GPU", "2.40 us + bytes / 400 GB/s", LIMITS.as_dict()),)
    assert found.machine["gpus"] == ["GPU A", "GPU B"]
    assert (found.commit, found.command) == ("abc", "dcpcomm bench")
    assert Result.of(json.loads(json.dumps(found.as_dict())), "this run") == found


@pytest.mark.parametrize("main", [dcpcomm.cli.bench.bench, replays.main])
def test_virtual_ranks_get_their_settings_before_cuda_starts(main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str | None] = []

    def asked() -> bool:
        found.append(os.environ.get("CUDA_MODULE_LOADING"))
        raise typer.Exit(2)

    for name in ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", asked)
    app = typer.Typer()
    app.command()(main)
    assert CliRunner().invoke(app, ["--transport", "loopback_peer"]).exit_code == 2
    assert found == ["EAGER"]
