"""`dcpcomm tune`: what it measures, how it goes on after an interruption, and that noise changes no decision."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import dcpcomm
from dcpcomm import costtable
from dcpcomm.bench.costs import table_of as table_of_results
from dcpcomm.bench.journal import Journal
from dcpcomm.bench.renewal import renew
from dcpcomm.bench.timing import Summary
from dcpcomm.bench.tune import Cell, Plan, cells_of, table_of
from dcpcomm.config import MergeConfig
from dcpcomm.cost import Costs, Found, load_costs, wire_bytes
from dcpcomm.costkey import CostKey
from dcpcomm.costtable import CostTable, MergeRow
from dcpcomm.pricing import priced
from tests.nursery import Nursery

DATA = Path(__file__).parent / "data"
RESULTS = Path(__file__).parent.parent / "bench/results"
KEY = CostKey(device="cpu Some Processor x8", ranks=2, link="host", versions={"torch": "2"})


def decide(table: CostTable, shape: dcpcomm.MergeShape, names: list[str]) -> list[Any]:
    """The choices that a table makes, for each bucket of B."""
    assert table.key is not None
    device = "cpu" if table.key.link == "host" else "cuda"
    costs = Costs.of(table.key, device, [Found("tuned", table), *load_costs("builtin")])
    return priced(shape, MergeConfig(), costs, names, {}, names).choices


def shape(**changes: Any) -> dcpcomm.MergeShape:
    given = {"max_tokens": 256, "num_heads": 128, "head_dim": 128, "dtype": torch.bfloat16, "lse_base": "e"}
    return dcpcomm.MergeShape(**{**given, **changes})


# ---------------------------------------------------------------- a second run


def test_a_second_run_on_this_kind_of_machine_changes_no_decision() -> None:
    """Two runs of `dcpcomm tune` on one machine of two cores, one after the other, as it wrote them: tests/data."""
    first, second = (costtable.read(DATA / f"tuned_cpu_{turn}.yaml") for turn in ("first", "second"))
    of = shape(head_dim=512, num_heads=32, v_head_dim=128)
    assert first.merges != second.merges, "they were measured apart"
    renewal = renew(first, second)
    assert renewal.kept, "nothing was within noise: the two runs show nothing"
    assert decide(renewal.table, of, ["gloo_a2a"]) == decide(first, of, ["gloo_a2a"])


def test_a_second_run_on_two_h200_changes_no_decision() -> None:
    """Recorded runs of nccl_a2a, 0.8 to 1.6 % apart, beside a transport that lies between them."""
    results = {
        name: json.loads((RESULTS / name).read_text()) for name in ("merge_h200x2.json", "merge_h200x2_direct.json")
    }
    first, second = (table_of_results({name: result}) for name, result in results.items())
    rows = {row.wire_bytes: row for row in second.merges["nccl_a2a"]["bfloat16"]}
    between = tuple(
        row.model_copy(update={"median_us": (row.median_us + rows[row.wire_bytes].median_us) / 2})
        for row in first.merges["nccl_a2a"]["bfloat16"]
        if row.wire_bytes in rows
    )
    old, new = (
        table.model_copy(update={"merges": {
            "nccl_a2a": {"bfloat16": tuple(r for r in table.merges["nccl_a2a"]["bfloat16"] if r.wire_bytes in rows)},
            "other": {"bfloat16": between},
        }})
        for table in (first, second)
    )  # fmt: skip
    names = ["other", "nccl_a2a"]
    of = shape(max_tokens=64)
    assert decide(old, of, names) != decide(new, of, names), "taken as it came, the second run would change decisions"
    renewal = renew(old, new)
    assert not renewal.changed
    assert renewal.kept == 8
    assert decide(renewal.table, of, names) == decide(old, of, names)


def figures(seed: int, spread: float = 0.05) -> CostTable:
    draw = random.Random(seed)
    rows = []
    for at in (16384, 65536, 1 << 20, 1 << 22):
        us = draw.uniform(5, 500)
        rows.append(MergeRow(wire_bytes=at, median_us=us, mad_us=us * draw.uniform(0, spread), n=60))
    by = {"bfloat16": tuple(rows)}
    return CostTable(key=KEY, machine="machine-1", merges={"a": by, "b": by}, sources=("once",))


def moved(table: CostTable, by: Callable[[MergeRow], float]) -> CostTable:
    merges = {
        name: {d: tuple(r.model_copy(update={"median_us": by(r)}) for r in rows) for d, rows in of.items()}
        for name, of in table.merges.items()
    }
    return table.model_copy(update={"merges": merges})


@pytest.mark.parametrize("turn", range(10))
def test_within_noise_the_old_figures_stay(seed: int, turn: int) -> None:
    old, draw = figures(seed + turn), random.Random(seed + turn)
    new = moved(old, lambda row: row.median_us + draw.uniform(-1, 1) * max(2 * row.mad_us, 0.02 * row.median_us) * 0.99)
    renewal = renew(old, new)
    assert (renewal.kept, renewal.added, renewal.changed) == (8, 0, ())
    assert renewal.table.merges == old.merges


def test_what_really_changed_is_taken_and_told(seed: int) -> None:
    old = figures(seed, spread=0.01)
    renewal = renew(old, moved(old, lambda row: row.median_us * (1.2 if row.wire_bytes > 1 << 21 else 1.0)))
    assert (renewal.kept, len(renewal.changed)) == (6, 2)
    assert re.match(r"a bfloat16, 4194304 B: [\d.]+ -> [\d.]+ us", renewal.changed[0])
    assert renewal.table.merges["a"]["bfloat16"][-1].median_us == pytest.approx(
        1.2 * old.merges["a"]["bfloat16"][-1].median_us
    )


def test_what_was_not_measured_again_stays(seed: int) -> None:
    old = figures(seed)
    part = old.model_copy(update={"merges": {"a": {"float16": old.merges["a"]["bfloat16"][:1]}}})
    renewal = renew(old, part)
    assert renewal.added == 1
    assert renewal.table.merges["b"] == old.merges["b"]
    assert set(renewal.table.merges["a"]) == {"bfloat16", "float16"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"key": KEY.model_copy(update={"versions": {"torch": "3"}})}, "torch 2 -> 3"),
        ({"key": KEY.model_copy(update={"ranks": 4})}, "ranks 2, not 4"),
        ({"machine": "machine-2"}, "another machine of this kind"),
    ],
)
def test_figures_of_another_machine_or_version_are_dropped_and_the_reason_told(
    seed: int, changes: dict[str, Any], said: str
) -> None:
    old = figures(seed)
    new = old.model_copy(update={"merges": {"a": old.merges["a"]}, **changes})
    renewal = renew(old, new)
    assert renewal.dropped == said
    assert set(renewal.table.merges) == {"a"}
    assert renewal.kept == 0


def test_figures_of_other_options_are_dropped(seed: int) -> None:
    old = figures(seed)
    new = old.model_copy(
        update={"options": {"a": {"kernel": "fused"}}, "merges": {"a": {"bfloat16": old.merges["a"]["bfloat16"][:2]}}}
    )
    renewal = renew(old, new)
    assert renewal.kept == 0
    assert len(renewal.table.merges["a"]["bfloat16"]) == 2
    assert len(renewal.table.merges["b"]["bfloat16"]) == 4
    assert renewal.table.options == {"a": {"kernel": "fused"}}


# ---------------------------------------------------------------- what is measured


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_size_in_bytes_is_measured_once_and_each_product(size: int) -> None:
    plan = Plan(heads=64, latent=512, value=128, rows=(1, 4, 16, 64))
    cells = cells_of(plan, ["a", "b"], size)
    sizes = [wire_bytes(plan.shape(c.width), size, c.rows, c.width) for c in cells if c.name == "a"]
    assert len(sizes) == len(set(sizes)), "4 rows of 128 are 1 row of 512"
    everything = {wire_bytes(plan.shape(w), size, r, w) for w in (128, 512) for r in plan.rows}
    assert set(sizes) == everything
    assert sorted((c.name == "W_UV", c.heads) for c in cells if c.name == "W_UV") == sorted(
        [(True, h) for h in (64, 64 // size) for _ in plan.rows]
    )
    assert not [c for c in cells_of(Plan(value=None), ["a"], size) if c.name == "W_UV"]


def test_the_spread_is_the_larger_one_of_within_and_between_passes() -> None:
    plan = Plan(heads=4, latent=64, value=None, rows=(1,))
    cell = Cell("a", 1, 64)

    def row(*passes: tuple[float, float]) -> MergeRow:
        found = {cell: [Summary(p50, p50, mad, 20) for p50, mad in passes]}
        return table_of(plan, KEY, 2, found).merges["a"]["bfloat16"][0]

    assert row((10, 0.5), (10, 0.1), (10, 0.2)) == MergeRow(wire_bytes=256, median_us=10, mad_us=0.2, n=60)
    assert row((10, 0.1), (12, 0.1), (11, 0.1)) == MergeRow(wire_bytes=256, median_us=11, mad_us=1, n=60)


# ---------------------------------------------------------------- interrupted


def test_a_journal_has_what_was_noted_also_behind_a_torn_line(tmp_path: Path) -> None:
    path, run = tmp_path / "a/run.journal", {"of": [1, 2]}
    first = Journal(path, run)
    first.note("x", [1.0, 0.5, 20])
    first.note("y", [2.0, 0.5, 20])
    path.write_text(path.read_text()[:-9])  # killed while it wrote
    again = Journal(path, run)
    assert again.read() == {"x": [1.0, 0.5, 20]}
    again.note("z", [3.0, 0.5, 20])
    assert set(Journal(path, run).read()) == {"x", "z"}
    assert Journal(path, {"of": [1, 3]}).read() == {}, "of another run"
    assert Journal(path, run, fresh=True).read() == {}
    Journal(path, {"of": []}).note("w", [1.0])
    assert Journal(path, run).read() == {}, "another run has begun since"
    Journal(path, run).end()
    assert not path.exists()


WORDS = ["tune", "--device", "cpu", "--num-heads", "4", "--head-dim", "64", "--v-head-dim", "32", "--rows", "1,4"]
WORDS += ["--passes", "2", "--rounds", "3"]


@pytest.fixture
def tune(nursery: Nursery, tmp_path: Path) -> Callable[..., Any]:
    def run(*words: str, status: int = 0) -> Any:
        environment = {**os.environ, "DCPCOMM_CACHE_DIR": str(tmp_path), "COLUMNS": "80"}
        done = nursery.python("-m", "dcpcomm", *words, environment=environment).wait()
        assert done.returncode == status, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return json.loads(done.stdout) if "--json" in words else done.stdout + done.stderr

    return run


def test_it_measures_and_selection_reads_what_it_wrote(tune: Callable[..., Any], tmp_path: Path) -> None:
    found = tune(*WORDS, "--json")
    assert Path(found["file"]).parent == tmp_path / "costs"
    assert [row["wire_bytes"] for row in found["table"]["merges"]["gloo_a2a"]["bfloat16"]] == [128, 256, 512, 1024]
    assert {one["heads"] for one in found["table"]["projections"]["bfloat16"]} == {2, 4}
    assert found["resumed"] == found["kept"] == 0
    assert not list((tmp_path / "costs").glob("*.journal")), "what is finished is not gone on with"
    explain = ["explain", "--device", "cpu", "--num-heads", "4", "--head-dim", "64", "--v-head-dim", "32"]
    said = tune(*explain, "--max-tokens", "8")
    assert "measured here" in said
    assert "~" in said, "8 rows are more than were measured"
    assert f"{found['file']}: measured here" in said
    again = tune(*WORDS, "--json")
    assert again["kept"] + len(again["changed"]) == 8
    assert again["added"] == 0


def test_an_interrupted_run_goes_on_where_it_was(tune: Callable[..., Any], tmp_path: Path) -> None:
    from dcpcomm.bench.tune import journal_of

    key = CostKey(**tune(*WORDS, "--json")["key"])
    plan = Plan((), {}, 4, 64, 32, "bfloat16", (1, 4), 2, 3, "cpu", False)
    before = os.environ.get("DCPCOMM_CACHE_DIR")
    os.environ["DCPCOMM_CACHE_DIR"] = str(tmp_path)
    try:
        journal = journal_of(plan, key)
    finally:
        os.environ.pop("DCPCOMM_CACHE_DIR")
        if before is not None:
            os.environ["DCPCOMM_CACHE_DIR"] = before
    for turn in (1, 2):
        journal.note(f"{Cell('gloo_a2a', 1, 32)} (pass {turn})", [123456.0, 1.0, 3])
    found = tune(*WORDS, "--json")
    assert found["resumed"] == 2
    rows = {row["wire_bytes"]: row for row in found["table"]["merges"]["gloo_a2a"]["bfloat16"]}
    assert rows[128]["median_us"] == 123456.0, "taken from what was measured before the interruption"
    assert len(rows) == 4
    assert tune(*WORDS, "--json")["resumed"] == 0
    assert asdict(plan)["fresh"] is False


def test_wrong_usage_is_told_in_one_line(tune: Callable[..., Any]) -> None:
    assert "expected numbers above 0" in tune("tune", "--rows", "1,x", status=2)
    assert "--ranks is 1" in tune("tune", "--ranks", "1", status=2)
    assert "gloo_a2a" in tune("tune", "--transport", "gloo", status=2)
    assert "--device is 'gpu'" in tune("tune", "--device", "gpu", status=2)
    assert "there is no folder" in tune("tune", "--output", "/nowhere/at/all.yaml", status=2)
    if not torch.cuda.is_available():
        assert "torch sees no GPU" in tune("tune", "--device", "cuda", status=2)
    said = tune(*WORDS, "--transport", "loopback", status=1)
    assert "the ranks are processes, not threads of one process" in said
