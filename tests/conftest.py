"""Fixtures: worlds to run ranks in, and random data that a failure can be reproduced with.

Data are fresh in every run. A failed test prints the seed; `DCPCOMM_TEST_SEED=<seed> pytest <test>` repeats
its data.
"""

from __future__ import annotations

import os
import secrets
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

# Workers, their ranks and what they start share few cores: matrices this small only wait for more threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# Last, so that `import dcpcomm` finds what is installed, and not the source folder beside this one.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from tests.nursery import Nursery
from tests.world import ProcessPool, World

_SEED = int(os.environ.get("DCPCOMM_TEST_SEED") or secrets.randbelow(2**31))

#: (backend, ranks). "world" is everything, "peers" has somebody to talk to, "some" is for what costs seconds.
ALL = [(backend, n) for backend in ("gloo_a2a", "loopback") for n in (1, 2, 3, 4)]
ALL += [("loopback_peer", n) for n in (2, 4)]
PEERS = [(backend, n) for backend, n in ALL if n > 1]
SOME = [("gloo_a2a", 3), ("loopback", 3), ("loopback_peer", 3)]


#: Files whose tests take long, each for itself: begun first, so that at the end no worker waits for the other.
SLOW = (
    "trial", "docs", "demo", "conformance", "mutants", "cli_explain_verify", "nvrtc_gpu_path", "nvrtc_merges",
    "nccl_on_cpu", "agreement_processes", "agreement_absence", "exit", "plugin_safety", "fixtures", "protocol",
    "cupy_ipc", "put_signal", "nvshmem", "nvrtc_fused", "nvrtc_scale", "nvrtc_compiles", "hazards_absence", "watchdog",
    "cli_bench", "adapters_examples",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first, those that only a GPU runs last; else as they came."""

    def place(item: pytest.Item) -> int:
        if item.path.parent.name == "gpu":
            return len(SLOW) + 1
        name = item.path.stem.removeprefix("test_")
        return SLOW.index(name) if name in SLOW else len(SLOW)

    items.sort(key=place)


def _name(world: tuple[str, int]) -> str:
    return f"{world[0]}-{world[1]}"


def pytest_report_header() -> str:
    return f"DCPCOMM_TEST_SEED={_SEED}"


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    pool = ProcessPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(params=ALL, ids=_name)
def world(request: pytest.FixtureRequest, pool: ProcessPool) -> World:
    return World(*request.param, pool)


@pytest.fixture(params=PEERS, ids=_name)
def peers(request: pytest.FixtureRequest, pool: ProcessPool) -> World:
    return World(*request.param, pool)


@pytest.fixture(params=SOME, ids=_name)
def some(request: pytest.FixtureRequest, pool: ProcessPool) -> World:
    return World(*request.param, pool)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of this test's own, made from the session's."""
    print(f"to repeat: DCPCOMM_TEST_SEED={_SEED}")
    return _SEED ^ zlib.crc32(request.node.nodeid.encode())


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
