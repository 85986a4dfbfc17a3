"""The peer family on CPU: whose memory must live, and for how long."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

import dcpcomm
from dcpcomm.testing import LoopbackWorld

SHAPE = dcpcomm.MergeShape(max_tokens=4, num_heads=4, head_dim=32, dtype=torch.float32, lse_base="e")


@pytest.mark.parametrize("first", [0, 1])
def test_a_peer_that_closes_leaves_its_memory_to_who_still_stores_there(first: int) -> None:
    meeting, memories = threading.Barrier(2, timeout=30), dict[int, Any]()

    def body(group: Any) -> bool:
        merger = dcpcomm.DCPMerger(group, SHAPE, {"transport": "loopback_peer"})
        (transport,) = merger._session.transports.values()
        memories[group.rank] = weakref.ref(transport._memory)  # type: ignore[attr-defined]
        engine: Any = transport._engine  # type: ignore[attr-defined]
        meeting.wait()
        if group.rank == first:
            engine = transport = None  # type: ignore[assignment]
            merger.close()
            del merger
        meeting.wait()
        there = True
        if group.rank != first:
            merger.close()
            del merger, transport
            gc.collect()
            there = memories[first]() is not None
            engine._blocks[first].fill_(1)
        meeting.wait()
        return there

    assert LoopbackWorld(2).run(body) == [True, True]
    gc.collect()
    assert memories[first]() is None, "nobody uses it any more, and it is there"
