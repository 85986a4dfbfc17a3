"""Steps of a long check: what they print is kept, and past their limit nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpcomm.bench import steps
from dcpcomm.bench.steps import LEAST_S, Step, limit_for, run_step

# A child, one in a session of its own (as torchrun's ranks are), and one that its parent has left; then: asleep.
HANGS = """
import os, subprocess, sys, time
sleeper = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
orphan = [sys.executable, "-c", "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(600)"]
started = [subprocess.Popen(sleeper), subprocess.Popen(sleeper, start_new_session=True)]
subprocess.Popen(orphan).wait()
print(os.getpid(), *(one.pid for one in started), flush=True)
print("words", file=sys.stderr, flush=True)
THEN
"""


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_GRACE_S", 1.0)


def step(code: str, name: str = "one") -> Step:
    return Step(name, "verify", 2, "some", (sys.executable, "-c", code), 30.0)


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


def all_marked() -> set[int]:
    """Processes of any step of this test's."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"_TEST_STEPS={os.getpid()}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    return found - {os.getpid()}


# ---------------------------------------------------------------- outcomes


def test_a_step_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TEST_STEPS", str(os.getpid()))
    done = run_step(step(HANGS.replace("THEN", "time.sleep(600)")), tmp_path, 5.0)
    pids = [int(word) for word in (tmp_path / "one.out").read_text().split()]
    assert len(pids) == 3
    assert not any(map(alive, pids))
    assert not all_marked(), "the orphan too"
    assert (done.state, done.status) == ("out of time", None)
    assert done.detail == "ended at its limit of 5 s, with 4 processes"
    assert done.limit_s == 5.0
    assert 5.0 <= done.seconds < 25.0
    assert done.files == ["one.err", "one.out"]
    assert (tmp_path / "one.err").read_text() == "words\n"


def test_what_a_step_leaves_behind_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TEST_STEPS", str(os.getpid()))
    done = run_step(step(HANGS.replace("THEN", "os._exit(0)")), tmp_path, 60.0)
    assert (done.state, done.status) == ("passed", 0)
    assert done.detail == "it left 3 processes behind, now ended"
    assert not all_marked()


def test_one_that_would_not_end_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that waits in a driver: here it is only said to live."""
    monkeypatch.setattr(steps, "_GRACE_S", 0.1)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setattr(steps, "_marked", lambda mark: {gone.pid})
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    done = run_step(step(""), tmp_path, 60.0)
    assert done.detail == "it left 1 process behind, now ended; 1 process would not end, and may still hold a GPU"


def test_another_process_of_the_same_program_is_left_alone(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert run_step(step("import time; time.sleep(600)"), tmp_path, 1.0).state == "out of time"
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize(
    ("code", "state", "detail", "status"),
    [
        ("print('fine')", "passed", "", 0),
        ("raise SystemExit(3)", "failed", "exit status 3", 3),
        ("import os; os.kill(os.getpid(), 9)", "failed", "signal 9", -9),
    ],
)
def test_how_a_step_ended_is_told(tmp_path: Path, code: str, state: str, detail: str, status: int) -> None:
    done = run_step(step(code), tmp_path, 60.0)
    assert (done.state, done.detail, done.status) == (state, detail, status)


def test_a_step_that_cannot_be_started_has_failed(tmp_path: Path) -> None:
    done = run_step(Step("one", "verify", 2, "some", (str(tmp_path / "nothing"),), 30.0), tmp_path, 60.0)
    assert done.state == "failed"
    assert done.detail.startswith("could not be started")


def test_an_interruption_ends_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TEST_STEPS", str(os.getpid()))

    over = threading.Event()

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while not ((tmp_path / "one.err").exists() and (tmp_path / "one.err").stat().st_size):
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        while not over.is_set():  # one that is raised in a finaliser is lost
            os.kill(os.getpid(), signal.SIGINT)
            over.wait(20)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_step(step(HANGS.replace("THEN", "time.sleep(600)")), tmp_path, 110.0)
    finally:
        over.set()
        thread.join(5)
    assert not all_marked()


# ---------------------------------------------------------------- budget

wishes = st.floats(LEAST_S, 1000.0)


def test_a_step_gets_all_it_wants_where_there_is_time_and_three_times_that_at_the_most() -> None:
    assert limit_for(60.0, 300.0, 360.0) == 60.0
    assert limit_for(60.0, 300.0, 720.0) == 120.0
    assert limit_for(60.0, 300.0, 36_000.0) == 180.0


def test_a_step_gets_its_share_where_there_is_not() -> None:
    assert limit_for(100.0, 300.0, 200.0) == 50.0


def test_nothing_is_begun_without_time_to_start_in() -> None:
    assert limit_for(60.0, 0.0, LEAST_S - 0.1) is None
    assert limit_for(60.0, 6000.0, 200.0) == LEAST_S


@given(st.lists(wishes, min_size=1, max_size=30), st.floats(0.0, 20_000.0), st.floats(0.0, 1.0))
def test_limits_never_exceed_the_budget_and_spare_time_is_passed_on(
    wanted: list[float], budget: float, used: float
) -> None:
    left = budget
    for number, wish in enumerate(wanted):
        limit = limit_for(wish, sum(wanted[number + 1 :]), left)
        if limit is None:
            assert left < LEAST_S
            continue
        assert min(LEAST_S, left) <= limit <= min(3 * wish, left)
        left -= limit * used
    assert left >= 0
    if sum(wanted) <= budget * 0.999:
        left = budget
        for number, wish in enumerate(wanted):  # each takes what it wants, and there is enough for the last
            limit = limit_for(wish, sum(wanted[number + 1 :]), left)
            assert limit is not None
            assert limit >= wish * 0.999
            left -= wish
