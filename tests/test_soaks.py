"""A soak's verdict is remembered, and counts only where all ranks remember it, for exactly what was proven."""

from __future__ import annotations

import json
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import dcpcomm
from dcpcomm import verdicts
from dcpcomm.backends.loopback import Loopback
from dcpcomm.registry import unregister_transport
from dcpcomm.testing import LoopbackWorld
from dcpcomm.transport import Capabilities

SOAK = 1 << 18


class Tearing(Loopback):
    """Says that it can tear a message, and counts what it moved."""

    name: ClassVar[str] = "tearing"
    capabilities: ClassVar[Capabilities] = Capabilities(devices=("cpu",), ragged=True, soak_bytes=SOAK)
    moved: ClassVar[dict[int, int]] = {}

    def exchange(self, send: torch.Tensor, channel: int, recv: torch.Tensor | None = None) -> torch.Tensor:
        others = send.numel() - send[self.group.rank].numel()
        self.moved[self.group.rank] = self.moved.get(self.group.rank, 0) + others
        return super().exchange(send, channel, recv)


@pytest.fixture(autouse=True)
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DCPCOMM_CACHE_DIR", str(tmp_path))
    dcpcomm.register_transport("tearing", Tearing)
    yield
    unregister_transport("tearing")


def constructs(group: Any, level: str = "standard") -> None:
    shape = dcpcomm.MergeShape(max_tokens=4, num_heads=12, head_dim=32, dtype=torch.float32, lse_base="e")
    dcpcomm.DCPMerger(group, shape, {"transport": "tearing", "verify": {"level": level}}).close()


def bytes_moved(level: str = "standard") -> int:
    Tearing.moved.clear()
    LoopbackWorld(2).run(constructs, level)
    assert Tearing.moved[0] == Tearing.moved[1]
    return Tearing.moved[0]


def test_a_soak_is_run_once_and_remembered(tmp_path: Path) -> None:
    assert bytes_moved() >= SOAK, "as many bytes as it declares must really travel"
    assert len(list((tmp_path / "soaks").glob("*.json"))) == 1
    assert bytes_moved() < SOAK
    assert bytes_moved("soak") >= SOAK, "asked for, it is run again"
    assert bytes_moved("quick") < SOAK


def test_a_soak_that_nobody_declared_ends_with_small_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GiB of them took minutes, and then the deadline."""
    monkeypatch.setattr(Tearing, "capabilities", Capabilities(devices=("cpu",), ragged=True))
    exchanges: list[int] = []
    real = Tearing.exchange

    def counted(self: Tearing, *args: Any, **keywords: Any) -> torch.Tensor:
        exchanges.append(self.group.rank)
        return real(self, *args, **keywords)

    monkeypatch.setattr(Tearing, "exchange", counted)
    assert 0 < bytes_moved("soak") < 1 << 30
    assert exchanges.count(0) == exchanges.count(1) == 1000


def test_one_rank_that_does_not_remember_has_all_of_them_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bytes_moved() >= SOAK
    asked: list[str] = []
    remembers = verdicts.holds

    def forgetful(key: str) -> bool:
        asked.append(key)
        return len(asked) == 1 and remembers(key)  # of two ranks, one

    monkeypatch.setattr(verdicts, "holds", forgetful)
    assert bytes_moved() >= SOAK
    assert len(set(asked)) == 1


def test_another_group_size_is_another_verdict() -> None:
    assert bytes_moved() >= SOAK
    Tearing.moved.clear()
    LoopbackWorld(3).run(constructs)
    assert Tearing.moved[0] >= SOAK


@pytest.mark.parametrize("content", ["", "{}", '{"proven": "another"}', "[1]"])
def test_a_file_that_merely_lies_there_proves_nothing(tmp_path: Path, content: str) -> None:
    assert bytes_moved() >= SOAK
    (file,) = (tmp_path / "soaks").glob("*.json")
    assert json.loads(file.read_text())["proven"] == file.stem
    file.write_text(content)
    assert bytes_moved() >= SOAK


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCPCOMM_CACHE_DIR", "/proc/nowhere")
    assert bytes_moved() >= SOAK
    assert bytes_moved() >= SOAK


def test_ranks_that_are_threads_may_remember_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, rounds = 4, 300
    meet = threading.Barrier(ranks)
    times = [
        [10.0 ** random.randint(0, 14) / 3 for _ in range(ranks)] for _ in range(rounds)
    ]  # texts of unequal lengths
    mine = threading.local()
    monkeypatch.setattr(verdicts.time, "time", lambda: mine.at)
    interval = sys.getswitchinterval()

    def remembers(rank: int) -> list[bool]:
        found = []
        for round_ in range(rounds):
            mine.at = times[round_][rank]
            meet.wait(30)
            verdicts.remember(str(round_))
            found.append(verdicts.holds(str(round_)))
        return found

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(ranks) as threads:
            found = list(threads.map(remembers, range(ranks)))
    finally:
        sys.setswitchinterval(interval)
    assert all(all(of_rank) for of_rank in found), "who has remembered finds a whole verdict, whoever else writes it"
    assert {file.name for file in (tmp_path / "soaks").iterdir()} == {f"{round_}.json" for round_ in range(rounds)}
