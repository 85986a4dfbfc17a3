"""The benchmark on one GPU: figures that can be true, a rival that is right, one row from end to end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpcomm.bench import decode_loop
from dcpcomm.bench.checked import Checked
from dcpcomm.bench.decode_loop import Plan as DecodePlan
from dcpcomm.bench.limits import Gate, Limits, Probe, measure_limits
from dcpcomm.bench.measure import Inputs, Settings
from dcpcomm.bench.ranks import Meeting, Ranks, ThreadRanks
from dcpcomm.bench.result import Result
from dcpcomm.bench.rivals import FourLaunchPut
from dcpcomm.bench.timing import Times, settle, time_graph
from dcpcomm.testing import LoopbackWorld

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
    pytest.mark.timeout(300),
]
SIZES = (1 << 20, 1 << 24)


def on_threads(n: int, body: Callable[[Ranks, torch.device], Any]) -> list[Any]:
    """`body(ranks, device)` on `n` virtual ranks."""
    meeting = Meeting(n)

    def guarded(group: Any) -> Any:
        ranks = ThreadRanks(meeting, group.rank)
        try:
            return body(ranks, torch.device("cuda", torch.cuda.current_device()))
        except BaseException:
            ranks.abort()
            raise

    return LoopbackWorld(n).run(guarded, timeout_s=200)


@pytest.mark.parametrize("n", [2, 4])
def test_limits_are_figures_that_can_be_true(n: int, capsys: pytest.CaptureFixture[str]) -> None:
    def body(ranks: Ranks, device: torch.device) -> Limits:
        probe = Probe(ranks, device, max(SIZES))
        found = measure_limits(probe, Gate(probe), sizes=SIZES, replays=10)
        probe.close()
        return found

    limits = on_threads(n, body)
    with capsys.disabled():
        print(f"\nN={n}: {limits[0]}")
    assert all(one == limits[0] for one in limits)
    one = limits[0]
    assert 0.3 < one.kernel_us < 50
    assert one.kernel_us * 0.5 < one.exchange_us < 100
    assert all(1 < gb_s < 20_000 for gb_s in one.gb_s.values())
    if torch.cuda.get_device_capability()[0] >= 9:
        assert one.programmatic_exchange_us is not None
        assert one.programmatic_kernel_us is not None
        assert 0.1 < one.programmatic_exchange_us < 100
    assert one.limit_us(1 << 20) > one.exchange_us


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_four_launches_are_right_eager_and_replayed(n: int, dtype: torch.dtype) -> None:
    settings = Settings((), dtype=dtype, heads=32, dim=128, rows=(1, 5, 64))

    def body(ranks: Ranks, device: torch.device) -> tuple[list[int], list[Times]]:
        rival = FourLaunchPut(ranks, settings.shape(), device)
        rival.prepare()
        wrongs, times = [], []
        for rows in settings.rows:
            data = Inputs(ranks, settings, rows, device)
            rival.bring(data.out, data.lse)
            want = rival.want(data.outs, data.lses)

            def merge(rival: FourLaunchPut = rival, data: Inputs = data) -> torch.Tensor:
                return rival.merge(data.out, data.lse)

            checked = Checked(merge, lambda got, want=want: rival.count_wrong(got, want))
            wrongs.append(checked.check(ranks.meet, lambda: settle(device)))
            rival.check()
            if not any(ranks.gather(checked.wrong)):
                times.append(time_graph(checked, device, ranks.meet, replays=5))
        rival.check()
        ranks.meet()
        rival.close()
        return wrongs, times

    for wrongs, times in on_threads(n, body):
        assert wrongs == [0, 0, 0]
        assert [one.wrong for one in times] == [0, 0, 0]
        assert all(us > 0 for one in times for us in one.us)


def command(tmp_path: Path, *words: str) -> Result:
    """`dcpcomm bench` on virtual ranks, which are right."""
    file = tmp_path / "result.json"
    # A process of its own: streams need their own queues, which is settled before CUDA starts.
    line = [sys.executable, "-m", "dcpcomm", "bench", "--transport", "loopback_peer", "--replays", "10", *words]
    done = subprocess.run(
        [*line, "--json", str(file)], capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = Result.read(file)
    assert all(row.wrong == 0 and row.times is not None and row.times.p50 > 0 for row in result.rows)
    return result


def test_one_row_from_end_to_end(tmp_path: Path) -> None:
    result = command(tmp_path, "--rows", "4", "--rivals")
    names = {row.transport for row in result.rows}
    assert names - {"helix (bare)", "helix (bare, rows damaged)"} == {"loopback_peer", "four_launch_put"}
    (group,) = result.groups
    assert (group.count, group.are) == (2, "threads on one GPU")
    assert group.limits is not None
    assert group.limits["exchange_us"] > 0
    assert "ag_rs" in {one.transport for one in result.skipped}


def test_projected_merges_with_empty_rows_and_late_ranks(tmp_path: Path) -> None:
    words = ("--rows", "16", "--heads", "16", "--dim", "256", "--v-head-dim", "64", "--projection", "none,before,after")
    result = command(tmp_path, *words, "--empty", "0,0.5", "--skew-us", "0,50")
    assert len(result.rows) == 3 * 2 * 2
    times = {row.cell: row.times.p50 for row in result.rows if row.times is not None}
    for cell, us in times.items():
        if cell.skew_us:
            # What is left without the lateness is a merge: not 50 us more, and not nothing.
            assert 0.2 < us < times[replace(cell, skew_us=0.0)] + 25


def test_a_decode_loop_is_right_and_its_merges_take_a_part_of_it() -> None:
    n = 2
    plan = DecodePlan(("loopback_peer",), layers=5, rows=4, heads=16, latent=128, value=64, work=256, rounds=5)
    meeting = Meeting(n)

    def body(group: Any) -> Any:
        device = torch.device("cuda", torch.cuda.current_device())
        return decode_loop.run(group, ThreadRanks(meeting, group.rank), device, plan, lambda text: None)

    (row,) = decode_loop.rows_of(LoopbackWorld(n).run(body, timeout_s=200))
    print(row)
    assert row.wrong == 0
    assert row.chosen.startswith("loopback_peer, W_UV ")
    assert 0 < row.merges_us < row.step_us
    assert row.eager_step_us
