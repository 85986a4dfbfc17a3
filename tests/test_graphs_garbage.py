"""`dcpcomm.graphs`, on a pretended GPU: no garbage is collected by itself while any thread captures, and captures begin
and end one at a time.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcpcomm.graphs import captured
from tests.world import in_threads


@pytest.fixture(autouse=True)
def _pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = SimpleNamespace(capture_begin=lambda **_: None, capture_end=lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)


@pytest.mark.parametrize("enabled", [True, False])
def test_none_is_collected_until_the_last_capture_has_ended(enabled: bool) -> None:
    first_is_out, second_is_in = threading.Event(), threading.Event()
    seen: dict[str, bool] = {}
    device = torch.device("cpu")

    def first() -> None:
        captured(lambda: second_is_in.wait(30) and seen.update(both=gc.isenabled()), device)
        first_is_out.set()

    def second() -> None:
        def step() -> None:
            second_is_in.set()
            first_is_out.wait(30)
            seen["one"] = gc.isenabled()

        captured(step, device)

    before: Any = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        in_threads(first, second)
        assert seen == {"both": False, "one": False}
        assert gc.isenabled() == enabled, "as it was"
    finally:
        (gc.enable if before else gc.disable)()


def test_also_where_a_step_raises() -> None:
    def step() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        captured(step, torch.device("cpu"))
    assert gc.isenabled()


def test_captures_begin_and_end_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch notes them in tables that threads share."""
    inside, most = [0], [0]

    def slow(**_: Any) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.02)
        inside[0] -= 1

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(capture_begin=slow, capture_end=slow))
    in_threads(*[lambda: captured(lambda: None, torch.device("cpu"))] * 4)
    assert most == [1]
