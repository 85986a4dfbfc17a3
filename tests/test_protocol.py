"""The fused kernel's protocol, searched whole for small sizes; and the search, which must find planted mistakes.

`tests/protocol` is the model. A failed test prints the shortest way to what went wrong, step by step.
"""

from __future__ import annotations

import pytest

from tests.protocol.checker import check
from tests.protocol.faults import FAULTS, Fault
from tests.protocol.scenarios import RIGHT, Case, by_name

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.scenario.name)
def test_the_protocol_holds_in_every_state(case: Case) -> None:
    report = check(case.scenario, case.protocol, reduce=case.reduce)
    assert report.violation is None, f"\n{report}"
    assert report.states >= case.states, "the search has become smaller: does it still begin?"
    assert report.ends


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_search_finds_what_is_wrong(fault: Fault) -> None:
    """The very property, by a trace that shows the mistake."""
    report = check(fault.scenario, fault.protocol, reduce=fault.reduce)
    assert report.violation is not None, f"{report}: {fault.name} was not found"
    assert report.violation.property == fault.property, f"\n{report}"
    assert any(fault.tells in line for line in report.violation.trace), f"{fault.tells!r} is not in\n{report}"


WHOLE = [
    "two words a row",
    "a weight underflows",
    "a call is skipped",
    "a call is called off",
    "another number of rows",
    "a rank is absent",
    "late, given up, reset",
]


@pytest.mark.parametrize("name", WHOLE)
def test_the_orders_left_out_lead_nowhere_else(name: str) -> None:
    """With every order of arrivals the answer is the same, and so is how it can end."""
    reduced, whole = check(by_name(name)), check(by_name(name), reduce=False)
    assert whole.violation is None, f"\n{whole}"
    assert whole.states > reduced.states
    assert whole.ends == reduced.ends


def test_a_trace_can_be_read() -> None:
    (fault,) = (fault for fault in FAULTS if fault.name == "a call skipped, tags equal")
    text = str(check(fault.scenario, fault.protocol).violation)
    assert text.startswith("wrong data: the LSE is that of {")
    assert "  1 rank 0, a: sends in epoch 1" in text
    assert "arrives: rank 1's header[slot 1, word 0] from rank 0 = {1, {a, 1}}" in text


def test_a_search_too_large_is_an_error() -> None:
    with pytest.raises(OverflowError, match="more than 50 states"):
        check(by_name("three ranks"), limit=50)
