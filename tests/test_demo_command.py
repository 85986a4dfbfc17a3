"""`dcpcomm demo` as a user runs it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import dcpcomm
from dcpcomm.cli import main
from dcpcomm.cli.demo import _variants, show
from dcpcomm.demo.judge import RankReport
from dcpcomm.demo.run import Settings, run_rank
from dcpcomm.registry import registered_transports


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of `dcpcomm demo ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["dcpcomm", "demo", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


def test_json_is_pure_and_passes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(monkeypatch, capsys, "--json", "--tokens", "8", "--ranks", "4")
    result = json.loads(out)
    assert (status, err, result["passed"], result["failures"]) == (0, "", True, [])
    assert result["ranks"] == 4
    assert 0 < result["empty_pairs"] < result["pairs"] == 4 * 4 * 2 * 8
    assert all(r["tokens"] == r["reference_tokens"] and len(r["tokens"]) == 8 for r in result["requests"])
    variants = result["variants"]
    assert {one["transport"] for one in variants} == {"gloo_a2a"}
    sent = {one["projection"]: one["wire_bytes_per_rank"] for one in variants}
    assert 2 * sent["before"] < sent["after"]
    assert all(len(one["merge_median_us"]) == 2 and 0 < one["merge_share"] < 1 for one in variants)
    assert result["min_logit_margin"] > 100 * max(one["max_logit_difference"] for one in variants)


def test_people_are_told_what_is_shown_and_that_it_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"[bold]not markup[/]" * 500)
    status, out, err = run(
        monkeypatch, capsys, "--ranks", "2", "--tokens", "3", "--context", str(text), "--projection", "after"
    )
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert "KV cache sharded over 2 processes" in lines[0]
    assert lines[-1].startswith("PASS")
    assert "1308 more left out" in " ".join(out.split())
    assert out.index("\n after ") < out.index("\n before "), "the order that was asked for comes first"


def test_one_rank_needs_nobody(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(monkeypatch, capsys, "--json", "--ranks", "1", "--tokens", "2", "--projection", "before")
    result = json.loads(out)
    assert (status, result["passed"], result["empty_pairs"]) == (0, True, 0)
    assert [(one["transport"], one["projection"]) for one in result["variants"]] == [(None, "before"), (None, "after")]


def test_partials_in_bfloat16_over_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--ranks", "2", "--tokens", "6", "--dtype", "bfloat16", "--transport", "all")
    status, out, err = run(monkeypatch, capsys, *words)
    assert (status, err) == (0, "")
    said = " ".join(out.split())
    assert "of 24 tokens are the same here" in said
    assert "skipped nccl_a2a: fell at" in said
    assert "PASS 2 processes chose the " in said


def run_rank_deaf_to_counts(settings: Settings) -> RankReport:
    """`run_rank` with a merger that drops the valid counts."""
    whole = dcpcomm.DCPMerger.merge_and_project

    def deaf(self: Any, *args: Any, valid_counts: Any, **keywords: Any) -> Any:
        return whole(self, *args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcpcomm.DCPMerger, "merge_and_project", deaf)
        return run_rank(settings)


def test_a_merge_that_ignores_counts_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dcpcomm.demo.run.run_rank", run_rank_deaf_to_counts)
    status, out, _ = run(monkeypatch, capsys, "--json", "--tokens", "4", "--ranks", "4")
    result = json.loads(out)
    assert (status, result["passed"]) == (1, False)
    assert any("chose another token" in failure for failure in result["failures"])
    assert result["variants"][0]["max_attention_difference"] is None

    show(result)
    told = capsys.readouterr().out
    assert "FAIL" in told
    assert "not finite" in told
    assert "PASS" not in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "5"], "24 heads divide over 1, 2, 3, 4, 6, 8, 12, 24"),
        (["--ranks", "0"], "--ranks is 0"),
        (["--ranks", "-4"], "--ranks is -4"),
        (["--tokens", "0"], "--tokens is 0; expected 1 or more"),
        (["--context", "no/such/file"], "no/such/file: No such file"),
        (["--context", "."], "Is a directory"),
        (["--context", "EMPTY"], "is empty"),
        (["--transport", "glo_a2a"], "did you mean 'gloo_a2a'"),
        (["--device", "gpu"], "--device is 'gpu'"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    said: str,
) -> None:
    (tmp_path / "empty").touch()
    status, out, err = run(monkeypatch, capsys, *(str(tmp_path / "empty") if a == "EMPTY" else a for a in arguments))
    assert (status, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_ranks_against_torchrun_is_refused_instead_of_ignored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    status, _, err = run(monkeypatch, capsys, "--ranks", "4")
    assert status == 2
    assert "--ranks is 4, but torchrun started 2" in err


def test_a_transport_that_cannot_serve_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(monkeypatch, capsys, "--ranks", "2", "--transport", "loopback")
    assert (status, out) == (1, "")
    assert "loopback" in err
    assert "Traceback" not in err


def test_under_torchrun_rank_0_alone_speaks() -> None:
    launched = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("-m", "dcpcomm", "demo", "--json", "--tokens", "2"),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert launched.returncode == 0, launched.stderr
    assert json.loads(launched.stdout)["ranks"] == 2


def test_no_name_and_no_figure_is_cut_in_80_columns() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    one = {
        "projection": "before", "merge_median_us": [123456.0], "step_median_us": 1234567.0, "merge_share": 1.0,
        "wire_bytes_per_rank": 1234567, "max_attention_difference": 2.7e-06,
    }  # fmt: skip
    names, modes = registered_transports(), ("eager", "graph")
    variants = [{**one, "transport": name, "mode": mode} for name in names for mode in modes]
    console.print(_variants({"variants": variants}))
    text = console.export_text()
    assert "…" not in text
    for word in (*names, "before", "123,456", "1,234,567", "100%", "2.7e-06", "transport", "differs"):
        assert word in text
