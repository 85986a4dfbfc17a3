"""The workspace of the sparse-MLA kernel under DCP: byte for byte what its launcher asks for, and exactly what fits."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dcpcomm.cli
from dcpcomm import ShapeError, workspace
from dcpcomm.trtllm_workspace import COUNTER_BYTES, DEFAULT_SCRATCH_BYTES, trtllm_sparse_mla_parts

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
AT_8 = {"heads_per_rank": 8, "dcp_size": 8}

shapes = st.fixed_dictionaries(
    {
        "heads_per_rank": st.integers(1, 256),
        "dcp_size": st.integers(1, 64),
        "max_q_len": st.integers(1, 1025),
        "scratch_bytes": st.integers(COUNTER_BYTES, 4 * GIB),
    }
)


def test_the_slab_that_a_crash_report_names_byte_for_byte() -> None:
    """vLLM issue 50781: 12,288 tokens at 8 heads, DCP 8; the launcher's own words were 1611661312 bytes."""
    assert trtllm_sparse_mla_parts(max_tokens=12288, **AT_8).slab == 1_611_661_312


def test_the_slab_of_16384_rows() -> None:
    parts = trtllm_sparse_mla_parts(max_tokens=16384, **AT_8)
    assert parts.slab == 2 * GIB + MIB
    assert parts.scratch == DEFAULT_SCRATCH_BYTES == 394 * MIB
    assert workspace.trtllm_sparse_mla_bytes(max_tokens=16384, **AT_8) == parts.total == 2 * GIB + 395 * MIB


def test_without_dcp_there_is_no_slab() -> None:
    assert trtllm_sparse_mla_parts(heads_per_rank=128, dcp_size=1, max_tokens=16384).slab == 0


@pytest.mark.parametrize(("q", "tiles"), [(1, 1), (255, 1), (256, 1), (257, 2), (512, 2), (513, 3)])
def test_queries_are_rounded_up_to_whole_tiles(q: int, tiles: int) -> None:
    parts = trtllm_sparse_mla_parts(heads_per_rank=3, dcp_size=2, max_tokens=5, max_q_len=q)
    assert parts.slab == 8 * 6 * 5 * 256 * tiles + MIB


@given(shapes, st.integers(1, 1 << 40))
def test_what_fits_a_budget_fits_and_one_row_more_does_not(shape: dict[str, int], budget: int) -> None:
    most = workspace.trtllm_sparse_mla_max_tokens(budget, **shape)
    if most is None:
        assert workspace.trtllm_sparse_mla_bytes(max_tokens=1 << 40, **shape) <= budget
        return
    if most:
        assert workspace.trtllm_sparse_mla_bytes(max_tokens=most, **shape) <= budget
    assert workspace.trtllm_sparse_mla_bytes(max_tokens=most + 1, **shape) > budget


@given(shapes, st.integers(1, 1 << 24), st.sampled_from([-1, 0, 1]))
def test_the_inverse_is_exact_at_the_edge(shape: dict[str, int], rows: int, more: int) -> None:
    shape["dcp_size"] = max(2, shape["dcp_size"])
    budget = workspace.trtllm_sparse_mla_bytes(max_tokens=rows, **shape) + more
    assert workspace.trtllm_sparse_mla_max_tokens(budget, **shape) == (rows - 1 if more < 0 else rows)


@pytest.mark.parametrize("name", ["heads_per_rank", "dcp_size", "max_tokens", "max_q_len", "scratch_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", None])
def test_a_wrong_number_is_named(name: str, value: Any) -> None:
    with pytest.raises(ShapeError, match=rf"^{name} is {value!r}; expected an integer of 1 or more$"):
        workspace.trtllm_sparse_mla_bytes(**{**AT_8, "max_tokens": 4, name: value})


