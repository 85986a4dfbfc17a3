"""Prices and what is made of them: the cheapest way for each B, one order where that is asked for, few connections."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dcpcomm
from dcpcomm import costtable
from dcpcomm.bench.costs import table_of, text_of
from dcpcomm.config import MergeConfig
from dcpcomm.cost import ELSEWHERE, HERE, MODEL, Costs, Found, Price, buckets, load_costs, tuned_path, wire_bytes
from dcpcomm.costkey import CostKey, machine_id
from dcpcomm.costtable import CostTable, MergeRow
from dcpcomm.machine import Card, Machine
from dcpcomm.pricing import live_ones, priced

LATENT = {"head_dim": 512, "v_head_dim": 128, "num_heads": 128}


def shape_of(**changes: Any) -> dcpcomm.MergeShape:
    given = {"max_tokens": 256, "num_heads": 16, "head_dim": 128, "dtype": torch.bfloat16, "lse_base": "e"}
    return dcpcomm.MergeShape(**{**given, **changes})


KEY = CostKey(device="cpu Some Processor x8", ranks=4, link="host", versions={"torch": "2"})


def costs(setting: str = "builtin", key: CostKey = KEY, **given: Any) -> Costs:
    return Costs.of(key, "cpu", load_costs(setting, key), **given)


def decide(shape: dcpcomm.MergeShape, standing: list[str], table: str = "builtin", **config: Any) -> Any:
    return priced(shape, MergeConfig(**config), costs(table), standing, {}, standing)


@given(st.integers(1, 100_000))
def test_every_b_falls_into_one_bucket(most: int) -> None:
    ends = buckets(most)
    assert ends == sorted(set(ends))
    assert ends[-1] == most
    assert all(b <= 2 * a for a, b in itertools.pairwise(ends))


@given(st.integers(1, 4096), st.integers(1, 4096), st.sampled_from(["before", "after"]))
def test_more_rows_never_cost_less(a: int, b: int, order: str) -> None:
    key = KEY.model_copy(update={"link": "network", "ranks": 8})
    few, many = (
        costs(key=key).price("gloo_a2a", shape_of(max_tokens=4096, **LATENT), tokens, order)
        for tokens in sorted((a, b))
    )
    assert few.us <= many.us


def test_the_projection_goes_where_it_is_cheaper(tmp_path: Path) -> None:
    """A slow wire makes V columns worth N times the multiplications; a slow processor doesn't."""
    shape = shape_of(**LATENT)
    for rates, order in (("links: {host: {latency_us: 1, gb_s: 0.001}}", "before"), ("links: {}", "after")):
        file = tmp_path / "table.yaml"
        file.write_text(rates)
        decision = decide(shape, ["gloo_a2a"], table=str(file))
        assert {choice.projection for choice in decision.choices} == {order}
        assert {price.origin for row in decision.prices.values() for price in row} == {"model"}


def test_a_fixed_order_is_not_priced_away() -> None:
    for order in ("before", "after"):
        decision = decide(shape_of(**LATENT), ["gloo_a2a"], projection=order)
        assert {choice.projection for choice in decision.choices} == {order}


def test_deterministic_means_one_order_for_every_b(tmp_path: Path) -> None:
    """Few rows and many rows may want different orders, weights being read once; then one is taken for all."""
    file = tmp_path / "table.yaml"
    file.write_text("links: {host: {latency_us: 1, gb_s: 0.1}}\ncompute: {cpu: {tflops: 1, memory_gb_s: 10}}\n")
    mixed = decide(shape_of(**LATENT), ["gloo_a2a"], table=str(file))
    assert {choice.projection for choice in mixed.choices} == {"before", "after"}, "the table no longer shows the case"
    one = decide(shape_of(**LATENT), ["gloo_a2a"], table=str(file), deterministic=True)
    assert len({choice.projection for choice in one.choices}) == 1


def rows(**us: list[float]) -> dict[int, list[Price]]:
    count = len(next(iter(us.values())))
    return {2**i: [Price(name, "", us[name][i], "model") for name in us] for i in range(count)}


