"""Fixtures for users' tests: ranks that are threads of the test's process. A plug-in of pytest, and the only module of
dcpcomm that needs it.

In a test file, or in the `conftest.py` at the root of the tests:

    pytest_plugins = ["dcpcomm.testing.fixtures"]
"""

from __future__ import annotations

from typing import Any

import pytest

from dcpcomm.testing.loopback import LoopbackWorld, side_by_side

__all__ = ["loopback_world"]


def pytest_configure() -> None:
    """Called by pytest when it loads this module: before the tests start CUDA, if it is loaded early enough."""
    side_by_side()


@pytest.fixture
def loopback_world(request: pytest.FixtureRequest) -> Any:
    """Makes worlds of virtual ranks: `loopback_world(4)` is a new `LoopbackWorld` of 4.

    `world.run(fn, *args)` calls `fn(group, *args)` on every rank at once, each in a thread, and returns the results by
    rank. Where a rank raises, an `assert` too, `run` raises `dcpcomm.launch.RankFailed` with that rank's traceback.

    Example:
        def test_ranks_hold_their_slices(loopback_world):
            def step(group):
                with dcpcomm.DCPMerger(group, shape, device="cpu") as merger:
                    return merger.merge(outs[group.rank], lses[group.rank])

            results = loopback_world(4).run(step)  # by rank

    Parametrized indirectly it is the world itself, of as many ranks as the parameter says:

        @pytest.mark.parametrize("loopback_world", [2, 4], indirect=True)
        def test_any_number_of_ranks(loopback_world):
            assert len(loopback_world.run(step)) == loopback_world.size
    """
    size = getattr(request, "param", None)
    return LoopbackWorld if size is None else LoopbackWorld(size)
