"""`dcpcomm.bench.merge` but for the GPU: what is measured in which order, its table, its JSON, its exit status."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from dcpcomm.bench import machine, measure, merge, replays
from dcpcomm.bench.limits import Limits
from dcpcomm.bench.measure import Answer, Case, Settings
from dcpcomm.bench.ours import Ours, named
from dcpcomm.bench.ranks import Meeting, ThreadRanks
from dcpcomm.bench.table import COLUMNS, Row, size_of, table
from dcpcomm.bench.timing import Summary, Times
from dcpcomm.errors import TransportUnavailable
from dcpcomm.launch import RankFailed
from dcpcomm.testing import LoopbackWorld

LIMITS = Limits(1.3, 2.4, 1.0, 1.8, {1 << 26: 400.0})
SETTINGS = Settings(("loopback_peer",), heads=8, dim=32, rows=(1, 3))


def row(times: Summary | None, wrong: int = 0) -> Row:
    return Row(1 << 20, 64, 128, 128, "bfloat16", 4, "some", times, wrong, 5.0)


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
    assert [column.header for column in made.columns] == list(COLUMNS)


def answers(wrong: int = 0) -> list[Answer]:
    def case(us: float) -> Case:
        return Case("loopback_peer", 3, Times((us, us)), wrong, Times((us / 2,)))

    return [Answer("GPU A", LIMITS, [case(8.0)]), Answer("GPU B", LIMITS, [case(10.0)])]


def test_the_slowest_rank_counts() -> None:
    (one,) = merge.rows_of(answers(), SETTINGS)
    assert one.times is not None
    assert (one.times.p50, one.host_us, one.wrong, one.size) == (10.0, 5.0, 0, 3 * 4 * 32 * 2)
    assert one.limit_us == pytest.approx(2.4 + one.size / 400e3)
    (one,) = merge.rows_of(answers(), SETTINGS, programmatic=True)
    assert one.limit_us == pytest.approx(1.8 + one.size / 400e3)


def test_a_time_with_wrong_results_is_thrown_away() -> None:
    (one,) = merge.rows_of(answers(wrong=2), SETTINGS)
    assert (one.times, one.wrong) == (None, 4)


def test_the_link_is_read_from_the_topology() -> None:
    two = "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\t0-15\nGPU1\tNV18\t X \t0-15\n"
    assert machine.link_in(two) == "NV18"
    assert machine.link_in("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n") is None
    assert machine.link_in("") is None


# ---------------------------------------------------------------- the measurement, with a clock of wood


class NoProbe:
    def __init__(self, ranks: Any, device: torch.device) -> None:
        self.ranks = ranks

    def close(self) -> None:
        pass


class NoGate:
    def __init__(self, probe: NoProbe) -> None:
        pass

    def check(self) -> None:
        pass


def no_time(checked: Any, *args: Any, **keywords: Any) -> Times:
    checked.require_verified()
    return Times((5.0,) * 3)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Settings], list[Answer]]:
    """`measure` on two virtual ranks on CPU."""
    monkeypatch.setattr(measure, "Probe", NoProbe)
    monkeypatch.setattr(measure, "Gate", NoGate)
    monkeypatch.setattr(measure, "measure_limits", lambda *args, **keywords: LIMITS)
    monkeypatch.setattr(measure, "time_graph", no_time)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "wood")
    real = Settings.shape
    monkeypatch.setattr(Settings, "shape", lambda self: dataclasses.replace(real(self), require_graph=False))

    def run(settings: Settings) -> list[Answer]:
        meeting = Meeting(2)

        def body(group: Any) -> Answer:
            ranks = ThreadRanks(meeting, group.rank)
            try:
                return measure.measure(ranks, group, torch.device("cpu"), settings, lambda text: None)
            except BaseException:
                ranks.abort()
                raise

        return LoopbackWorld(2).run(body)

    return run


def test_every_size_is_measured_on_every_rank(without_gpu: Callable[[Settings], list[Answer]]) -> None:
    found = without_gpu(SETTINGS)
    assert [(case.name, case.rows, case.wrong) for case in found[0].cases] == [
        ("loopback_peer", 1, 0),
        ("loopback_peer", 3, 0),
    ]
    rows = merge.rows_of(found, SETTINGS)
    assert all(one.times is not None for one in rows)
    text = json.dumps(merge.document(found, rows, SETTINGS, ["python", "-m", "dcpcomm.bench.merge"]))
    read = json.loads(text)
    assert read["machine"]["gpus"] == ["wood", "wood"]
    assert read["rows"][1]["times"]["p50"] == 5.0
    assert read["limits"]["exchange_us"] == 2.4
    assert {"command", "commit", "versions", "machine", "when"} <= read.keys()


def test_a_wrong_merge_is_counted_and_not_timed(
    without_gpu: Callable[[Settings], list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    found = without_gpu(SETTINGS)
    assert [case.wrong for case in found[1].cases] == [1, 1]
    assert all(case.times is None for answer in found for case in answer.cases)


def test_a_transport_that_cannot_serve_is_left_out_unless_it_was_named(
    without_gpu: Callable[[Settings], list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Ours.prepare

    def absent(self: Ours) -> None:
        if self.name == "gloo_a2a":
            raise TransportUnavailable("no cable")
        real(self)

    monkeypatch.setattr(Ours, "prepare", absent)
    found = without_gpu(Settings(("gloo_a2a", "loopback_peer"), heads=8, dim=32, rows=(1,)))
    assert [case.name for case in found[0].cases] == ["loopback_peer"]
    assert found[0].skipped == {"gloo_a2a": "no cable"}
    with pytest.raises(RankFailed) as raised:
        without_gpu(Settings(("gloo_a2a",), named=True, heads=8, dim=32, rows=(1,)))
    assert isinstance(raised.value.cause, TransportUnavailable)


def test_a_contender_has_a_name_and_options() -> None:
    assert named("cupy_ipc") == ("cupy_ipc", {})
    given = {"threads": 256, "strict": True}
    assert named("cupy_ipc:threads=256,strict=true") == ("cupy_ipc", given)
    for wrong in ("x:kernel", "x:=1", "x:a=1,"):
        with pytest.raises(ValueError, match="expected, say"):
            named(wrong)


def test_options_reach_the_transport(without_gpu: Callable[[Settings], list[Answer]]) -> None:
    contenders = ("loopback_peer", "loopback_peer:threads=128,strict=true")
    found = without_gpu(Settings(contenders, heads=8, dim=32, rows=(1,)))
    assert [case.name for case in found[0].cases] == list(contenders)
    assert not any(case.wrong for case in found[0].cases)
    with pytest.raises(RankFailed, match="no_such"):
        without_gpu(Settings(("loopback_peer:no_such=1",), named=True, heads=8, dim=32, rows=(1,)))


# ---------------------------------------------------------------- the command

APP = typer.Typer()
APP.command()(merge.main)


@pytest.mark.parametrize("main", [merge.main, replays.main])
def test_virtual_ranks_get_their_settings_before_cuda_starts(main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str | None] = []
    for name in ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found.append(os.environ.get("CUDA_MODULE_LOADING")))
    app = typer.Typer()
    app.command()(main)
    assert CliRunner().invoke(app, ["--transport", "loopback_peer"]).exit_code == 2
    assert found == ["EAGER"]


@pytest.mark.parametrize(("wrong", "status"), [(0, 0), (1, 1)])
def test_the_exit_status_tells_of_wrong_results(
    wrong: int, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(merge, "versions", dict)
    monkeypatch.setattr(merge, "measure_threads", lambda size, settings, say: answers(wrong))
    file = tmp_path / "out.json"
    done = CliRunner().invoke(APP, ["--rows", "3", "--json", str(file)])
    assert done.exit_code == status, done.output
    assert json.loads(file.read_text(encoding="utf-8"))["rows"][0]["wrong"] == 2 * wrong


@pytest.mark.parametrize(
    "options", [["--rows", "1,x"], ["--rows", "0"], ["--ranks", "3"], ["--dtype", "int8"], ["--lse-base", "10"]]
)
def test_wrong_usage_is_status_2(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert CliRunner().invoke(APP, options).exit_code == 2