def test_those_stay_connected_that_lose_least_in_sum() -> None:
    prices = rows(a=[1, 9, 9], b=[9, 1, 1], c=[3, 3, 3])
    assert live_ones(["a", "b", "c"], prices, MergeConfig(max_live=1)) == ["c"]
    # Greedy from there: the one that takes most off the sum.
    assert live_ones(["a", "b", "c"], prices, MergeConfig(max_live=2)) == ["c", "b"]
    assert live_ones(["a", "b", "c"], prices, MergeConfig(max_live=3)) == ["c", "b", "a"]


def test_no_connection_is_kept_that_is_never_cheaper() -> None:
    assert live_ones(["a", "b"], rows(a=[1, 1], b=[2, 1]), MergeConfig(max_live=2)) == ["a"]


def test_a_tie_goes_to_the_earlier_in_canonical_order() -> None:
    assert live_ones(["b", "a"], rows(a=[1, 1], b=[1, 1]), MergeConfig(max_live=2)) == ["b"]


def test_two_transports_share_the_buckets(tmp_path: Path) -> None:
    file = tmp_path / "table.yaml"
    file.write_text(
        "transports:\n"
        "  loopback: {host: {latency_us: 1, gb_s: 0.01}}\n"
        "  gloo_a2a: {host: {latency_us: 1000, gb_s: 10}}\n"
    )
    decision = decide(shape_of(), ["gloo_a2a", "loopback"], table=str(file), max_live=2)
    assert decision.transport_for(1) == "loopback"
    assert decision.transport_for(256) == "gloo_a2a"
    assert decision.transport_for(9999) == "gloo_a2a"
    assert type(decision).from_json(decision.to_json()) == decision


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("links:\n  host: {latency_us: -1, gb_s: 1}\n", "table.yaml:2: links.host.latency_us"),
        ("link: {}\n", "table.yaml:1: link"),
        ("links: {moon: {latency_us: 1, gb_s: 1}}\n", "table.yaml:1: links.moon"),
        ("links: [", "table.yaml:1"),
        ("merges: {a: {b: []}}\n", "table.yaml:1: the table: Value error, it holds measurements and no key"),
        (
            "key: {device: x, ranks: 2, link: host}\nmerges:\n  a:\n    b:\n"
            + 2 * "    - {wire_bytes: 9, median_us: 1, mad_us: 0, n: 1}\n",
            "rows of a.b are not in ascending order, each once: [9, 9]",
        ),
        (
            "key: {device: x, ranks: 2, link: host}\nmerges:\n  a:\n    b:\n"
            "    - {wire_bytes: 9, median_us: .nan, mad_us: 0, n: 1}\n",
            "table.yaml:5: merges.a.b.0.median_us",
        ),
    ],
)
def test_a_table_that_is_wrong_says_where(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "table.yaml"
    file.write_text(text)
    with pytest.raises(dcpcomm.ConfigError, match=re.escape(said)):
        load_costs(str(file))


# ---------------------------------------------------------------- measured


def merges(*rows: tuple[int, float], name: str = "gloo_a2a", key: CostKey = KEY, **more: Any) -> CostTable:
    """A table of one transport: bytes and microseconds."""
    made = tuple(MergeRow(wire_bytes=at, median_us=us, mad_us=us / 100, n=60) for at, us in rows)
    return CostTable(key=key, merges={name: {"bfloat16": made}}, **more)


def price_of(nbytes: int, *tables: CostTable, **given: Any) -> Price:
    """The price of a merge that sends so many bytes."""
    shape = shape_of(num_heads=4, head_dim=nbytes // 6, max_tokens=1)  # three peers, one head each, two bytes
    assert wire_bytes(shape, 4, 1, shape.head_dim) == nbytes
    found = [Found(f"table {i}", table) for i, table in enumerate(tables)] + load_costs("builtin")
    return Costs.of(KEY, "cpu", found, **given).price("gloo_a2a", shape, 1)


def test_between_two_rows_it_is_linear_and_at_one_it_is_that() -> None:
    table = merges((600, 10.0), (1200, 30.0), (6000, 40.0))
    for nbytes, us in ((600, 10), (900, 20), (1200, 30), (3600, 35), (6000, 40)):
        price = price_of(nbytes, table)
        assert price.us == pytest.approx(us)
        assert price.mad_us == pytest.approx(us / 100)
        assert not price.extrapolated


def test_outside_of_the_rows_it_is_marked() -> None:
    table = merges((600, 10.0), (1200, 30.0))
    below, above = price_of(60, table), price_of(1800, table)
    assert below.us == 10, "what is sent faster than the smallest that was measured, nobody knows"
    assert above.us == pytest.approx(50)
    assert below.extrapolated
    assert above.extrapolated
    alone = price_of(1200, merges((600, 10.0)))
    link = load_costs("builtin")[0].table.links["host"]
    assert alone.us == pytest.approx(10 + 600 / (link.gb_s * 1e3))
    falling = price_of(1800, merges((600, 30.0), (1200, 10.0)))
    assert falling.us == 10, "more bytes never cost less beyond what was measured"


def test_a_price_lies_between_its_neighbours(seed: int) -> None:
    draw = random.Random(seed)
    places = sorted(draw.sample(range(60, 6_000_000, 6), 12))
    table = merges(*((at, draw.uniform(1, 100)) for at in places))
    rows = table.merges["gloo_a2a"]["bfloat16"]
    for low, high in itertools.pairwise(rows):
        price = price_of(draw.randrange(low.at, high.at + 1, 6) // 6 * 6, table)
        near = sorted((low.median_us, high.median_us))
        assert near[0] - 1e-9 <= price.us <= near[1] + 1e-9


def test_the_users_table_comes_before_the_others_and_lacks_are_made_up() -> None:
    mine, theirs = merges((600, 1.0)), merges((600, 2.0))
    assert price_of(600, mine, theirs).us == 1
    assert price_of(600, merges((600, 1.0), name="other"), theirs).us == 2
    assert price_of(600, merges((600, 1.0), name="other")).origin == MODEL


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"device": "NVIDIA H100"}, "device NVIDIA H100, not cpu Some Processor x8"),
        ({"ranks": 2}, "ranks 2, not 4"),
        ({"link": "PIX"}, "link PIX, not host"),
        ({"hosts": 3}, "hosts 3, not 1"),
    ],
)
def test_a_table_of_another_machine_is_not_used_and_the_part_is_named(changed: dict[str, Any], said: str) -> None:
    table = merges((600, 1.0), key=KEY.model_copy(update=changed))
    made = Costs.of(KEY, "cpu", [Found("mine.yaml", table), *load_costs("builtin")])
    assert made.notes == (f"mine.yaml isn't used: it is for {said}",)
    assert price_of(600, table).origin == MODEL