def test_a_scratch_that_does_not_hold_the_counters_is_refused() -> None:
    with pytest.raises(ShapeError, match=f"scratch_bytes is {COUNTER_BYTES - 1}; expected at least {COUNTER_BYTES}"):
        trtllm_sparse_mla_parts(max_tokens=1, scratch_bytes=COUNTER_BYTES - 1, **AT_8)
    assert trtllm_sparse_mla_parts(max_tokens=1, scratch_bytes=COUNTER_BYTES, **AT_8).scratch == COUNTER_BYTES


# ---------------------------------------------------------------- the command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`command("--max-tokens", "4")` at 8 heads and DCP 8 -> (exit status, standard output, standard error)."""

    def run(*arguments: str, ranks: int = 8) -> tuple[int, str, str]:
        words = ["dcpcomm", "workspace", "--heads-per-rank", "8", "--dcp-size", str(ranks), *arguments]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            dcpcomm.cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_the_command_prints_each_part(command: Any) -> None:
    status, out, _ = command("--max-tokens", "16384")
    assert status == 0
    rows = [line.split() for line in out.splitlines()]
    assert [row[:2] for row in rows[1:]] == [
        ["slab", str(2 * GIB + MIB)],
        ["scratch", str(394 * MIB)],
        ["total", str(2 * GIB + 395 * MIB)],
    ]
    assert rows[2][2:4] == ["394", "MiB"]


def test_the_command_prints_json_for_programs(command: Any) -> None:
    status, out, _ = command("--max-tokens", "4", "--max-q-len", "257", "--scratch", "8MiB", "--json")
    assert status == 0
    assert json.loads(out) == {
        "heads_per_rank": 8,
        "dcp_size": 8,
        "max_q_len": 257,
        "max_tokens": 4,
        "slab_bytes": 8 * 64 * 4 * 512 + MIB,
        "scratch_bytes": 8 * MIB,
        "total_bytes": 8 * 64 * 4 * 512 + 9 * MIB,
    }


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [(str(GIB), GIB), ("1GiB", GIB), ("1024 MiB", GIB), ("1.5gib", 3 * GIB // 2), (f"{GIB // KIB}KiB", GIB)],
)
def test_the_command_says_how_many_rows_a_budget_holds(command: Any, text: str, nbytes: int) -> None:
    status, out, _ = command("--budget", text, "--json")
    assert status == 0
    facts = json.loads(out)
    assert facts["budget_bytes"] == nbytes
    assert facts["max_tokens"] == (nbytes - 395 * MIB) // (8 * 64 * 256)
    assert facts["total_bytes"] <= nbytes
    assert f"{facts['max_tokens']} rows are the most" in command("--budget", text)[1]


def test_without_dcp_a_budget_holds_any_number_of_rows(command: Any) -> None:
    assert json.loads(command("--budget", "1GiB", "--json", ranks=1)[1])["max_tokens"] is None
    status, out, _ = command("--budget", "1GiB", ranks=1)
    assert status == 0
    assert "any number of rows" in out


def test_a_budget_too_small_for_one_row_fails(command: Any) -> None:
    least = 395 * MIB + 8 * 64 * 256
    assert command("--budget", str(least))[0] == 0
    status, _, err = command("--budget", str(least - 1))
    assert status == 1
    assert f"expected at least {least}" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "either --max-tokens or --budget"),
        (["--max-tokens", "4", "--budget", "1GiB"], "either --max-tokens or --budget"),
        (["--budget", "1GB"], "--budget is '1GB'"),
        (["--budget", "0"], "--budget is '0'"),
        (["--budget", "0.3"], "--budget is '0.3'"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--max-tokens", "4", "--scratch", "7MiB"], "scratch_bytes is 7340032"),
        (["--max-tokens", "4", "--scratch", "much"], "--scratch is 'much'"),
    ],
)
def test_wrong_usage_is_told_in_one_line(command: Any, words: list[str], said: str) -> None:
    status, _, err = command(*words)
    assert status == 2
    assert said in err
    assert len(err.splitlines()) == 1
