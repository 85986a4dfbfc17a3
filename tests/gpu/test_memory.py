"""Row 29 of the list of faults on one GPU: what is taken is what was planned, all of it comes back, nothing grows."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import dcpcomm
from dcpcomm.graphs import captured
from tests.gpu.rig import (
    BF16,
    DEVICE,
    ONE_GPU,
    capture,
    here,
    join,
    merger_for,
    mine,
    needs_gpu,
    on,
    poisoned,
    room_for,
    run,
    settle,
    side_streams,
    together,
)
from tests.oracle import Case, judge, make_case
from tests.world import config_for, meet, shape_of

pytestmark = [*ONE_GPU, needs_gpu]
RANKS = pytest.mark.parametrize("n", [2, 4])
#: What torch itself keeps for a graph: a seed and an offset.
PER_GRAPH = 4096


def taken() -> tuple[int, int]:
    """Bytes that are asked for now, and the blocks that hold them, of all ranks. All of them read it at once."""
    together()
    gc.collect()
    meet()
    stats = torch.cuda.memory_stats(DEVICE)
    found = stats["requested_bytes.all.current"], stats["allocated_bytes.all.current"]
    meet()
    return found


def reserved() -> int:
    together()
    held = torch.cuda.memory_reserved(DEVICE)
    meet()
    return held


def of_construction(group: Any, shape: dict[str, Any], case: Case) -> Any:
    """What is taken before, with a merger, after a merge, after a reset, and after close(); the merger still held."""
    (one,) = mine([case], group.rank)
    found = [taken()]
    merger = merger_for(group, shape)
    found.append(taken())
    out, _ = room_for(merger, case.outs.shape[1])
    found.append(taken())
    merger.merge(*one, out=out)
    found.append(taken())
    merger.reset()
    found.append(taken())
    merger.close()
    found.append(taken())
    return found, merger


SHAPES: list[dict[str, Any]] = [
    {},
    {"channels": 3, "scatter": "none", "max_tokens": 5},
    {"scatter": "tokens", "max_tokens": 17, "head_dim": 24, "v_head_dim": 72, "dtype": torch.float32},
]


def device_bytes_of(group: Any, shape: dict[str, Any]) -> Any:
    with merger_for(group, shape) as merger:
        assert dcpcomm.plan_bytes(merger.shape, group.size, config_for(group)) == merger.device_bytes
        return merger.device_bytes


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=["heads", "none", "tokens"])
def test_construction_takes_what_was_planned_to_the_byte(n: int, rng: torch.Generator, shape: dict[str, Any]) -> None:
    """By torch's own count of requests; and the blocks, small ones, are no larger than 512 bytes make them."""
    whole = shape_of(n, **shape)
    case = make_case(rng, n, b=2 * n if whole.scatter == "tokens" else 4, d=whole.head_dim, dtype=whole.dtype)
    planned = run(n, device_bytes_of, shape)
    assert len(set(planned)) == 1
    gc.collect()
    keep = (
        captured(lambda: poisoned((1,), BF16), DEVICE) if torch.cuda.is_available() else None
    )  # torch's own, for good
    by_rank = run(n, of_construction, shape, case)
    for rank, (found, _) in enumerate(by_rank):
        (before, before_blocks), (made, made_blocks), (room, _), (used, _), (again, _), (closed, _) = found
        assert made - before == n * planned[0], f"rank {rank}: {n} x {planned[0]} were planned"
        # Two requests of each rank: the engine's counts of calls, and what the transport offers to its peers.
        assert made_blocks - before_blocks <= n * (planned[0] + 2 * 512), f"rank {rank}"
        assert used == room, f"rank {rank}: a merge into `out` took {used - room} bytes for good"
        assert again == room, f"rank {rank}: reset() took {again - room} bytes for good"
        assert closed - before == room - made, f"rank {rank}: close() kept {closed - before - (room - made)} bytes"
    del keep


def at_work(group: Any, cases: list[Case], calls: int) -> Any:
    """Three graphs, then eager calls on two streams and replays, every result dropped; what is held in between."""
    rank, n = group.rank, group.size
    data = mine(cases, rank)
    streams = side_streams(2)
    config = {"verify": {"level": "off"}}
    rooms = []
    before = taken()[0]
    with merger_for(group, {"channels": 2}, **config) as merger:
        rooms = [room_for(merger, case.outs.shape[1])[0] for case in cases]
        room_bytes = n * sum(room.numel() * room.element_size() for room in rooms)

        def step(i: int) -> None:
            merger.merge(*data[i], out=rooms[i], channel=i % 2)

        graphs = [capture(lambda i=i: step(i)) for i in range(3)]
        with_graphs = taken()[0] - before - room_bytes - n * merger.device_bytes
        assert dcpcomm.plan_bytes(merger.shape, n, config_for(group)) == merger.device_bytes

        def work(count: int) -> None:
            for number in range(count):
                i = number % 3
                k = i % 2
                join(here(), streams[k])
                with on(streams[k]):
                    merger.merge(*data[i], return_lse=True, channel=k)
                    if number % 2:
                        graphs[i].replay()
                join(streams[k], here())
            settle()

        together()
        work(30)
        warm = taken()[1], reserved()
        work(calls)
        after = taken()[1], reserved()
        merger.check()
        last = [room.cpu() for room in rooms]
    return with_graphs, warm, after, last


@RANKS
def test_nothing_grows_at_work(n: int, rng: torch.Generator) -> None:
    """Row 29: 200 calls on two streams and as many replays."""
    cases = [make_case(rng, n, b=b) for b in (1, 32, 7)]
    by_rank = run(n, at_work, cases, 200)
    for rank, (with_graphs, warm, after, _) in enumerate(by_rank):
        assert with_graphs <= 3 * n * PER_GRAPH, f"rank {rank}: three graphs hold {with_graphs} bytes more than planned"
        assert after == warm, f"rank {rank}: allocated and reserved went from {warm} to {after}"
    for i, case in enumerate(cases):
        judge([last[i] for *_, last in by_rank], case, what=f"graph {i}")


def rows_many_ways(group: Any, b: int) -> Any:
    """Layouts and sizes that come once each leave nothing behind on the device."""
    rank = group.rank
    partial = poisoned((b, 4 * group.size + 40, 40), BF16, 1.0)
    lse = poisoned((b, 4 * group.size), torch.float32, float(rank))
    with merger_for(group, {"max_tokens": 8}) as merger:
        merger.merge(partial[:, : 4 * group.size, :32], lse)
        together()
        warm = taken()
        for i in range(40):
            heads = partial[: 1 + i % b, i : i + 4 * group.size, i % 8 : i % 8 + 32]
            merger.merge(heads, lse[: 1 + i % b])
        after = taken()
        merger.check()
    return warm, after


@RANKS
def test_new_layouts_leave_nothing_behind(n: int) -> None:
    for warm, after in run(n, rows_many_ways, 19):
        assert after == warm