def test_what_changed_since_is_named_and_the_figures_still_count() -> None:
    old = KEY.model_copy(update={"driver": "570.1", "versions": {"torch": "1", "nccl": "2.27.3", "gone": "1"}})
    now = KEY.model_copy(update={"driver": "580.2", "versions": {"torch": "2", "nccl": "2.27.3"}})
    made = Costs.of(now, "cpu", [Found("mine.yaml", merges((600, 1.0), key=old)), *load_costs("builtin")])
    (note,) = made.stale
    assert note.startswith(
        "mine.yaml: measured elsewhere, and perhaps stale, with driver 570.1 -> 580.2; torch 1 -> 2:"
    )
    assert "nccl" not in note
    assert "dcpcomm tune" in note
    assert made.price("gloo_a2a", shape_of(), 1).origin == ELSEWHERE
    fresh = Costs.of(old, "cpu", [Found("mine.yaml", merges((600, 1.0), key=old)), *load_costs("builtin")])
    assert fresh.stale == ()


def test_what_was_measured_on_this_very_machine_is_told_apart() -> None:
    table = merges((600, 1.0), machine="machine-1")
    assert price_of(600, table, machine="machine-1").origin == HERE
    assert price_of(600, table, machine="machine-2").origin == ELSEWHERE
    assert price_of(600, merges((600, 1.0)), machine="").origin == ELSEWHERE, "two that aren't known are not the same"
    one, other = (machine_id(Machine("h"), [Card("h", gpu)]) for gpu in ("a", "b"))
    assert one != other
    assert "a" not in one.removeprefix("machine-").strip("0123456789bcdef"), "it tells no UUID"


