"""The conformance suite itself: dcpcomm's transports pass it, and what it says and does when one doesn't."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import dcpcomm
from dcpcomm.backends.loopback import Loopback
from dcpcomm.registry import unregister_transport
from dcpcomm.testing import Case, TransportConformance, run_conformance
from dcpcomm.testing.conformance import CASES, ConformanceRun, NotHere, Rank, Report, Result, Scene, cases_like, world
from dcpcomm.transport import Capabilities
from tests import mutants
from tests.nursery import Nursery

ROOT = Path(__file__).parent.parent
OFF = {"verify": {"level": "off"}, "watchdog": {"timeout_s": 3}}


class TestGloo(TransportConformance):
    transport = "gloo_a2a"
    ranks = (3,)
    world = "processes"


class TestLoopback(TransportConformance):
    transport = "loopback"
    ranks = (2, 4)
    world = "threads"


class TestLoopbackPeer(TransportConformance):
    transport = "loopback_peer"
    ranks = (3,)


# ---------------------------------------------------------------- what it reports


def outcomes(report: Report) -> dict[str, str]:
    return {result.case: result.outcome for result in report.results}


class Modest(Loopback):
    """Claims little."""

    name: ClassVar[str] = "modest"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cpu",), dtypes=(torch.bfloat16,), world_sizes=(2, 3), deterministic=False
    )


def test_what_is_not_claimed_is_reported_with_the_declaration_that_says_so() -> None:
    report = run_conformance(Modest, ranks=(3, 4))
    by_size = {n: {r.case: r for r in report.results if r.ranks == n} for n in (3, 4)}
    three = by_size[3]
    assert {name for name, r in three.items() if r.outcome == "failed"} == set()
    unclaimed = {name: r.detail for name, r in three.items() if r.outcome == "not claimed"}
    assert unclaimed.keys() == {
        "dtype-float32",
        "dtype-float16",
        "repeatable",
        "equals-loopback",
        "graph-replay",
        "rows-mismatch-named",
    }
    assert "bfloat16" in unclaimed["dtype-float32"]
    assert unclaimed["repeatable"] == "deterministic=False"
    assert unclaimed["rows-mismatch-named"] == "ragged=False"
    assert all(r.outcome == "not claimed" and "2 to 3" in r.detail for r in by_size[4].values())
    assert [r.case for r in report.results] == 2 * [case.name for case in CASES], "no case is left out silently"


def test_names_and_lines_of_cases_are_fit_for_a_report() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    for case in CASES:
        assert case.proves
        assert "\n" not in case.proves
    assert [case.name for case in cases_like("width-*")] == [f"width-{d}" for d in (36, 64, 80, 96, 128, 576)]
    assert [case.name for case in cases_like("slow")] == ["slow-reader"]
    with pytest.raises(dcpcomm.ConfigError, match=r"heads-in-order.*two-mergers"):
        cases_like("no such case")


def a_report() -> Report:
    report = Report("mine", "pkg.mod:Mine", "threads", 7, {"torch": "2"})
    report.results = [
        Result("good", "that [it] works", 2, "passed", 0.5),
        Result("bad", "that <it> works", 2, "failed", 1.0, "got [1] & \x00 <2>\nTraceback"),
        Result("bad", "that <it> works", 3, "not claimed", 0.0, "ragged=False"),
    ]
    return report


def test_the_junit_file_has_every_case_reason_and_seed() -> None:
    root = ET.fromstring(a_report().to_junit())
    suites = root.findall("testsuite")
    counts = [tuple(suite.get(key) for key in ("tests", "failures", "skipped")) for suite in suites]
    assert counts == [("2", "1", "0"), ("1", "0", "1")]
    failure = root.find(".//failure")
    assert failure is not None
    assert failure.get("message") == "got [1] & ? <2>"
    assert failure.text is not None
    assert "Traceback" in failure.text
    skipped = root.find(".//skipped")
    assert skipped is not None
    assert skipped.get("message") == "not claimed: ragged=False"
    assert {p.get("name"): p.get("value") for p in root.findall(".//property")}["seed"] == "7"


def test_json_and_table_hold_what_was_found() -> None:
    from rich.console import Console

    report = a_report()
    data = json.loads(json.dumps(report.to_json()))
    assert data["passed"] is False
    assert [r["outcome"] for r in data["results"]] == ["passed", "failed", "not claimed"]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(report.table())
    assert "that [it] works" in capture.get()
    assert "1 passed, 1 failed, 1 not claimed" in report.summary()
    assert "seed 7" in report.summary()


def test_data_are_fresh_in_every_run_and_come_again_by_the_seed() -> None:
    case = cases_like("dtype-float32")
    first, second = (run_conformance("loopback", ranks=(2,), cases=case) for _ in range(2))
    assert first.seed != second.seed
    scene = Scene("x", 2, 5, "loopback", Loopback.capabilities)
    other = dataclasses.replace(scene, seed=6)
    draws = [torch.rand(4, generator=s.generator()) for s in (scene, scene, other)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    wrong = [run_conformance(mutants.LSERounded, cases=cases_like("lse-whole"), seed=3, config=OFF) for _ in range(2)]
    assert wrong[0].results[0].detail == wrong[1].results[0].detail != ""


# ---------------------------------------------------------------- what it does when ranks fail


def die(at: Rank) -> None:
    if at.rank == 1:
        os._exit(3)
    at.meet()


def hang(at: Rank) -> None:
    if at.rank == 1:
        time.sleep(1000)


def quarrel(at: Rank) -> None:
    if at.rank == 2:
        raise ZeroDivisionError("the cause")
    raise dcpcomm.TransportTimeout("the consequence", (2,))


def not_here(at: Rank) -> None:
    raise NotHere("no such thing on this machine")


def fine(at: Rank) -> int:
    at.meet()
    return at.rank


def judge_fine(scene: Scene, got: list[Any]) -> None:
    assert got == list(range(scene.n)), f"got {got}"


def own_case(function: Any) -> Case:
    """As an author would add it."""
    return Case(name=function.__name__, proves="something", rank_function=function, judge=judge_fine)


def test_a_case_whose_rank_dies_or_hangs_fails_naming_it_and_the_next_one_runs(monkeypatch: Any) -> None:
    with ConformanceRun("gloo_a2a", ranks=(2,), world="processes") as run:
        died = run.take(own_case(die), 2)
        after = run.take(own_case(fine), 2)
        monkeypatch.setattr(world, "CASE_LIMIT_S", 3.0)
        hung = run.take(own_case(hang), 2)
    assert (died.outcome, hung.outcome) == ("failed", "failed")
    assert "rank 1 ended with status 3" in died.detail
    assert "rank 1 did not answer" in hung.detail
    assert after.outcome == "passed", after.detail


def test_the_cause_is_told_before_its_consequences() -> None:
    report = run_conformance("loopback", cases=[own_case(quarrel), own_case(not_here), own_case(fine)])
    failed, unclaimed, passed = report.results
    assert failed.detail.startswith("rank 2 raised ZeroDivisionError: the cause")
    assert "rank 0 raised TransportTimeout" in failed.detail
    assert (unclaimed.outcome, unclaimed.detail) == ("not claimed", "no such thing on this machine")
    assert passed.outcome == "passed"


def test_after_a_failed_construction_no_case_waits_for_its_own() -> None:
    report = run_conformance(mutants.PermutedHeads, ranks=(2,))
    first, *others = report.results
    assert first.outcome == "failed"
    assert "VerificationFailed" in first.detail
    assert all(r.outcome == "failed" and "constructs" in r.detail for r in others)
    assert report.verdict == "FAIL"


def test_a_transport_known_to_this_process_only_reaches_the_ranks() -> None:
    """By `register_transport`; by path and by class it's in the registry only as long as the run."""
    dcpcomm.register_transport("group_order_ignored", mutants.GroupOrderIgnored)
    try:
        report = run_conformance("group_order_ignored", cases=cases_like("slices-by-group-rank"), config=OFF)
        assert report.results[0].outcome == "failed"
        assert "group_order_ignored" in dcpcomm.registered_transports()
    finally:
        unregister_transport("group_order_ignored")
    before = dcpcomm.registered_transports()
    for transport in (mutants.Pull, "tests.mutants:Pull", "tests.mutants.Pull"):
        report = run_conformance(transport, ranks=(2,), cases=cases_like("constructs"))
        assert (report.transport, report.verdict) == ("pull", "PASS")
        assert dcpcomm.registered_transports() == before


