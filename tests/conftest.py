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
import torch

# Last, so that `import dcpcomm` finds what is installed, and not the source folder beside this one.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from tests.world import ProcessPool, World

_SEED = int(os.environ.get("DCPCOMM_TEST_SEED") or secrets.randbelow(2**31))

#: (backend, ranks). "world" is everything, "peers" has somebody to talk to, "some" is for what costs seconds.
ALL = [(backend, n) for backend in ("gloo_a2a", "loopback") for n in (1, 2, 3, 4)]
ALL += [("loopback_peer", n) for n in (2, 4)]
PEERS = [(backend, n) for backend, n in ALL if n > 1]
SOME = [("gloo_a2a", 3), ("loopback", 3), ("loopback_peer", 3)]


def _name(world: tuple[str, int]) -> str:
    return f"{world[0]}-{world[1]}"


def pytest_report_header() -> str:
    return f"DCPCOMM_TEST_SEED={_SEED}"


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    pool = ProcessPool()
    yield pool
    pool.close()


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
