"""What a run of the suite came to: for people, for programs (JSON) and for CI (JUnit XML)."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Outcome", "Report", "Result"]

Outcome = Literal["passed", "failed", "not claimed"]
#: Characters that XML 1.0 has no way to write.
_NOT_XML = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")
_STYLES = {"passed": "green", "failed": "bold red", "not claimed": "yellow"}


@dataclass(frozen=True)
class Result:
    """One case on one group size.

    Attributes:
        case, proves: of the case.
        ranks: size of the group.
        outcome: "passed", "failed" or "not claimed".
        seconds: that it took.
        detail: what came and what was expected, or why it isn't claimed; "" where passed.
    """

    case: str
    proves: str
    ranks: int
    outcome: Outcome
    seconds: float
    detail: str = ""


@dataclass
class Report:
    """Of one transport.

    Attributes:
        transport: registered name.
        target: dotted path of its class.
        world: "threads" or "processes".
        seed: with which the same data come again.
        versions: of what was tested with.
        results: in the order in which they were taken.
    """

    transport: str
    target: str
    world: str
    seed: int
    versions: dict[str, str]
    results: list[Result] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether something passed and nothing failed."""
        return self.verdict == "PASS"

    @property
    def verdict(self) -> Literal["PASS", "FAIL", "NOT CLAIMED"]:
        """In a word; the last where nothing was claimed, so that nothing was shown."""
        if self.count("failed"):
            return "FAIL"
        return "PASS" if self.count("passed") else "NOT CLAIMED"

    def count(self, outcome: Outcome) -> int:
        return sum(result.outcome == outcome for result in self.results)

    @property
    def seconds(self) -> float:
        return sum(result.seconds for result in self.results)

    def to_json(self) -> dict[str, Any]:
        """Plain data, as `dcpcomm conformance --json` prints it."""
        return {"passed": self.passed, "seconds": round(self.seconds, 3), **asdict(self)}

    def to_junit(self) -> str:
        """JUnit XML: a test suite for each group size; "not claimed" is skipped, with the reason."""
        root = ET.Element("testsuites", name=f"dcpcomm conformance of {self.transport}")
        for ranks in dict.fromkeys(result.ranks for result in self.results):
            results = [result for result in self.results if result.ranks == ranks]
            suite = ET.SubElement(
                root,
                "testsuite",
                name=f"{self.transport} on {ranks} ranks",
                tests=str(len(results)),
                failures=str(sum(result.outcome == "failed" for result in results)),
                errors="0",
                skipped=str(sum(result.outcome == "not claimed" for result in results)),
                time=f"{sum(result.seconds for result in results):.3f}",
            )
            properties = ET.SubElement(suite, "properties")
            facts = {"seed": str(self.seed), "target": self.target, "world": self.world, **self.versions}
            for name, value in facts.items():
                ET.SubElement(properties, "property", name=name, value=value)
            for result in results:
                self._add_case(suite, result)
        ET.indent(root)
        return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"

    def _add_case(self, suite: ET.Element, result: Result) -> None:
        case = ET.SubElement(
            suite,
            "testcase",
            classname=f"dcpcomm.conformance.{self.transport}.{result.ranks}-ranks",
            name=result.case,
            time=f"{result.seconds:.3f}",
        )
        detail = _NOT_XML.sub("?", result.detail)
        if result.outcome == "failed":
            first = detail.partition("\n")[0]
            failure = ET.SubElement(case, "failure", message=first, type="ConformanceFailure")
            failure.text = f"{detail}\nThe case proves: {result.proves}\nseed {self.seed}"
        elif result.outcome == "not claimed":
            ET.SubElement(case, "skipped", message=f"not claimed: {detail}")

    def table(self) -> Table:
        """For a terminal."""
        from rich import box
        from rich.table import Column, Table
        from rich.text import Text

        table = Table(
            Column("case", no_wrap=True),
            Column("ranks", justify="right"),
            Column("outcome", no_wrap=True),
            Column("time", justify="right", no_wrap=True),
            Column("proves; or what came instead"),
            box=box.SIMPLE_HEAD,
        )
        for result in self.results:
            said = result.proves if result.outcome == "passed" else result.detail.partition("\n")[0]
            # Text, because details may hold brackets, which rich would take for markup.
            table.add_row(
                result.case,
                str(result.ranks),
                Text(result.outcome, _STYLES[result.outcome]),
                f"{result.seconds:.1f} s",
                Text(said),
            )
        return table

    def summary(self) -> str:
        """One line."""
        return (
            f"{self.transport}: {self.count('passed')} passed, {self.count('failed')} failed, "
            f"{self.count('not claimed')} not claimed, in {self.seconds:.1f} s over {self.world}; seed {self.seed}"
        )
