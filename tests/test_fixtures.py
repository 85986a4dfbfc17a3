"""The fixtures for users' tests, in a user's test file that pytest runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.nursery import Nursery

USERS_TEST = """
import pytest
import torch

import dcpcomm

pytest_plugins = ["dcpcomm.testing.fixtures"]

B, H, D = 3, 12, 16
shape = dcpcomm.MergeShape(max_tokens=B, num_heads=H, head_dim=D, dtype=torch.float32, lse_base="e")


def step(group, outs, lses):
    with dcpcomm.DCPMerger(group, shape, device="cpu") as merger:
        return merger.merge(outs[group.rank], lses[group.rank])


def check(world):
    outs, lses = torch.randn(world.size, B, H, D), torch.randn(world.size, B, H)
    merged = world.run(step, outs, lses)
    expected, _ = dcpcomm.reference.merge_partials(outs, lses, lse_base="e")
    torch.testing.assert_close(torch.stack(merged).double(), expected, rtol=1e-5, atol=1e-5)


def test_made(loopback_world):
    check(loopback_world(3))


@pytest.mark.parametrize("loopback_world", [1, 2, 4], indirect=True)
def test_given(loopback_world):
    check(loopback_world)


def test_two_worlds(loopback_world):
    first, second = loopback_world(2), loopback_world(2)
    assert first is not second
    check(first)
    check(second)


def test_fails(loopback_world):
    def on_a_rank(group):
        assert group.rank != 1, "rank 1 of three fails"

    loopback_world(3).run(on_a_rank)


def test_raises(loopback_world):
    def wrong_on_one(group):
        lse = torch.zeros(B, H, dtype=torch.float64 if group.rank == 1 else torch.float32)
        with dcpcomm.DCPMerger(group, shape, device="cpu") as merger:
            merger.merge(torch.zeros(B, H, D), lse)

    loopback_world(2).run(wrong_on_one)


def test_never_ends(loopback_world):
    import time

    loopback_world(2).run(lambda group: time.sleep(3 * group.rank), timeout_s=0.2)
"""


def run(nursery: Nursery, folder: Path, *arguments: str) -> str:
    """What pytest prints of the tests in `folder`."""
    line = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "."]
    # "-W error": as in a project that lets no warning pass, pytest's own about plug-ins among them
    done = nursery.python(*line, "-W", "error", folder=folder).wait()
    return done.stdout + done.stderr


def test_a_user_loads_the_fixtures_and_reads_what_failed_on_which_rank(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(USERS_TEST)
    printed = run(nursery, tmp_path)
    assert "3 failed, 5 passed" in printed, printed
    assert "RankFailed: test_fails.<locals>.on_a_rank: rank 1 raised; rank 1:" in printed
    assert "AssertionError: rank 1 of three fails" in printed
    assert "assert 1 != 1" in printed, "the rank's own values, as pytest shows them elsewhere"
    # Of two ranks that raised, the one that was the cause.
    assert "rank 0, 1 raised; rank 1:" in printed
    assert "ShapeError: rank 1: partial_lse has dtype torch.float64" in printed
    assert "rank 1 did not return within 0.2 s" in printed


def test_a_conftest_serves_all_files_and_keeps_the_queues_of_the_gpu_apart(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["dcpcomm.testing.fixtures"]')
    for name in ("a", "b"):
        (tmp_path / f"test_{name}.py").write_text(USERS_TEST.replace("pytest_plugins", "_plugins"))
    (tmp_path / "test_queues.py").write_text(
        "import os, torch\n\n"
        "def test_them():\n"
        "    assert not torch.version.cuda or 'CUDA_DEVICE_MAX_CONNECTIONS' in os.environ\n"
        "    assert not torch.version.cuda or 'CUDA_MODULE_LOADING' in os.environ\n"
    )
    printed = run(nursery, tmp_path, "-k", "made or two or them")
    assert "5 passed" in printed, printed
    listed = run(nursery, tmp_path, "--fixtures")
    assert "loopback_world" in listed
    assert "a new `LoopbackWorld` of 4" in listed


def test_without_them_nothing_of_the_package_imports_pytest() -> None:
    code = (
        "import importlib, pkgutil, sys, dcpcomm\n"
        "for module in pkgutil.walk_packages(dcpcomm.__path__, 'dcpcomm.'):\n"
        "    if not module.name.endswith(('testing.fixtures', '__main__', '_native')):\n"
        "        importlib.import_module(module.name)\n"
        "assert 'dcpcomm.testing.conformance.suite' in sys.modules\n"
        "assert 'pytest' not in sys.modules"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
