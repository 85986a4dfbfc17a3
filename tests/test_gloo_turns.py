"""Who sends first over Gloo: at once, or where cores are few and messages large, one rank of a host after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dcpcomm
from dcpcomm.backends import gloo_a2a


class Recorder:
    """In the place of a Gloo group: notes what is asked of it, in order."""

    def __init__(self, *_: Any) -> None:
        self.said: list[str] = []

    def recv(self, _: Any, peer: int, tag: int) -> Any:
        self.said.append(f"recv {peer}")
        return SimpleNamespace(wait=lambda limit: self.said.append(f"came {peer}"))

    def send(self, _: Any, peer: int, tag: int) -> Any:
        self.said.append(f"send {peer}")
        return SimpleNamespace(wait=lambda limit: self.said.append(f"sent {peer}"))


def asked(monkeypatch: pytest.MonkeyPatch, *, cores: int, rows: int, hosts: list[str], rank: int) -> list[str]:
    monkeypatch.setattr(gloo_a2a, "_cores", lambda: cores)
    monkeypatch.setattr(gloo_a2a.dist, "ProcessGroupGloo", Recorder)
    n = len(hosts)
    group = SimpleNamespace(
        rank=rank,
        size=n,
        hosts=hosts,
        peers=[(rank + step) % n for step in range(1, n)],
        timeout_s=1.0,
        exchange_timeout_s=1.0,
        store=lambda purpose: None,
    )
    shape = dcpcomm.MergeShape(max_tokens=rows, num_heads=n, head_dim=128, dtype=torch.float32, lse_base="e")
    transport = gloo_a2a.GlooA2A(group, shape, None)  # type: ignore[arg-type]
    transport.prepare()
    transport.connect([])
    blocks = torch.zeros(n, 1 + rows, 528, dtype=torch.uint8)
    transport.exchange(blocks, 0, torch.zeros_like(blocks))
    return list(transport._gloo[0].said)


def test_the_second_of_two_answers_where_cores_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    said = asked(monkeypatch, cores=2, rows=200, hosts=["a", "a"], rank=1)
    assert said[:3] == ["recv 0", "came 0", "send 0"]


def test_the_first_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    said = asked(monkeypatch, cores=2, rows=200, hosts=["a", "a"], rank=0)
    assert said[:2] == ["recv 1", "send 1"]


@pytest.mark.parametrize(
    "case",
    [
        {"cores": 4, "rows": 200, "hosts": ["a", "a"]},
        {"cores": 2, "rows": 20, "hosts": ["a", "a"]},
        {"cores": 2, "rows": 200, "hosts": ["a", "b"]},
    ],
    ids=["cores enough", "small messages", "other hosts"],
)
def test_else_both_send_at_once(monkeypatch: pytest.MonkeyPatch, case: Any) -> None:
    assert asked(monkeypatch, **case, rank=1)[:2] == ["recv 0", "send 0"]


def test_of_three_nobody_waits_for_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 would wait for rank 0, and rank 1 would blame rank 2."""
    said = asked(monkeypatch, cores=2, rows=200, hosts=["a", "a", "a"], rank=2)
    assert said[:4] == ["recv 0", "recv 1", "send 0", "send 1"]
