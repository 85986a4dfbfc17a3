"""The conformance suite: what every transport must do, one case for each way of not doing it.

    cases_rows, cases_numbers, cases_calls, cases_life      the cases
    scene, rank, partials, judging                          what they are made of
    world, runner, report                                   who runs them, and what comes of it
    suite                                                   the class to inherit in a pytest file

A case merges through `dcpcomm.DCPMerger` alone, and is judged by `dcpcomm.reference.merge_partials` in float64. Data
are fresh and random in every run; the report has the seed.
"""

from __future__ import annotations

from dcpcomm.testing.conformance.case import Case, NotHere
from dcpcomm.testing.conformance.cases import CASES, cases_like
from dcpcomm.testing.conformance.rank import Rank
from dcpcomm.testing.conformance.report import Report, Result
from dcpcomm.testing.conformance.runner import ConformanceRun, run_conformance
from dcpcomm.testing.conformance.scene import Scene
from dcpcomm.testing.conformance.suite import TransportConformance

__all__ = [
    "CASES",
    "Case",
    "ConformanceRun",
    "NotHere",
    "Rank",
    "Report",
    "Result",
    "Scene",
    "TransportConformance",
    "cases_like",
    "run_conformance",
]