def test_wrong_usage_says_what_to_do() -> None:
    class Local(Loopback):
        name = "local"

    assert run_conformance(Local, ranks=(2,), cases=cases_like("constructs")).verdict == "PASS"
    with pytest.raises(dcpcomm.ConfigError, match="top level"):
        run_conformance(Local, world="processes")
    with pytest.raises(dcpcomm.ConfigError, match="2 or more"):
        run_conformance("loopback", ranks=(1,))
    with pytest.raises(dcpcomm.ConfigError, match="'loopback'"):
        run_conformance("lopback")
    with pytest.raises(dcpcomm.ConfigError, match=r"pkg\.mod:Class"):
        run_conformance("tests.mutants:NoSuchClass")
    with pytest.raises(dcpcomm.ConfigError, match="no class attribute `name`"):
        run_conformance("tests.world:World")
    assert "local" not in dcpcomm.registered_transports()


# ---------------------------------------------------------------- the command, and a plug-in author's file


def command(nursery: Nursery, *arguments: str) -> subprocess.CompletedProcess[str]:
    return nursery.python("-m", "dcpcomm", "conformance", *arguments, folder=ROOT).wait()


def test_the_command_prints_json_alone_and_writes_junit(nursery: Nursery, tmp_path: Path) -> None:
    junit = tmp_path / "report.xml"
    done = command(nursery, "gloo_a2a", "--ranks", "2", "--case", "width-*", "--json", "--junit", str(junit))
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["passed"]
    assert (data["transport"], data["world"], len(data["results"])) == ("gloo_a2a", "processes", 6)
    assert len(ET.parse(junit).getroot().findall(".//testcase")) == 6
    assert "\x1b" not in done.stderr, "a progress bar where there is no terminal"


