"""`dcpcomm explain` and `dcpcomm verify` as a user runs them: what they print, and the status they exit with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nursery import Nursery

SMALL = ["--device", "cpu", "--max-tokens", "4", "--num-heads", "4", "--head-dim", "64"]


Command = Callable[..., str]


@pytest.fixture
def dcpcomm(nursery: Nursery, tmp_path: Path) -> Command:
    def run(*words: str, status: int = 0) -> str:
        """What it prints; where that is no fine ending, as an error."""
        environment = {**os.environ, "COLUMNS": "200", "DCPCOMM_CACHE_DIR": str(tmp_path)}
        done = nursery.python("-m", "dcpcomm", *words, environment=environment).wait()
        assert done.returncode == status, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr if status else done.stdout

    return run


def test_explain_says_what_and_why(dcpcomm: Command) -> None:
    said = dcpcomm("explain", *SMALL, "--v-head-dim", "32")
    assert "gloo_a2a: in use, verified" in said
    assert "loopback: fell at check on rank 0" in said
    assert "(model, project " in said
    facts = json.loads(dcpcomm("explain", *SMALL, "--json"))
    assert facts["transports"] == ["gloo_a2a"]
    assert facts["fallen"]["loopback"]["stage"] == "check"


def test_explain_fails_where_nothing_can_serve(dcpcomm: Command, tmp_path: Path) -> None:
    config = tmp_path / "none.yaml"
    config.write_text("transport: loopback\n")
    dcpcomm("explain", *SMALL, "--config", str(config), status=1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explain", "--ranks", "0"], "--ranks is 0"),
        (["explain", "--device", "gpu"], "device is 'gpu'"),
        (["verify", "gloo"], "gloo_a2a"),
        (["explain", "--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_wrong_usage_is_told_in_one_line(dcpcomm: Command, words: list[str], said: str) -> None:
    assert said in dcpcomm(*words, status=2)


def test_verify_proves_what_can_be_used_and_says_why_the_rest_cannot(dcpcomm: Command) -> None:
    rows = json.loads(dcpcomm("verify", *SMALL, "--level", "quick", "--json"))
    verdicts = {row["name"]: row["verdict"] for row in rows}
    assert verdicts == {
        "cupy_ipc": "unusable",
        "flashinfer_helix": "unusable",
        "gloo_a2a": "proven",
        "loopback": "unusable",
        "loopback_peer": "unusable",
        "nccl_a2a": "unusable",
        "nccl_ag_rs": "unusable",
        "nvshmem_put": "unusable",
    }
    assert "proven" in dcpcomm("verify", "gloo_a2a", *SMALL, "--level", "standard")
    dcpcomm("verify", "loopback", *SMALL, "--level", "quick", status=1)  # it was asked for by name