def test_a_transport_with_other_options_was_not_measured() -> None:
    table = merges((600, 1.0), options={"gloo_a2a": {"turns": 2}})
    assert price_of(600, table, options={"gloo_a2a": {"turns": 2}}).us == 1
    assert price_of(600, table).origin == MODEL
    made = Costs.of(KEY, "cpu", [Found("mine.yaml", table), *load_costs("builtin")])
    assert "mine.yaml doesn't price gloo_a2a: measured with other options" in made.notes


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    table = merges(
        (600, 1.5), (1200, 2.25), machine="machine-1e5", sources=("a: b", "c"), options={"gloo_a2a": {"x": [1, "2"]}},
        key=KEY.model_copy(update={"versions": {"cuda": "13.0", "torch": "2e5"}}),
    )  # fmt: skip
    file = tmp_path / "table.yaml"
    file.write_text(costtable.dump(table))
    assert costtable.read(file) == table


def test_what_was_tuned_is_found_by_auto_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCPCOMM_CACHE_DIR", str(tmp_path))
    path = tuned_path(KEY)
    assert tmp_path in path.parents
    assert [one.label for one in load_costs("auto", KEY) if not one.shipped] == []
    path.parent.mkdir()
    path.write_text(costtable.dump(merges((600, 1.0))))
    assert [one.label for one in load_costs("auto", KEY) if not one.shipped] == [str(path)]
    assert [one.label for one in load_costs("builtin", KEY) if not one.shipped] == []
    other = KEY.model_copy(update={"ranks": 8})
    assert [one.label for one in load_costs("auto", other) if not one.shipped] == []
    newer = KEY.model_copy(update={"versions": {"torch": "3"}})
    assert [one.label for one in load_costs("auto", newer) if not one.shipped] == [str(path)], "stale, and told"


def test_a_damaged_tuned_table_stops_no_engine_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DCPCOMM_CACHE_DIR", str(tmp_path))
    tuned_path(KEY).parent.mkdir()
    tuned_path(KEY).write_text("merges: [")
    with caplog.at_level("WARNING", "dcpcomm"):
        assert [one for one in load_costs("auto", KEY) if not one.shipped] == []
    assert "left out" in caplog.text
    assert "dcpcomm tune --fresh" in caplog.text


# ---------------------------------------------------------------- shipped

RESULTS = Path(__file__).parent.parent / "bench/results"
SHIPPED = Path(__file__).parent.parent / "configs/costs"


@pytest.mark.parametrize("name", sorted(path.name for path in SHIPPED.glob("*.yaml") if path.name != "model.yaml"))
def test_a_shipped_table_is_what_the_committed_results_make(name: str) -> None:
    text = (SHIPPED / name).read_text(encoding="utf-8")
    files = re.findall(r"bench/results/(\S+\.json)", text.splitlines()[0])
    assert files
    assert text == text_of([RESULTS / file for file in files])
    table = costtable.parse(text, name)
    assert table.key is not None
    assert f"{table.key.slug}.yaml" == name


def test_the_model_of_nvlink_is_a_line_through_what_was_measured() -> None:
    rows = json.loads((RESULTS / "merge_h200x2.json").read_text())["rows"]
    times = {row["size"]: row["times"]["p50"] for row in rows if row["transport"] == "nccl_a2a"}
    first, last = min(times), max(times)
    gb_s = (last - first) / (times[last] - times[first]) / 1e3
    link = load_costs("builtin")[0].table.links["nvlink"]
    assert link.gb_s == round(gb_s)
    assert link.latency_us == pytest.approx(times[first] - first / gb_s / 1e3, abs=0.05)


