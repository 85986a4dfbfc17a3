"""What a benchmark measures on each rank, but for the GPU: in which order, and what becomes a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from dcpcomm.bench import machine
from dcpcomm.bench.checked import Checked
from dcpcomm.bench.clocks import Clock, GraphClock, Timing
from dcpcomm.bench.measure import Answer, Case, Inputs, Settings, measure
from dcpcomm.bench.ours import Ours, named
from dcpcomm.bench.ranks import Meeting, ThreadRanks
from dcpcomm.bench.run import rows_of
from dcpcomm.bench.sweep import Cell, Sweep
from dcpcomm.bench.table import COLUMNS, Row, size_of, table
from dcpcomm.bench.timing import Summary, Times
from dcpcomm.errors import TransportUnavailable
from dcpcomm.launch import RankFailed
from dcpcomm.testing import LoopbackWorld
from tests.bench_rig import CELL, CPU, LIMITS, answers, row, sweep

# ---------------------------------------------------------------- rows


def test_sizes_are_those_of_the_measured_table() -> None:
    assert size_of(1, 128, 128, 2, 2) == 16 << 10
    assert size_of(256, 128, 512, 2, 2) == 16 << 20
    assert size_of(1, 128, 128, 2, 8) == 7 * 16 * 128 * 2


def test_bandwidths_and_share_of_the_limit() -> None:
    one = row(Summary(10.0, 12.0, 0.1, 30))
    assert one.busbw == pytest.approx((1 << 20) / 10e-6 / 1e9)
    assert one.algbw == pytest.approx(one.busbw * 4 / 3)
    assert one.of_limit == 50.0


def test_what_is_wrong_has_no_time() -> None:
    cells = dict(zip(COLUMNS, row(None, wrong=7).cells(), strict=True))
    assert (cells["p50 us"], cells["busbw"], cells["% limit"], cells["#wrong"]) == ("-", "-", "-", "7")
    assert row(None, wrong=7).as_dict()["percent_of_limit"] is None


def test_the_table_has_a_line_for_each_row() -> None:
    made = table([row(Summary(10.0, 12.0, 0.1, 30)), row(None, 3)], "title")
    assert made.row_count == 2
    assert [column.header for column in made.columns] == list(COLUMNS[:-1]), "no row has a host time"
    with_host = [Row.read({**row(None, 3).as_dict(), "host_us": 3.0, "ranks": 2}), row(None, 3)]
    headers = [str(column.header) for column in table(with_host, "").columns]
    at = COLUMNS.index("transport")
    assert headers == [*COLUMNS[:at], "N", *COLUMNS[at:]]


def test_the_slowest_rank_counts() -> None:
    (one,) = rows_of(answers())
    assert one.times is not None
    assert (one.times.p50, one.host_us, one.wrong, one.size) == (10.0, 5.0, 0, 3 * 4 * 32 * 2)
    assert one.limit_us == pytest.approx(2.4 + one.size / 400e3)
    (one,) = rows_of(answers(), programmatic=True)
    assert one.limit_us == pytest.approx(1.8 + one.size / 400e3)


def test_a_limit_that_was_timed_with_its_cell_counts_by_its_slowest_rank() -> None:
    each = [
        Answer(None, None, [Case("gloo_a2a", CELL, Times((us, us)), 0, None, Times((us / 4,)))]) for us in (8.0, 10.0)
    ]
    (one,) = rows_of(each)
    assert (one.limit_us, one.of_limit) == (2.5, 25.0)


def test_a_projection_before_the_merge_sends_the_narrow_rows() -> None:
    wide = Cell(2, 8, 512, "bfloat16", "after", 128, 3)
    narrow = Cell(2, 8, 512, "bfloat16", "before", 128, 3)
    sizes = []
    for cell in (wide, narrow):
        each = [Answer("GPU", LIMITS, [Case("x", cell, Times((8.0,)), 0)])] * 2
        sizes.append(rows_of(each)[0].size)
    assert sizes[0] == 4 * sizes[1]


def test_a_time_with_wrong_results_is_thrown_away() -> None:
    (one,) = rows_of(answers(wrong=2))
    assert (one.times, one.wrong) == (None, 4)


def test_the_link_is_read_from_the_topology() -> None:
    two = "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\t0-15\nGPU1\tNV18\t X \t0-15\n"
    assert machine.link_in(two) == "NV18"
    assert machine.link_in("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n") is None
    assert machine.link_in("") is None


# ---------------------------------------------------------------- the measurement, with a clock of wood


class Wood(Clock):
    in_turns = False
    limits = LIMITS

    def time(self, steps: Sequence[Checked], skew_us: float) -> list[Timing]:
        for step in steps:
            step.require_verified()
        return [Timing(Times((5.0 + skew_us,) * 3)) for _ in steps]


def on_threads(of: Sweep, events: list[Any] | None = None) -> list[Answer]:
    """`measure` on two virtual ranks on CPU."""
    meeting = Meeting(2)

    def body(group: Any) -> Answer:
        ranks = ThreadRanks(meeting, group.rank)
        try:
            told = events.append if events is not None and group.rank == 0 else lambda event: None
            return measure(ranks, group, CPU, of, Wood(), told)
        except BaseException:
            ranks.abort()
            raise

    return LoopbackWorld(2, device="cpu").run(body)


def test_every_cell_is_measured_on_every_rank() -> None:
    events: list[Any] = []
    found = on_threads(sweep(dim=(32, 64), dtype=("bfloat16", "float32")), events)
    assert [(case.name, case.cell.rows, case.cell.dim, case.cell.dtype, case.wrong) for case in found[0].cases] == [
        ("loopback_peer", rows, dim, dtype, 0)
        for dim in (32, 64)
        for dtype in ("bfloat16", "float32")
        for rows in (1, 3)
    ]
    assert events[0] == ("total", 8)
    assert sum(kind == "cell" for kind, _ in events) == 8, "a bar ends where it should"
    assert all(one.times is not None for one in rows_of(found))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("projection", ["none", "before", "after"])
def test_projected_merges_with_empty_rows_are_right_and_timed(projection: str, dtype: str) -> None:
    of = sweep(projection=(projection,), dtype=(dtype,), dim=(512,), v_head_dim=128, rows=(8,), empty=(0.0, 0.5))
    found = on_threads(of)
    assert [(case.cell.empty, case.wrong) for answer in found for case in answer.cases] == [(0.0, 0), (0.5, 0)] * 2
    assert all(case.times is not None for case in found[0].cases)


def test_empty_rows_are_others_on_each_rank_and_hold_what_would_spoil_a_merge() -> None:
    def body(group: Any) -> Inputs:
        return Inputs(ThreadRanks(meeting, group.rank), Settings((), heads=2, dim=8), 16, CPU, 0.25)

    meeting = Meeting(4)
    data, *others = LoopbackWorld(4, device="cpu").run(body)
    assert data.counts is not None
    assert data.counts.shape == (4, 16)
    assert (data.counts == 0).sum(1).tolist() == [4] * 4
    assert len({tuple(row) for row in data.counts.tolist()}) > 1
    assert data.outs[data.counts == 0].isnan().all()
    assert not data.outs[data.counts > 0].isnan().any()
    assert not (data.outs == 0).all(-1).any(), "of zeros, what was never written would look right"
    assert all(torch.equal(data.counts, one.counts) for one in others if one.counts is not None)


def test_a_wrong_merge_is_counted_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ours.call

    def spoilt(self: Ours, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> Callable[[], torch.Tensor]:
        call = real(self, partial_out, partial_lse)

        def merge() -> torch.Tensor:
            result = call()
            if self.ranks.rank == 1:
                result[0, 0, 0] += 100.0
            return result

        return merge

    monkeypatch.setattr(Ours, "call", spoilt)
    found = on_threads(sweep())
    assert [case.wrong for case in found[1].cases] == [1, 1]
    assert all(case.times is None for answer in found for case in answer.cases)
    assert all((one.times, one.wrong) == (None, 1) for one in rows_of(found))


def test_a_result_that_was_never_written_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ours.call

    def once(self: Ours, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> Callable[[], torch.Tensor]:
        call, first = real(self, partial_out, partial_lse), []

        def merge() -> torch.Tensor:
            if not first:
                first.append(call())
            return first[0]  # as a merge that answers from the last time: its memory was poisoned since

        return merge

    monkeypatch.setattr(Ours, "call", once)
    found = on_threads(sweep(rows=(3,)))
    assert [answer.cases[0].wrong for answer in found] == [3 * 4 * 32] * 2


def test_a_transport_that_cannot_serve_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ours.prepare

    def absent(self: Ours) -> None:
        if self.name == "gloo_a2a":
            raise TransportUnavailable("it was named\n  no cable")
        real(self)

    monkeypatch.setattr(Ours, "prepare", absent)
    found = on_threads(sweep(transport=("gloo_a2a", "loopback_peer"), rows=(1,)))
    assert [case.name for case in found[0].cases] == ["loopback_peer"]
    assert [(one.transport, one.cell.rows, one.why) for one in found[0].skipped] == [("gloo_a2a", 1, "no cable")]


def test_cells_that_make_no_sense_are_skipped_with_their_reason() -> None:
    found = on_threads(sweep(heads=(7, 8), empty=(0.0, 0.1)))
    assert len(found[0].cases) == 2
    said = sorted({one.why for one in found[0].skipped})
    assert said == [
        "0.1 of 1 rows is none: nothing would be empty",
        "0.1 of 3 rows is none: nothing would be empty",
        "7 heads don't divide over 2 ranks",
    ]
    assert {one.transport for one in found[0].skipped} == {None}


def test_rivals_that_only_a_gpu_has_are_skipped_with_their_reason() -> None:
    found = on_threads(sweep(rows=(1,), rivals=True))
    assert {one.why for one in found[0].skipped} == {"merges on GPUs alone"}
    assert {"four_launch_put", "ag_rs"} <= {one.transport for one in found[0].skipped}


def test_a_contender_has_a_name_and_options() -> None:
    assert named("cupy_ipc") == ("cupy_ipc", {})
    given = {"threads": 256, "strict": True}
    assert named("cupy_ipc:threads=256,strict=true") == ("cupy_ipc", given)
    for wrong in ("x:kernel", "x:=1", "x:a=1,"):
        with pytest.raises(ValueError, match="expected, say"):
            named(wrong)


def test_options_reach_the_transport() -> None:
    contenders = ("loopback_peer", "loopback_peer:threads=128,strict=true")
    found = on_threads(sweep(transport=contenders, rows=(1,)))
    assert [case.name for case in found[0].cases] == list(contenders)
    assert not any(case.wrong for case in found[0].cases)
    with pytest.raises(RankFailed, match="no_such"):
        on_threads(sweep(transport=("loopback_peer:no_such=1",), rows=(1,)))


# ---------------------------------------------------------------- lateness on a GPU, with a GPU of wood


class NoProbe:
    """Counts the delays that are put before calls, and how long they are."""

    def __init__(self, ranks: Any, device: torch.device) -> None:
        self.ranks, self.delays = ranks, []

    def spin(self, nanoseconds: int) -> Callable[[int], object]:
        return lambda stream: self.delays.append(nanoseconds)

    def close(self) -> None:
        pass


class NoGate:
    def __init__(self, probe: NoProbe) -> None:
        self.ranks = probe.ranks

    def check(self) -> None:
        pass


@pytest.fixture
def wooden_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from dcpcomm.bench import clocks

    def time_graph(step: Checked, device: Any, meet: Any, *, per_graph: int, replays: int, before: Any = None) -> Times:
        step.require_verified()
        for number in range(per_graph):
            if before is not None:
                before(number)
            step()
        return Times((70.0,) * replays if step.name != "a delay" else (50.0,) * replays)

    class Stream:
        cuda_stream = 0

    monkeypatch.setattr(clocks, "Probe", NoProbe)
    monkeypatch.setattr(clocks, "Gate", NoGate)
    monkeypatch.setattr(clocks, "measure_limits", lambda *args, **keywords: LIMITS)
    monkeypatch.setattr(clocks, "time_graph", time_graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())


@pytest.mark.usefixtures("wooden_gpu")
def test_ranks_are_late_in_turns_and_the_lateness_is_measured_and_taken_off() -> None:
    def body(group: Any) -> tuple[list[float], int]:
        ranks = ThreadRanks(meeting, group.rank)
        clock = GraphClock(ranks, CPU, 20, 3, lambda text: None)
        step = Checked(lambda: torch.ones(1), lambda got: 0, "a step")
        step.check(ranks.meet, lambda: None)
        (timing,) = clock.time([step], 40.0)
        assert timing.times is not None
        before = sum(one == 40_000 for one in clock._probe.delays)  # type: ignore[attr-defined]
        return list(timing.times.us), before

    meeting = Meeting(4)
    for us, delays in LoopbackWorld(4, device="cpu").run(body):
        assert us == [20.0] * 3, "70 with the lateness, which took 50 by itself, whatever was asked for"
        assert delays == 20 // 4 + 20 + 2, "a quarter of a graph's calls, and those that were timed and checked alone"
