"""What can't be written, or makes no sense, is told in one line before anything is measured."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.nursery import Nursery


def told(nursery: Nursery, folder: Path, *words: str, **environment: str) -> tuple[int, str]:
    """Exit status, and what stands on standard error."""
    given = {**os.environ, "DCPCOMM_CACHE_DIR": str(folder / "cache"), **environment}
    done = nursery.python("-m", "dcpcomm", *words, environment=given).wait()
    assert "Traceback" not in done.stderr
    return int(done.returncode), done.stderr if done.returncode else done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "--device", "cpu", "--rows", "1", "--json"],
        ["bench", "--device", "cpu", "--rows", "1", "--csv"],
        ["tune", "--device", "cpu", "--rows", "1", "--output"],
        ["doctor", "--output"],
        ["conformance", "gloo_a2a", "--junit"],
    ],
    ids=" ".join,
)
def test_a_result_that_cannot_be_written_is_told_at_once(words: list[str], nursery: Nursery, tmp_path: Path) -> None:
    for target, reason in (
        (tmp_path, "that is a folder; expected a file"),
        (tmp_path / "no/file", "there is no folder"),
    ):
        status, said = told(nursery, tmp_path, *words, str(target))
        assert status == 2
        assert f"{words[-1]} {target}: {reason}" in said
        assert len(said.splitlines()) == 1


def test_tune_says_that_it_can_keep_nothing(nursery: Nursery, tmp_path: Path) -> None:
    """It measured in silence, and its ranks waited for the one that couldn't note a figure."""
    (tmp_path / "file").touch()
    began = time.monotonic()
    status, said = told(
        nursery, tmp_path, "tune", "--device", "cpu", "--rows", "1", DCPCOMM_CACHE_DIR=str(tmp_path / "file")
    )
    assert status == 2
    assert f"the cache folder {tmp_path / 'file'} can't be written" in said
    assert "DCPCOMM_CACHE_DIR" in said
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["verify", "gloo_a2a", "--ranks", "1"], "one rank uses no transport"),
        (["verify", "--ranks", "3"], "128"),
        (["explain", "--ranks", "3"], "128"),
        (["explain", "--max-tokens", "0"], "max_tokens is 0"),
        (["explain", "--channels", "0"], "channels is 0"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else "",
)
def test_what_makes_no_sense_is_wrong_usage(words: list[str], reason: str, nursery: Nursery, tmp_path: Path) -> None:
    status, said = told(nursery, tmp_path, *words, "--device", "cpu")
    assert status == 2
    assert reason in said
    assert len(said.splitlines()) == 1


def test_a_sweep_in_which_nothing_was_measured_has_failed(nursery: Nursery, tmp_path: Path) -> None:
    status, said = told(nursery, tmp_path, "bench", "--device", "cpu", "--heads", "33", "--rows", "1")
    assert status == 1
    assert said == ""  # the reasons stand where the table would


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
@pytest.mark.parametrize("command", ["probe", "explain", "verify", "demo", "tune", "bench"])
def test_a_gpu_that_is_not_there_is_told(command: str, nursery: Nursery, tmp_path: Path) -> None:
    status, said = told(nursery, tmp_path, command, "--device", "cuda")
    assert status == 2
    assert re.search("torch sees (no GPU|none)", said)
    assert len(said.splitlines()) == 1


def test_the_version_is_told(nursery: Nursery, tmp_path: Path) -> None:
    status, said = told(nursery, tmp_path, "--version")
    assert status == 0
    assert said.startswith("dcpcomm 0.")


@pytest.mark.parametrize("words", [["list"], ["config", "schema"], ["--version"], ["list", "--json"]])
def test_output_that_has_no_room_is_told_in_a_line(words: list[str]) -> None:
    """A full disk; a reader that goes ends it quietly."""
    command = [sys.executable, "-m", "dcpcomm", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert done.stderr == "dcpcomm: the output could not be written: No space left on device\n"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    os.close(writing)
    assert done.returncode == 1
    assert done.stderr == ""