def result(**changes: Any) -> dict[str, Any]:
    row = {
        "size": 16384, "rows": 1, "heads": 128, "dim": 128, "dtype": "bfloat16", "ranks": 2, "transport": "nccl_a2a",
        "times": {"p50": 12.5, "p99": 13.0, "mad": 0.02, "count": 30}, "wrong": 0, "limit_us": 2.0,
    }  # fmt: skip
    given = {
        "command": "dcpcomm bench", "when": "2026-01-01T00:00:00Z", "commit": "c0", "timing": {},
        "groups": [{"count": 2, "are": "processes", "limit": "2 us"}], "skipped": [], "rows": [row],
        "machine": {"gpus": ["G", "G"], "link": "NV18", "driver": "1"}, "versions": {"torch": "2", "python": "3"},
    }  # fmt: skip
    return {**given, **changes}


def test_rivals_and_what_was_wrong_become_no_figure() -> None:
    good = result()["rows"][0]
    others = [{"transport": "nccl_packed (bare)"}, {"transport": "nccl_ag_rs", "times": None}]
    rows = [*({**good, **one} for one in others), good]
    assert set(table_of({"a.json": result(rows=rows)}).merges) == {"nccl_a2a"}


def test_the_newest_result_of_a_size_counts_and_results_of_two_machines_do_not_mix() -> None:
    old = result(rows=[{**result()["rows"][0], "times": {"p50": 99.0, "p99": 99.0, "mad": 0.1, "count": 30}}])
    new = result(when="2026-02-01T00:00:00Z")
    for order in ((old, new), (new, old)):
        (row,) = table_of(dict(zip(("a.json", "b.json"), order, strict=True))).merges["nccl_a2a"]["bfloat16"]
        assert row.median_us == 12.5
    with pytest.raises(ValueError, match="different machines"):
        table_of({"a.json": old, "b.json": result(versions={"torch": "3"})})
    with pytest.raises(ValueError, match="expected processes"):
        table_of({"a.json": result(groups=[{"count": 2, "are": "threads on one GPU", "limit": "2 us"}])})
    with pytest.raises(ValueError, match=r"of \[2, 2\] ranks"):
        table_of({"a.json": result(groups=result()["groups"] * 2)})


@pytest.mark.parametrize("change", [{"projection": "before", "v_head_dim": 64}, {"empty": 0.5}, {"skew_us": 20.0}])
def test_only_plain_merges_become_prices(change: dict[str, Any]) -> None:
    good = result()["rows"][0]
    slow = {**good, "times": {"p50": 99.0, "p99": 99.0, "mad": 0.1, "count": 30}, **change}
    (row,) = table_of({"a.json": result(rows=[good, slow])}).merges["nccl_a2a"]["bfloat16"]
    assert row.median_us == 12.5


ROWS = "- {{wire_bytes: {wire_bytes}, median_us: {median_us}, mad_us: {mad_us}, n: {n}}}"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"wire_bytes": "true"}, "got true; expected a number"),
        ({"median_us": "true"}, "got true; expected a number"),
        ({"n": "false"}, "got false; expected a number"),
        ({"median_us": "1.0e+308"}, "less than or equal to 1000000000000000"),
        ({"mad_us": "1.0e+308"}, "less than or equal to 1000000000000000"),
        ({"wire_bytes": 10**30}, "less than or equal to 1000000000000000"),
        (None, "gloo_a2a.float32 has no rows; expected some, or nothing of that name"),
    ],
)
def test_figures_that_are_none_are_refused_with_their_place(changed: dict[str, Any] | None, said: str) -> None:
    head = costtable.dump(CostTable(key=KEY))
    given = {"wire_bytes": 4096, "median_us": 20.0, "mad_us": 1.0, "n": 5}
    rows = "[]" if changed is None else "[" + ROWS.format(**{**given, **changed}).removeprefix("- ") + "]"
    with pytest.raises(dcpcomm.ConfigError, match=re.escape(said)) as caught:
        costtable.parse(f"{head}\nmerges: {{gloo_a2a: {{float32: {rows}}}}}\n", "mine.yaml")
    assert str(caught.value).startswith("mine.yaml:")
