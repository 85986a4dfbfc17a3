"""A result held against an earlier one: each outcome, on results that were recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcpcomm.bench.compare import LEAST, SPREADS, compare
from dcpcomm.bench.result import Result, Skipped
from dcpcomm.bench.table import Row
from dcpcomm.bench.timing import Summary
from dcpcomm.errors import ConfigError

RESULTS = Path(__file__).parent.parent / "bench/results"
FIRST = Result.read(RESULTS / "merge_h200x2.json")
SECOND = Result.read(RESULTS / "merge_h200x2_direct.json")
LOOPBACK = Result.read(RESULTS / "merge_loopback_h200.json")


def changed(result: Result, at: int, **times: float) -> Result:
    """With other times in one row."""
    rows = list(result.rows)
    summary = rows[at].times
    assert summary is not None
    rows[at] = replace(rows[at], times=replace(summary, **times))
    return replace(result, rows=tuple(rows))


def test_two_recorded_runs_of_one_machine_are_within_noise() -> None:
    found = compare(FIRST, SECOND)
    assert not found.worse
    assert not found.better
    assert found.same == 4, "nccl_a2a at four sizes: nccl_ag_rs was wrong in the first"
    assert not found.failed
    assert {one.old.transport for one in found.gone} >= {"four_launch_put", "ag_rs"}
    assert all(one.why is None for one in found.gone), "the second run did not ask for them"


def test_a_run_against_itself_has_no_changes() -> None:
    found = compare(LOOPBACK, LOOPBACK)
    assert (found.same, found.worse, found.better, found.gone, found.apart) == (21, (), (), (), ())


@pytest.mark.parametrize(("by", "spreads", "kind"), [
    (1.04, 0.0, "same"),  # under 5 %, however small the spreads are
    (1.06, 0.0, "worse"),
    (1.06, 0.04, "same"),  # 6 %, and twice both spreads is 16 %
    (1.20, 0.04, "worse"),
    (0.90, 0.0, "better"),
    (0.96, 0.0, "same"),
])  # fmt: skip
def test_what_is_beyond_noise(by: float, spreads: float, kind: str) -> None:
    assert (SPREADS, LEAST) == (2.0, 0.05)
    times = LOOPBACK.rows[0].times
    assert times is not None
    old = changed(LOOPBACK, 0, mad=times.p50 * spreads)
    new = changed(LOOPBACK, 0, p50=times.p50 * by, mad=times.p50 * spreads)
    found = compare(old, new)
    assert (len(found.worse), len(found.better)) == (int(kind == "worse"), int(kind == "better"))
    assert found.failed == (kind == "worse")
    if kind == "worse":
        assert f"({by - 1:+.1%}" in str(found.worse[0])
        assert str(found.worse[0]).startswith("loopback_peer, N=2 B=1 H=128 D=128 bfloat16: 3.27 -> ")


def test_what_is_wrong_now_has_regressed() -> None:
    rows = (replace(LOOPBACK.rows[0], times=None, wrong=3), *LOOPBACK.rows[1:])
    found = compare(LOOPBACK, replace(LOOPBACK, rows=rows))
    assert found.failed
    assert str(found.worse[0]).endswith("3.27 us -> wrong in 3 elements")


def test_a_cell_that_could_be_measured_before_and_is_skipped_now_is_a_failure() -> None:
    lost = LOOPBACK.rows[0]
    less = replace(LOOPBACK, rows=LOOPBACK.rows[1:])
    assert not compare(LOOPBACK, less).failed, "it was not asked for"
    skipped = (Skipped(lost.transport, lost.cell, "no cable"), Skipped("other", None, "no"))
    found = compare(LOOPBACK, replace(less, skipped=skipped))
    assert found.failed
    assert [str(one) for one in found.gone] == ["loopback_peer, N=2 B=1 H=128 D=128 bfloat16: no cable"]
    everywhere = (Skipped(None, lost.cell, "7 heads don't divide over 2 ranks"),)
    assert compare(LOOPBACK, replace(less, skipped=everywhere)).failed


def test_nothing_in_common_is_no_pass() -> None:
    gloo = Result.read(RESULTS / "gloo_merge_cpu.json")
    found = compare(FIRST, gloo)
    assert (found.compared, found.failed) == (0, True)


def test_another_machine_version_or_way_of_measuring_is_told() -> None:
    machine = {**LOOPBACK.machine, "driver": "1.2", "gpus": ["NVIDIA B200"]}
    other = replace(LOOPBACK, machine=machine, versions={**LOOPBACK.versions, "torch": "9"}, timing={"replays": 100})
    assert compare(LOOPBACK, other).apart == (
        "gpus NVIDIA H200 + NVIDIA H200 -> NVIDIA B200",
        "driver 580.159.04 -> 1.2",
        "torch 2.11.0+cu130 -> 9",
        "replays 30 -> 100",
    )
    assert "2 ranks as threads on one GPU -> processes" in compare(LOOPBACK, FIRST).apart


def test_cells_of_other_shapes_are_never_taken_for_each_other() -> None:
    fields: dict[str, Any] = {
        "rows": 7, "heads": 64, "dim": 512, "dtype": "float16", "ranks": 4, "transport": "x", "projection": "after",
        "v_head_dim": 64, "empty": 0.5, "skew_us": 3.0,
    }  # fmt: skip
    one = Row(128, 1, 128, 128, "bfloat16", 2, "a", Summary(1.0, 1.0, 0.0, 30), 0, 1.0)
    for name, value in fields.items():
        found = compare(replace(FIRST, rows=(one,)), replace(FIRST, rows=(replace(one, **{name: value}),)))
        assert (found.compared, len(found.gone)) == (0, 1), name


def test_results_of_all_versions_are_read_and_written_the_same_way() -> None:
    for file in ("merge_h200x2.json", "merge_loopback_h200.json", "gloo_merge_cpu.json", "gloo_merge_cpu_2cores.json"):
        found = Result.read(RESULTS / file)
        assert found.rows
        assert Result.of(found.as_dict(), file) == found
    gloo = Result.read(RESULTS / "gloo_merge_cpu.json").rows[0]
    assert (gloo.size, gloo.times and gloo.times.p50, gloo.limit_us) == (32 * 32 * 128 * 2, 472.6, 326.8)


NO_LIMIT = {**json.loads((RESULTS / "merge_h200x2.json").read_text()), "limits": {"exchange_us": 1.0, "gb_s": {}}}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 3}', '{"rows": 1}', json.dumps(NO_LIMIT)])
def test_what_is_no_result_is_told(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"x\.json"):
        Result.read(file)
    with pytest.raises(ConfigError, match="can't be read"):
        Result.read(tmp_path / "not there.json")
