"""Prices and what is made of them: the cheapest way for each B, one order where that is asked for, few connections."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dcpcomm
from dcpcomm.config import MergeConfig
from dcpcomm.cost import Price, buckets, load_cost_table
from dcpcomm.group import Group
from dcpcomm.pricing import live_ones, priced
from dcpcomm.testing import LoopbackWorld
from dcpcomm.topology import local_facts

LATENT = {"head_dim": 512, "v_head_dim": 128, "num_heads": 128}


def shape_of(**changes: Any) -> dcpcomm.MergeShape:
    given = {"max_tokens": 256, "num_heads": 16, "head_dim": 128, "dtype": torch.bfloat16, "lse_base": "e"}
    return dcpcomm.MergeShape(**{**given, **changes})


def decide(shape: dcpcomm.MergeShape, standing: list[str], n: int = 4, table: str = "builtin", **config: Any) -> Any:
    group = Group.of(LoopbackWorld(n).groups[0])
    group.hosts = ["here"] * n
    facts = local_facts(0, n, torch.device("cpu"), False)
    return priced(group, shape, MergeConfig(**config), load_cost_table(table), standing, {}, standing, facts)


@given(st.integers(1, 100_000))
def test_every_b_falls_into_one_bucket(most: int) -> None:
    ends = buckets(most)
    assert ends == sorted(set(ends))
    assert ends[-1] == most
    assert all(b <= 2 * a for a, b in itertools.pairwise(ends))


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_more_rows_never_cost_less(a: int, b: int) -> None:
    table = load_cost_table("builtin")
    few, many = sorted((a, b))
    prices = [
        table.price("gloo_a2a", shape_of(max_tokens=4096, **LATENT), 8, t, "network", "cpu", ("before", "after"))
        for t in (few, many)
    ]
    assert prices[0].us <= prices[1].us


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
    ],
)
def test_a_table_that_is_wrong_says_where(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "table.yaml"
    file.write_text(text)
    with pytest.raises(dcpcomm.ConfigError, match=said.replace(".", r"\.")):
        load_cost_table(str(file))
