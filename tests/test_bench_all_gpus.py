"""`dcpcomm.bench.all_gpus`: the steps for any number of GPUs, and that whatever becomes of one, the others are made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import dcpcomm.cli
from dcpcomm.bench import all_gpus, replays, steps
from dcpcomm.bench.all_gpus import Contender, contenders, narrowed, plan, run_all, sizes_for
from dcpcomm.bench.steps import Done, Step

SOME = (Contender("a_peer", True), Contender("b_wire", False))
FINE, FAILS, HANGS = "print('fine')", "raise SystemExit(1)", "import time; time.sleep(600)"


def names(gpus: int, *, transports: Any = SOME) -> list[str]:
    return [one.name for one in plan(gpus, transports)]


# ---------------------------------------------------------------- the plan


@pytest.mark.parametrize(
    ("gpus", "sizes"),
    [(0, ()), (1, (8, 4, 2)), (2, (2,)), (3, (3,)), (4, (4,)), (6, (6, 4)), (8, (8, 4)), (16, (16, 8, 4))],
)
def test_sizes_are_all_gpus_and_8_and_4_of_them(gpus: int, sizes: tuple[int, ...]) -> None:
    assert sizes_for(gpus) == sizes
    assert {one.ranks for one in plan(gpus, SOME)} == set(sizes)


def test_without_a_gpu_there_is_nothing_to_do() -> None:
    assert plan(0, SOME) == []


@pytest.mark.parametrize("gpus", [2, 4])
def test_every_transport_is_proven_before_anything_is_timed(gpus: int) -> None:
    n = f"n{gpus}"
    assert names(gpus) == [
        f"{n}-probe", f"{n}-verify-a_peer", f"{n}-verify-b_wire", f"{n}-merge", f"{n}-replays-a_peer",
        f"{n}-conformance-a_peer", f"{n}-conformance-b_wire",
    ]  # fmt: skip


def test_eight_gpus_are_tried_together_first_and_then_four() -> None:
    four = names(4)
    eight = [name.replace("n4", "n8") for name in four]
    assert names(8) == [*eight[:5], *four[:5], *eight[5:], *four[5:]]


def test_one_gpu_has_virtual_ranks_and_every_step_says_so() -> None:
    made = plan(1, SOME)
    assert [one.name for one in made] == [
        *(f"n{n}-virtual-{what}" for n in (8, 4, 2) for what in ("merge", "replays-loopback_peer")),
        "n2-probe", "n2-verify-a_peer", "n2-verify-b_wire",
        *(f"n{n}-virtual-conformance-loopback_peer" for n in (8, 4, 2)),
    ]  # fmt: skip
    told = {one.ranks: one.command[one.command.index("--replays") + 1] for one in made if one.kind == "replays"}
    assert told == {2: "100000", 4: "50000", 8: "25000"}
    assert sum(one.wants_s for one in plan(1, contenders())) <= 630, "more than there is in ten minutes"
    assert all("of one GPU" in one.note or "share one GPU" in one.note for one in made if one.kind != "probe")
    assert all("torch.distributed.run" not in one.command for one in made)


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 6, 8])
def test_every_command_is_one_that_its_program_takes(gpus: int) -> None:
    programs = {"dcpcomm": dcpcomm.cli.app, "dcpcomm.bench.replays": replays.main}
    for step in plan(gpus, contenders(), commit="0123abc"):
        words = list(step.command)
        assert words[:2] == [sys.executable, "-m"]
        if words[2] == "torch.distributed.run":
            assert words[3:6] == ["--standalone", "--nproc-per-node", str(step.ranks)]
            words = words[5:]
            assert words[1] == "-m"
        else:
            assert str(step.ranks) == words[words.index("--ranks") + 1]
        program, given = programs[words[2]], words[3:]
        if not isinstance(program, typer.Typer):
            made = typer.Typer()
            made.command()(program)
            program = made
        command: Any = typer.main.get_command(program)
        if hasattr(command, "get_command"):
            command, given = command.get_command(None, given[0]), given[1:]
        values = command.make_context(step.name, given).params  # raises on what it doesn't know
        heads = values.get("heads", values.get("num_heads"))
        assert heads is None or int(heads) % step.ranks == 0
        assert step.transport in ("", *_flat(values))


def _flat(values: dict[str, Any]) -> list[Any]:
    return [one for value in values.values() for one in (value if isinstance(value, list | tuple) else [value])]


def test_no_two_steps_share_a_file() -> None:
    for gpus in (1, 2, 4, 8, 16):
        made = names(gpus, transports=contenders())
        assert len(set(made)) == len(made)


def test_transports_between_threads_are_no_contenders() -> None:
    found = {one.name: one.peer for one in contenders()}
    assert not {"loopback", "loopback_peer", "gloo_a2a"} & set(found)
    assert found["cupy_ipc"]
    assert not found["nccl_a2a"]


def test_a_plan_is_narrowed_to_kinds_and_transports() -> None:
    made = plan(8, SOME)
    only = [one.name for one in narrowed(made, ["verify"], ["b_wire"])]
    assert only == ["n8-probe", "n8-verify-b_wire", "n4-probe", "n4-verify-b_wire"]
    assert [one.name for one in narrowed(made, ["merge"], [])] == ["n8-merge", "n4-merge"]
    assert narrowed(made, [], []) == made
    assert "n2-probe" not in {one.name for one in narrowed(plan(1, SOME), ["replays"], [])}


# ---------------------------------------------------------------- running


def step(name: str, code: str, kind: str = "verify", transport: str = "", wants_s: float = 60.0) -> Step:
    return Step(name, kind, 2, transport, (sys.executable, "-c", code), wants_s)


def run(made: list[Step], folder: Path, budget_s: float = 100.0) -> tuple[list[Done], list[str]]:
    said: list[str] = []
    return run_all(made, folder, budget_s, {"gpus": 2}, said.append), said


def summary(folder: Path) -> dict[str, str]:
    read = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert read["gpus"] == 2
    assert sys.executable not in json.dumps(read), "a path of this machine's"
    assert all(one["command"].startswith("python -c ") for one in read["steps"])
    return {one["name"]: one["state"] for one in read["steps"]}


def test_whatever_becomes_of_a_step_the_others_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "LEAST_S", 1.0)
    made = [step("one", FAILS), step("two", HANGS, wants_s=1.0), step("three", FINE)]
    done, said = run(made, tmp_path, 61.0)
    assert [one.state for one in done] == ["failed", "out of time", "passed"]
    assert summary(tmp_path) == {"one": "failed", "two": "out of time", "three": "passed"}
    assert (tmp_path / "three.out").read_text() == "fine\n"
    assert said[-2].startswith("three: begun, for ")
    assert said[-1].startswith("three: passed in ")


def test_what_the_budget_does_not_reach_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "LEAST_S", 2.0)
    done, _ = run([step("one", HANGS), step("two", FINE), step("three", FINE)], tmp_path, 2.5)
    assert [one.state for one in done] == ["out of time"] * 3
    assert done[1].detail == "not begun: the budget is spent"
    assert not (tmp_path / "two.out").exists()


PROBE = f"""print('''{json.dumps({"transports": [
    {"name": "a_peer", "verdict": "no", "reason": "no link", "remedy": "get one"},
    {"name": "b_wire", "verdict": "if named", "reason": "not proven here", "remedy": ""},
    {"name": "loopback_peer", "verdict": "no", "reason": "no threads", "remedy": ""},
]})}''')"""  # fmt: skip


def test_what_the_probe_says_cannot_work_is_skipped_with_the_reason(tmp_path: Path) -> None:
    made = [
        step("early", FINE, transport="a_peer"),
        step("probe", PROBE, "probe"),
        *(step(name, FINE, transport=name) for name in ("a_peer", "b_wire", "loopback_peer")),
        Step("other n", "verify", 4, "a_peer", (sys.executable, "-c", FINE), 60.0),
    ]
    done, said = run(made, tmp_path)
    assert [one.state for one in done] == ["passed", "passed", "skipped", "passed", "passed", "passed"]
    assert done[2].detail == "no link; get one"
    assert "a_peer: skipped (no link; get one)" in said


def test_who_does_not_prove_itself_has_no_further_steps(tmp_path: Path) -> None:
    made = [
        step("proof", FAILS, transport="a_peer"),
        step("proof of b", FINE, transport="b_wire"),
        step("a", FINE, "replays", "a_peer"),
        step("b", FINE, "conformance", "b_wire"),
        step("both", FINE, "merge"),
    ]
    done, _ = run(made, tmp_path)
    assert [one.state for one in done] == ["failed", "passed", "skipped", "passed", "passed"]
    assert done[2].detail == "proof failed"


@pytest.mark.parametrize(
    ("verdict", "note", "state"),
    [
        ("unusable", all_gpus._SHARED, "skipped"),  # with a GPU for each rank it could be used
        ("unusable", "", "failed"),
        ("WRONG", all_gpus._SHARED, "failed"),
    ],
)
def test_what_cannot_work_on_a_shared_gpu_is_skipped(tmp_path: Path, verdict: str, note: str, state: str) -> None:
    said = json.dumps([{"name": "b_wire", "verdict": verdict, "why": "a GPU for each rank"}])
    proof = replace(step("proof", f"print({said!r}); raise SystemExit(1)", transport="b_wire"), note=note)
    (done,), _ = run([proof], tmp_path)
    assert done.state == state
    if state == "skipped":
        assert done.detail == "a GPU for each rank"


def test_a_probe_that_fails_skips_nothing(tmp_path: Path) -> None:
    done, _ = run([step("probe", FAILS, "probe"), step("one", FINE, transport="a_peer")], tmp_path)
    assert [one.state for one in done] == ["failed", "passed"]


# ---------------------------------------------------------------- the command


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def command(*words: str) -> Any:
    app = typer.Typer()
    app.command()(all_gpus.main)
    return CliRunner().invoke(app, words)


def with_steps(monkeypatch: pytest.MonkeyPatch, *made: Step) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(all_gpus, "plan", lambda *given: list(made))


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_it_says_so_and_exits_2(tmp_path: Path) -> None:
    done = command("--out", str(tmp_path / "results"))
    assert done.exit_code == 2
    assert "needs a CUDA GPU" in done.stderr
    assert not (tmp_path / "results").exists()


def test_a_dry_run_for_no_gpu_says_so_too() -> None:
    assert command("--dry-run", "--gpus", "0").exit_code == 2


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_a_dry_run_prints_every_step_and_its_limit(gpus: int) -> None:
    done = command("--dry-run", "--gpus", str(gpus), "--minutes", "1000")
    assert done.exit_code == 0
    made = plan(gpus, contenders())
    for one in made:
        assert f"\n{one.name}  [{3 * one.wants_s:.0f} s]" in done.stdout
        assert " ".join(one.command[1:]) in done.stdout
    assert done.stdout.startswith(f"{gpus} GPU(s): {len(made)} steps")
    assert "share of what is left" in command("--dry-run", "--gpus", str(gpus), "--minutes", "1").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "2", "--out", "x"], "--gpus 2"),
        (["--dry-run", "--gpus", "2", "--only", "timing"], "--only timing"),
        (["--dry-run", "--gpus", "2", "--transport", "smoke"], "--transport smoke"),
    ],
)
def test_wrong_usage_is_refused(words: list[str], said: str) -> None:
    done = command(*words)
    assert done.exit_code == 2
    assert said in done.stderr


def test_results_need_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    with_steps(monkeypatch, step("one", FINE))
    done = command()
    assert done.exit_code == 2
    assert "--out is missing" in done.stderr


@pytest.mark.parametrize(
    ("codes", "status"), [([FINE, FINE], 0), ([FINE, FAILS], 1), ([FAILS, FINE], 1), ([FINE, HANGS], 1)]
)
def test_the_exit_status_tells_if_all_has_passed(
    codes: list[str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "LEAST_S", 1.0)
    wants = {HANGS: 1.0}
    made = [step(f"step-{i}", code, wants_s=wants.get(code, 60.0)) for i, code in enumerate(codes)]
    with_steps(monkeypatch, *made)
    done = command("--out", str(tmp_path / "deep" / "results"), "--commit", "0123abc")
    assert done.exit_code == status
    read = json.loads((tmp_path / "deep" / "results" / "summary.json").read_text(encoding="utf-8"))
    assert len(read["steps"]) == 2
    assert read["commit"] == "0123abc"
    assert read["budget_s"] == 600.0
    assert read["machine"]["gpus"] == ["a GPU", "a GPU"]


def test_where_all_is_skipped_nothing_has_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_steps(monkeypatch, step("probe", PROBE, "probe"), step("one", FINE, transport="a_peer"))
    assert command("--out", str(tmp_path)).exit_code == 1


ENDED = """
import sys, torch, typer
from dcpcomm.bench import all_gpus
from dcpcomm.bench.steps import Step
torch.cuda.device_count, torch.cuda.get_device_name = lambda: 2, lambda index: "a GPU"
sleeps = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
all_gpus.plan = lambda *given: [Step("one", "verify", 2, "", (sys.executable, "-c", sleeps), 60.0)]
typer.run(all_gpus.main)
"""


def test_ended_from_outside_it_ends_its_step_and_keeps_the_summary(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ENDED, "--out", str(tmp_path)], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not ((file := tmp_path / "one.out").exists() and file.read_text().endswith("\n")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "one.out").read_text()), 0)
    read = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert [(one["state"], one["detail"]) for one in read["steps"]] == [("failed", "interrupted: SystemExit")]
