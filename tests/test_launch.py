"""Local ranks: forked by one starter, and gone when whoever started them is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

import dcpcomm.launch
from dcpcomm.launch import LocalRanks, RankFailed

GONE_S = 20.0

OWNER = """
import os, signal, time
from dcpcomm.launch import LocalRanks, emit

def told():
    emit((os.getpid(), os.getppid()))
    time.sleep(100)

if __name__ == "__main__":
    LocalRanks(2).run(told, on_event=lambda rank, pids: print(*pids, flush=True))
"""


def processes() -> tuple[int, int]:
    return os.getpid(), os.getppid()


def ends(culprit: int, by: int) -> None:
    if dist.get_rank() == culprit:
        os.kill(os.getpid(), by)
    time.sleep(0.2)


def draws() -> float:
    return float(np.random.rand())


def runs(pid: int) -> bool:
    """Whether it exists, and not only because nobody has asked how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: Iterable[int]) -> None:
    until = time.monotonic() + GONE_S
    while left := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < until, f"processes {left} were left behind"
        time.sleep(0.01)


def test_none_outlives_an_owner_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    with subprocess.Popen([sys.executable, "-W", "error", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = {int(pid) for _ in range(2) for pid in owner.stdout.readline().split()}
        assert len(pids) == 3, "two ranks, and who forked them"
        assert all(map(runs, pids))
        owner.kill()
    wait_until_gone(pids)


def test_what_becomes_of_ranks_is_seen() -> None:
    """One that is killed, by how; none is left when `close` returns, however busy they are."""
    with LocalRanks(3) as ranks:
        pids = {pid for both in ranks.run(processes) for pid in both}
        with pytest.raises(RankFailed, match="the process of rank 1 ended with status -15") as failure:
            ranks.run(ends, 1, int(signal.SIGTERM))
        assert failure.value.ranks == (1,)
        assert not any(map(runs, pids))
        assert not ranks.alive
    with LocalRanks(3) as ranks:
        assert len(set(ranks.run(draws))) == 3, "forked, and yet each draws its own"
        pids = {pid for both in ranks.run(processes) for pid in both}
        assert ranks.alive
        with pytest.raises(KeyError):
            ranks.run(asks_and_sleeps, on_event=fails)
        assert not any(map(runs, pids))


def asks_and_sleeps() -> None:
    dcpcomm.launch.emit("awake")
    time.sleep(100)


def fails(rank: int, event: object) -> None:
    raise KeyError(event)


def test_between_calls_the_end_of_a_rank_or_of_the_starter_is_seen() -> None:
    with LocalRanks(2) as ranks:
        (first, starter), (second, _) = ranks.run(processes)
        os.kill(second, signal.SIGKILL)
        wait_until_gone([second])
        for _ in range(100):  # the starter has yet to ask how it ended
            if not ranks.alive:
                break
            time.sleep(0.1)
        assert not ranks.alive
        os.kill(starter, signal.SIGKILL)
        wait_until_gone([first])
        with pytest.raises(RankFailed, match="have ended"):
            ranks.run(processes)


def test_where_processes_cant_be_forked_each_starts_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcpcomm.launch, "CAN_FORK", False)
    with LocalRanks(2) as ranks:
        assert [parent for _, parent in ranks.run(processes)] == [os.getpid()] * 2
        with pytest.raises(RankFailed, match="the process of rank 1 ended with status -15"):
            ranks.run(ends, 1, int(signal.SIGTERM))
        assert not ranks.alive


def own_of_each() -> tuple[str, int]:
    """With three GPUs that aren't there; and the one that was made current."""
    import torch

    current: list[torch.device] = []
    real = torch.cuda.is_available, torch.cuda.device_count, torch.cuda.set_device
    torch.cuda.is_available, torch.cuda.device_count, torch.cuda.set_device = lambda: True, lambda: 3, current.append
    try:
        assert str(dcpcomm.launch.own_device("cpu")) == "cpu"
        assert not current
        found = str(dcpcomm.launch.own_device(None))
        assert str(dcpcomm.launch.own_device("cuda")) == found
    finally:
        torch.cuda.is_available, torch.cuda.device_count, torch.cuda.set_device = real
    return found, current[0].index


def test_ranks_of_a_command_have_a_gpu_each_as_far_as_there_are() -> None:
    with LocalRanks(4) as ranks:
        assert ranks.run(own_of_each) == [(f"cuda:{index}", index) for index in (0, 1, 2, 0)]


@pytest.mark.parametrize(("rank", "size"), [("5", "2"), ("2", "2"), ("-1", "2"), ("x", "2"), ("0", "0"), ("0", "")])
def test_a_rank_that_can_not_be_is_told_at_once(rank: str, size: str) -> None:
    place = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    done = subprocess.run(
        [sys.executable, "-m", "dcpcomm", "verify", "gloo_a2a"],
        env={**os.environ, **place}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert f"RANK={rank} and WORLD_SIZE={size}; expected whole numbers" in done.stderr
    assert "Traceback" not in done.stderr
