"""The class that a plug-in author's pytest file inherits. pytest finds it by its hooks; nothing here imports pytest
before a test runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dcpcomm.testing.conformance.case import Case
from dcpcomm.testing.conformance.cases import CASES
from dcpcomm.testing.conformance.runner import ConformanceRun, WorldName
from dcpcomm.transport import MergeTransport

__all__ = ["TransportConformance"]


class TransportConformance:
    """One test for each case and group size.

    Example:
        from dcpcomm.testing import TransportConformance

        class TestMine(TransportConformance):
            transport = "mine"

    Attributes:
        transport: a registered name, "pkg.mod:Class", or the class.
        ranks: group sizes.
        world: "processes", "threads" or "auto": what the transport's own `check` says.
        cases: the suite's, to which an author may add.
        config: keys of a merger's configuration: `{"options": {"mine": {"lanes": 2}}}`, say.
        seed: of the data; None is a fresh one in every run, which failures name.
    """

    transport: ClassVar[str | type[MergeTransport]]
    ranks: ClassVar[Sequence[int]] = (2, 3)
    world: ClassVar[WorldName] = "auto"
    cases: ClassVar[Sequence[Case]] = CASES
    config: ClassVar[Mapping[str, Any]] = {}
    seed: ClassVar[int | None] = None
    device: ClassVar[str | None] = None

    _run: ClassVar[ConformanceRun | None] = None

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Called by pytest on collection."""
        if {"case", "size"} <= set(metafunc.fixturenames):
            pairs = [(case, size) for size in self.ranks for case in self.cases]
            metafunc.parametrize(("case", "size"), pairs, ids=[f"{case.name}-{size}" for case, size in pairs])

    @classmethod
    def setup_class(cls) -> None:
        cls._run = ConformanceRun(
            cls.transport, ranks=cls.ranks, world=cls.world, config=cls.config, seed=cls.seed, device=cls.device
        )

    @classmethod
    def teardown_class(cls) -> None:
        if cls._run is not None:
            cls._run.close()
            cls._run = None

    def test_conformance(self, case: Case, size: int) -> None:
        """Skipped, with the reason, where the transport doesn't claim what the case proves."""
        assert self._run is not None
        result = self._run.take(case, size)
        if result.outcome == "not claimed":
            import pytest

            pytest.skip(f"not claimed: {result.detail}")
        if result.outcome == "failed":
            raise AssertionError(
                f"{self._run.report.transport} on {size} ranks, {case.name}: {result.detail}\nThe case proves: "
                f"{case.proves}. To repeat its data: seed = {self._run.report.seed}"
            )