def test_the_command_says_by_its_status_what_came_of_it(nursery: Nursery) -> None:
    done = command(nursery, "tests.mutants:WrongStride", "--case", "width-576")
    assert done.returncode == 1
    assert "FAIL" in done.stdout
    for wrong in (["nope"], ["loopback", "--ranks", "1"], ["loopback", "--case", "nope"]):
        done = command(nursery, *wrong)
        assert done.returncode == 2, wrong
        assert "dcpcomm: " in done.stderr


PLUGIN_TEST = """
from dcpcomm.testing import TransportConformance
from dcpcomm.testing.conformance import cases_like

class TestRight(TransportConformance):
    transport = "tests.mutants:Pull"
    cases = cases_like("*-mismatch-named") + cases_like("every-row")

class TestWrong(TransportConformance):
    transport = "tests.mutants:ResultReused"
    ranks = (2,)
    cases = cases_like("results-kept")
"""


def test_a_plug_in_author_inherits_one_class(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(PLUGIN_TEST)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(tmp_path)]
    done = nursery.python(*line, environment=environment, folder=tmp_path).wait()
    assert "1 failed, 2 passed, 4 skipped" in done.stdout, done.stdout
    assert "test_conformance[results-kept-2]" in done.stdout
    assert "not claimed: it merges by itself" in done.stdout
    assert "seed = " in done.stdout


def test_importing_the_suite_imports_no_pytest() -> None:
    code = (
        "import sys, dcpcomm.testing; assert 'dcpcomm.testing.conformance' not in sys.modules; "
        "from dcpcomm.testing import TransportConformance; assert 'pytest' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_command_takes_the_transport_s_options_from_a_file(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from dcpcomm.cli import app

    file = tmp_path / "options.yaml"
    file.write_text("transport: gloo_a2a\noptions: {loopback_peer: {strict: true}}\n", encoding="utf-8")
    words = ["conformance", "loopback_peer", "--ranks", "2", "--case", "constructs", "--config", str(file)]
    assert "PASS" in CliRunner().invoke(app, words).output
    file.write_text("options: {loopback_peer: {strickt: true}}\n", encoding="utf-8")
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code != 0
    assert "strickt" in f"{refused.output} {refused.exception}"


def test_each_case_is_told_as_it_ends_where_there_is_no_terminal() -> None:
    """Of a run that is killed that is all there is."""
    command = [sys.executable, "-m", "dcpcomm", "conformance", "gloo_a2a", "--ranks", "2", "--case", "constructs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"constructs: passed, \d+\.\d s\n", done.stderr)
    assert done.stdout.count("constructs") == 1
