"""`dcpcomm bench` from end to end: real ranks over Gloo, every output, wrong results, and its exit status."""

from __future__ import annotations

import csv
import functools
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcpcomm.cli
import dcpcomm.cli.bench as command
from dcpcomm.bench.gloo_packed import GlooPacked
from dcpcomm.bench.measure import Answer
from dcpcomm.bench.ours import Ours
from dcpcomm.bench.result import BARE_GLOO, Result
from dcpcomm.bench.run import measure_processes
from dcpcomm.bench.sweep import Sweep
from tests.nursery import Nursery

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results"
SMALL = ("--device", "cpu", "--heads", "4", "--dim", "32", "--rows", "1,3", "--replays", "3")
SWEEP = """\
rows: [1, 3]
heads: 4
dim: [32, 48]
dtype: [bfloat16, float32]
ranks: 2
transport: [gloo_a2a, loopback]
projection: [none, before]
v_head_dim: 16
empty: [0, 0.5]
skew_us: [0, 100]
rivals: true
device: cpu
replays: 3
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`bench("--rows", "1")` -> (exit status, all that was printed), in this process."""

    def run(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["dcpcomm", "bench", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            dcpcomm.cli.main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return int(ended.value.code or 0), out + err

    return run


def test_a_small_sweep_from_end_to_end(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP, encoding="utf-8")
    words = ("--sweep", "sweep.yaml", "--json", "r.json", "--csv", "r.csv", "--plot", "r.png")
    environment = {**os.environ, "DCPCOMM_CACHE_DIR": str(tmp_path)}
    done = nursery.python("-m", "dcpcomm", "bench", *words, environment=environment, folder=tmp_path).wait()
    # `loopback` was named, and can't be measured between processes: that is no success.
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr == "", "no bar where there is no terminal, no warning"
    assert "loopback was asked for, and could not be measured in any cell" in done.stdout
    assert "not measured: loopback, " in done.stdout
    assert "the ranks are processes, not threads of one process" in done.stdout
    assert "0.5 of 1 rows is none: nothing would be empty" in done.stdout
    document = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert document["command"] == "dcpcomm bench --sweep sweep.yaml --json r.json --csv r.csv --plot r.png"
    assert {"machine", "versions", "commit", "when", "timing"} <= document.keys()
    assert document["machine"]["host_cores"] == os.cpu_count()
    assert document["versions"]["torch"] == torch.__version__
    result = Result.of(document, "this run")
    (group,) = result.groups
    assert (group.count, group.are, group.limit) == (2, "processes", BARE_GLOO)
    merges = [row for row in result.rows if row.transport == "gloo_a2a"]
    bare = [row for row in result.rows if row.transport == "gloo_packed (bare)"]
    # 2 widths, 2 dtypes, 2 orders, 2 skews; of rows and empty shares three pairs: half of one row is none.
    assert len(merges) == len(bare) == 2 * 2 * 2 * 2 * 3
    assert len({row.cell for row in merges}) == len(merges)
    assert all(row.wrong == 0 and row.times is not None and row.times.count == 3 for row in result.rows)
    for merge, limit in zip(merges, bare, strict=True):
        assert limit.times is not None
        assert merge.cell == limit.cell
        assert merge.limit_us == limit.times.p50 > 0, "the limit is the bare exchange, in the same cell"
    with io.StringIO((tmp_path / "r.csv").read_text(encoding="utf-8")) as file:
        lines = list(csv.DictReader(file))
    assert [float(line["p50_us"]) for line in lines] == [row.times.p50 for row in result.rows if row.times]
    assert [line["transport"] for line in lines] == [row.transport for row in result.rows]
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    lines_of_table = [
        line.split() for line in done.stdout.splitlines() if line.strip()[:1].isdigit() and "gloo" in line
    ]
    assert [float(line[line.index("(bare)" if "(bare)" in line else "gloo_a2a") + 1]) for line in lines_of_table] == [
        round(row.times.p50, 2) for row in result.rows if row.times
    ]
    header = next(line for line in done.stdout.splitlines() if "transport" in line)
    for column in ("size", "rows", "heads", "dim", "dtype", "projection", "empty", "skew us", "p50 us", "p99", "mad"):
        assert column in header
    for column in ("algbw", "busbw", "#wrong", "% limit"):
        assert column in header


def test_several_numbers_of_ranks_and_what_does_not_divide(
    bench: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    file = tmp_path / "r.json"
    status, said = bench(*SMALL, "--rows", "3", "--ranks", "1,2,3,4", "--json", file)
    assert status == 0, said
    result = Result.read(file)
    assert [group.count for group in result.groups] == [2, 4]
    assert [(row.ranks, row.size) for row in result.rows] == [(2, 3 * 2 * 32 * 2), (4, 3 * 3 * 32 * 2)]
    assert "N=1 B=3 H=4 D=32 bfloat16: one rank exchanges nothing" in said
    assert "N=3 B=3 H=4 D=32 bfloat16: 4 heads don't divide over 3 ranks" in said


def spoilt(wrong_from: int, sweep: Sweep, device: str) -> Answer:
    """`measure_processes`, whose rank 1 merges wrongly from one call of a cell on."""
    real = Ours.call

    def call(self: Ours, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> Callable[[], torch.Tensor]:
        right, calls = real(self, partial_out, partial_lse), iter(range(1 << 30))

        def merge() -> torch.Tensor:
            result = right()
            if self.ranks.rank == 1 and next(calls) >= wrong_from:
                result[0, 0, 0] += 100.0
            return result

        return merge

    Ours.call = call  # type: ignore[method-assign]  # of a process that is this run's alone
    return measure_processes(sweep, device)


def wrong_limit(wrong_from: int, sweep: Sweep, device: str) -> Answer:
    """`measure_processes`, whose bare exchange delivers one wrong byte."""
    real = GlooPacked.merge

    def merge(self: GlooPacked, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> torch.Tensor:
        result = real(self, partial_out, partial_lse)
        result.view(-1)[5] ^= 1
        return result

    GlooPacked.merge = merge  # type: ignore[method-assign]
    return measure_processes(sweep, device)


def on_spoilt_ranks(real: Any, how: Any, wrong_from: int, fn: Any, ranks: int, *args: Any, **keywords: Any) -> Any:
    assert fn is measure_processes
    return real(how, ranks, wrong_from, *args, **keywords)


#: Two calls are compared, five warm, three are timed, and one more is compared.
@pytest.mark.parametrize(
    ("wrong_from", "wrong"), [(0, 1), (9, 2), (10, 1)], ids=["before", "the last timed call", "behind the timing"]
)
def test_a_wrong_result_has_no_time_and_fails_the_command(
    wrong_from: int,
    wrong: int,
    bench: Callable[..., tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    file = tmp_path / "r.json"
    spoilt_ranks = functools.partial(on_spoilt_ranks, command.on_ranks, spoilt, wrong_from)
    monkeypatch.setattr(command, "on_ranks", spoilt_ranks)
    status, said = bench(*SMALL, "--json", file, "--csv", tmp_path / "r.csv", "--plot", tmp_path / "r.png")
    assert status == 1, said
    assert "WRONG: 2 of 2 cells differ from the oracle; they have no time" in said
    rows = Result.read(file).rows
    assert [(row.transport, row.times, row.wrong) for row in rows] == [("gloo_a2a", None, wrong)] * 2
    assert (tmp_path / "r.csv").read_text(encoding="utf-8").count("gloo_a2a") == 2


def test_a_limit_that_is_wrong_is_no_limit(
    bench: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "on_ranks", functools.partial(on_spoilt_ranks, command.on_ranks, wrong_limit, 0))
    status, said = bench(*SMALL)
    assert status == 1
    assert "gloo_packed (bare): what arrived is not what was sent" in said


def edited(name: str, file: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    document = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    edit(document)
    file.write_text(json.dumps(document), encoding="utf-8")
    return file


def test_a_recorded_result_is_compared_and_a_regression_fails(
    bench: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    old = RESULTS / "merge_loopback_h200.json"
    status, said = bench("--from", old, "--compare", old)
    assert (status, "21 cells compared: 0 regressions, 0 faster, 21 within noise" in said) == (0, True)

    def slower(document: dict[str, Any]) -> None:
        document["rows"][0]["times"]["p50"] *= 1.5
        document["rows"][2]["times"]["p50"] /= 1.5
        del document["rows"][-1]
        document["machine"]["driver"] = "1.2"

    new = edited(old.name, tmp_path / "new.json", slower)
    status, said = bench("--from", new, "--compare", old)
    assert status == 1
    assert "REGRESSION: loopback_peer, N=2 B=1 H=128 D=128 bfloat16: 3.27 -> 4.90 us (+50.0%; noise 0.16 us)" in said
    assert "faster: four_launch_put, N=2 B=1 H=128 D=128 bfloat16: 6.87 -> 4.58 us (-33.3%" in said
    assert "gone: four_launch_put, N=2 B=256 H=128 D=128 bfloat16: the new run did not ask for it" in said
    assert "NOT MEASURED ALIKE: driver 580.159.04 -> 1.2" in said
    assert "20 cells compared: 1 regressions, 1 faster, 18 within noise" in said


def test_nothing_in_common_fails(bench: Callable[..., tuple[int, str]]) -> None:
    status, said = bench("--from", RESULTS / "gloo_merge_cpu.json", "--compare", RESULTS / "merge_h200x2_direct.json")
    assert status == 1
    assert "nothing was compared: the two have no cell in common" in said


def test_a_recorded_result_is_reported_without_measuring(
    bench: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "on_ranks", None)
    words = (
        "--from",
        RESULTS / "merge_h200x2_direct.json",
        "--plot",
        tmp_path / "x.png",
        "--json",
        tmp_path / "x.json",
    )
    status, said = bench(*words)
    assert status == 0
    assert "2 ranks, a GPU each (NVIDIA H200, link NV18); limit: 1.75 us + bytes / 362 GB/s" in said
    assert (tmp_path / "x.png").exists()
    again = Result.read(tmp_path / "x.json")
    assert again.rows == Result.read(RESULTS / "merge_h200x2_direct.json").rows
    status, said = bench("--from", RESULTS / "merge_h200x2.json")
    assert status == 1, "nccl_ag_rs was wrong in it"
    assert "WRONG: 7 of 42 cells" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rows", "1,x"), "--rows: rows[1] is 'x'; expected a whole number above 0"),
        (("--dtype", "int8"), "--dtype: dtype[0] is 'int8'; expected one of bfloat16, float16, float32"),
        (("--lse-base", "10"), "--lse-base: lse_base is '10'; expected one of e, 2"),
        (("--device", "gpu"), "--device: device is 'gpu'; expected one of cpu, cuda"),
        (("--transport", "gloo"), "did you mean 'gloo_a2a'?"),
        (("--sweep", "no.yaml"), "No such file"),
        (("--json", "/nowhere/at/all.json"), "--json /nowhere/at/all.json: there is no folder /nowhere/at"),
        (("--plot", "x.jpg"), "expected a name that ends in .png, .svg, .pdf"),
        (("--compare", "no.json"), "can't be read"),
        (("--from", "no.json"), "can't be read"),
        (("--from", "no.json", "--rows", "1", "--rivals"), "--from measures nothing, so --rows, --rivals would change"),
        (("--from", "no.json", "--sweep", "x"), "so --sweep would change nothing"),
        (("--no-such-option",), "No such option"),
    ],
)
def test_wrong_usage_is_status_2(bench: Callable[..., tuple[int, str]], words: tuple[str, ...], said: str) -> None:
    status, told = bench(*words)
    assert status == 2
    assert said in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told(bench: Callable[..., tuple[int, str]]) -> None:
    status, told = bench("--device", "cuda")
    assert status == 2
    assert "a GPU was asked for, and torch sees none" in told


def test_the_module_is_the_command(nursery: Nursery, tmp_path: Path) -> None:
    words = ("--from", str(RESULTS / "merge_h200x2_direct.json"))
    asked = [nursery.python("-m", module, *more, *words, environment=dict(os.environ), folder=tmp_path)
             for module, more in (("dcpcomm.bench.merge", ()), ("dcpcomm", ("bench",)))]  # fmt: skip
    one, other = (process.wait() for process in asked)
    assert (one.returncode, one.stdout) == (0, other.stdout)


def test_the_help_tells_the_defaults_that_a_sweep_has(bench: Callable[..., tuple[int, str]]) -> None:
    status, said = bench("--help")
    assert status == 0
    told = " ".join(said.replace("│", " ").split())
    for name, field in Sweep.model_fields.items():
        if name in ("transport", "device", "rivals", "replays"):
            continue
        value = field.default
        text = (
            ",".join(f"{one:g}" if isinstance(one, float) else str(one) for one in value)
            if isinstance(value, tuple)
            else str(value)
        )
        begin = told.index(command._OPTIONS[name])
        assert re.search(rf"default: {re.escape(text)}[.,]", told[begin : begin + 200]), name
