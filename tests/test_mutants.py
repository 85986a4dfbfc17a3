"""Each wrong transport is caught, and by the case that is about its mistake; the same transports without it pass."""

from __future__ import annotations

from typing import Any

import pytest

from dcpcomm.testing.conformance import CASES, run_conformance
from tests import mutants

#: The class; the case that must catch it; a word of what that case must say; and a case that doesn't see the mistake,
#: for which another one is needed.
MUTANTS: list[tuple[type, str, str, str]] = [
    (mutants.PermutedHeads, "heads-in-order", "head", "constructs"),
    (mutants.DroppedLastRow, "every-row", "values are wrong", "constructs"),
    (mutants.StaleSlot, "many-calls", "values are wrong", "rows-vary"),
    (mutants.LSEBaseLost, "lse-base-2", "values are wrong", "lse-base-e"),
    (mutants.LSERounded, "lse-whole", "values are wrong", "heads-in-order"),
    (mutants.NaNLeaked, "empty-rows", "values are wrong", "dtype-float32"),
    (mutants.WrongStride, "width-576", "values are wrong", "width-128"),
    (mutants.TornHalfLine, "many-calls", "values are wrong", "late-ranks"),
    (mutants.EpochInHostMemory, "channels", "", "late-ranks"),
    (mutants.SourcesByArrival, "repeatable", "other bits", "dtype-float32"),
    (mutants.GroupOrderIgnored, "slices-by-group-rank", "values are wrong", "heads-in-order"),
    (mutants.HeaderForged, "tag-mismatch-named", "returned a result", "dtype-float32"),
    (mutants.CancelLost, "wrong-call-on-one-rank", "TransportTimeout", "dtype-float32"),
    (mutants.ClosesOnce, "close-half-done", "closed twice", "close-and-construct-again"),
    (mutants.ConnectsOnce, "two-mergers", "", "close-and-construct-again"),
    (mutants.InputAliased, "slow-reader", "values are wrong", "dtype-float32"),
    (mutants.InputChanged, "inputs-kept", "partial_out", "empty-rows"),
    (mutants.ResultReused, "results-kept", "changed by later calls", "many-calls"),
]

#: The framework proves a transport when it is constructed; here the cases themselves are on trial.
UNVERIFIED: dict[str, Any] = {"verify": {"level": "off"}, "watchdog": {"timeout_s": 5}}


@pytest.mark.parametrize(("mutant", "catcher", "word", "blind"), MUTANTS, ids=[row[0].name for row in MUTANTS])
def test_each_mutant_is_caught_by_its_case(mutant: Any, catcher: str, word: str, blind: str) -> None:
    """And not by an easier one."""
    cases = [case for name in (blind, catcher) for case in CASES if case.name == name]
    passed, caught = run_conformance(mutant, ranks=(3,), cases=cases, config=UNVERIFIED).results
    assert passed.outcome == "passed", f"{blind} was thought not to see it: {passed.detail}"
    assert caught.outcome == "failed", f"{catcher} let {mutant.name} through"
    assert word in caught.detail


@pytest.mark.parametrize("right", ["loopback", mutants.Pull], ids=["loopback", "pull"])
def test_the_unmutated_pass_every_case(right: Any) -> None:
    report = run_conformance(right, ranks=(2,), config=UNVERIFIED)
    failed = {result.case: result.detail for result in report.results if result.outcome == "failed"}
    assert not failed
    assert report.count("passed") > 30
