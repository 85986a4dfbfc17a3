"""Decisions on machines that aren't here: which transports stand, which is taken by a given table, and in what words
the others are left out.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcpcomm
from dcpcomm.backends import cupy_ipc
from dcpcomm.backends.cupy_ipc import CupyIpc
from dcpcomm.config import MergeConfig
from dcpcomm.cost import ELSEWHERE, HERE, MODEL, Costs, Found, load_costs
from dcpcomm.costkey import CostKey, key_of
from dcpcomm.costtable import CostTable, MergeRow
from dcpcomm.decision import Decision
from dcpcomm.machine import Fabric, Machine
from dcpcomm.screen import foreseen
from dcpcomm.topology import Facts
from tests.machines import CPU_ONLY, GB200_X4, H100_X8, H200_X2, MACHINES, PCIE_X4, across, facts_on, machine

VERSIONS = {"torch": "2.11.0+cu130", "cuda": "13.0", "nccl": "2.28.9"}
NCCL = {"nccl_a2a", "nccl_ag_rs"}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA build of torch with NCCL, and CuPy; `cupy_ipc` proven on GPUs side by side, or its price isn't asked."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(cupy_ipc, "runtime", lambda: None)
    monkeypatch.setattr(CupyIpc, "capabilities", replace(CupyIpc.capabilities, proven_on=("sm_90", "sm_100", "sm_89")))


def shape(**changes: Any) -> dcpcomm.MergeShape:
    given = {"max_tokens": 256, "num_heads": 128, "head_dim": 128, "dtype": torch.bfloat16, "lse_base": "e"}
    return dcpcomm.MergeShape(**{**given, **changes})


def key(facts: list[Facts]) -> CostKey:
    assert facts[0].machine is not None
    return key_of(facts[0].machine, facts[0].ranks, VERSIONS)


def decide(facts: list[Facts], *tables: CostTable, of: dcpcomm.MergeShape | None = None, **config: Any) -> Decision:
    found = [Found(f"table {i}", table) for i, table in enumerate(tables)] + load_costs("builtin")
    costs = Costs.of(key(facts), facts[0].device, found, machine="machine-here")
    decision = foreseen(facts, of or shape(), MergeConfig(**config), costs)
    assert Decision.from_json(decision.to_json()) == decision, "what is published is what was decided"
    return decision


def table(facts: list[Facts], spread: float = 0.1, **us: dict[int, float]) -> CostTable:
    """A measurement on that machine: transport -> KiB -> microseconds."""
    merges = {
        name: {
            "bfloat16": tuple(
                MergeRow(wire_bytes=kib << 10, median_us=figure, mad_us=spread, n=60)
                for kib, figure in sorted(by.items())
            )
        }
        for name, by in us.items()
    }
    return CostTable(key=key(facts), machine="machine-here", merges=merges)


def standing(decision: Decision) -> set[str]:
    return {price.transport for row in decision.prices.values() for price in row}


def reason(decision: Decision, name: str) -> str:
    fallen = decision.fallen[name]
    return f"{fallen.stage} on rank {fallen.rank}: {fallen.reason}"


# ---------------------------------------------------------------- who stands, and the words for those who don't


@pytest.mark.parametrize("name", ["2xH200", "8xH100", "4xGB200"])
def test_gpus_side_by_side_leave_out_what_is_for_cpus_and_threads(name: str) -> None:
    decision = decide(facts_on(MACHINES[name]))
    assert standing(decision) == {"cupy_ipc", *NCCL}
    assert reason(decision, "gloo_a2a") == "declared on rank 0: works on cpu; the merger is on cuda"
    assert reason(decision, "loopback") == "declared on rank 0: works on cpu; the merger is on cuda"
    assert reason(decision, "loopback_peer").startswith("check on rank 0: ")


def test_cards_without_peer_access_are_named_and_nccl_carries() -> None:
    decision = decide(facts_on(PCIE_X4), prefer=["cupy_ipc"])
    assert standing(decision) == NCCL
    assert reason(decision, "cupy_ipc") == (
        "check on rank 0: GPU 0 and GPU 1 (PHB) have no access to each other's memory: the chipset doesn't support it"
    )
    assert "nccl_a2a" in decision.fallen["cupy_ipc"].remedy


def test_one_pair_without_access_is_enough_and_is_the_one_that_is_named() -> None:
    whole = machine("NVIDIA H100 PCIe", "sm_90", 4, "NV12")
    pairs = list(whole.pairs)
    pairs[4] = replace(pairs[4], link="SYS", access=False, reason="")
    decision = decide(facts_on(replace(whole, pairs=tuple(pairs))))
    assert "GPU 1 and GPU 3 (SYS)" in reason(decision, "cupy_ipc")


def test_access_that_nobody_knows_of_is_no_reason() -> None:
    unknown = machine("NVIDIA H200", "sm_90", 2, "?", access=None)
    assert "cupy_ipc" in standing(decide(facts_on(unknown)))


def test_gpus_that_the_group_does_not_use_are_no_reason() -> None:
    pairs = list(H100_X8.pairs)
    pairs[-1] = replace(pairs[-1], access=False)  # of GPUs 6 and 7
    assert "cupy_ipc" in standing(decide(facts_on(replace(H100_X8, pairs=tuple(pairs)), size=4)))


def test_two_hosts_leave_out_what_stays_within_one() -> None:
    other = machine("NVIDIA H100 80GB HBM3", "sm_90", 4, "NV18", host="host-1")
    facts = across(machine("NVIDIA H100 80GB HBM3", "sm_90", 4, "NV18"), other)
    decision = decide(facts, prefer=["cupy_ipc"])
    assert len(facts) == 8
    assert standing(decision) == NCCL
    assert reason(decision, "cupy_ipc") == "declared on rank 0: stays within one host; the group spans 2"
    assert key(facts).link == "network"
    assert key(facts).hosts == 2


def test_cpus_merge_over_gloo_alone() -> None:
    decision = decide(facts_on(CPU_ONLY))
    assert standing(decision) == {"gloo_a2a"}
    for name in ("cupy_ipc", *NCCL):
        assert reason(decision, name) == "declared on rank 0: works on cuda; the merger is on cpu"
    assert {choice.transport for choice in decision.choices} == {"gloo_a2a"}


def test_what_is_not_proven_on_this_kind_of_gpu_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CupyIpc, "capabilities", replace(CupyIpc.capabilities, proven_on=("sm_100",)))
    assert "cupy_ipc" in standing(decide(facts_on(GB200_X4)))
    decision = decide(facts_on(H200_X2))
    assert reason(decision, "cupy_ipc") == "declared on rank 0: proven on sm_100; this is sm_90"
    assert decision.fallen["cupy_ipc"].remedy == "name it (transport: cupy_ipc) or prefer it"
    assert decide(facts_on(H200_X2), transport="cupy_ipc").transports == ["cupy_ipc"]


def test_what_one_rank_alone_knows_counts_for_all() -> None:
    facts = facts_on(H100_X8)
    facts[5] = replace(facts[5], machine=machine("NVIDIA H100 80GB HBM3", "sm_90", 8, "SYS", access=False))
    assert decide(facts).fallen["cupy_ipc"].rank == 5


# ---------------------------------------------------------------- which is taken, by a given table


def test_few_rows_and_many_go_over_different_transports() -> None:
    facts = facts_on(H200_X2)
    measured = table(facts, cupy_ipc={16: 3, 4096: 60}, nccl_a2a={16: 12, 4096: 41}, nccl_ag_rs={16: 46, 4096: 90})
    decision = decide(facts, measured)
    assert decision.transports == ["cupy_ipc", "nccl_a2a"]
    assert decision.transport_for(1) == "cupy_ipc"
    assert decision.transport_for(256) == "nccl_a2a"
    assert reason(decision, "nccl_ag_rs").startswith("price on rank 0: not among the max_live=2")
    assert {price.origin for row in decision.prices.values() for price in row} == {HERE}
    one = decide(facts, measured, max_live=1)
    assert one.transports == ["cupy_ipc"], "in sum over all sizes"
    assert reason(one, "nccl_a2a").startswith("price on rank 0: not among the max_live=1")


def test_what_lies_within_the_spread_goes_to_the_earlier_in_canonical_order() -> None:
    facts = facts_on(H100_X8)
    sizes = (16, 4096)
    for gap, spread, taken in ((1.0, 0.6, "cupy_ipc"), (1.0, 0.4, "nccl_a2a")):
        measured = table(
            facts, spread, cupy_ipc=dict.fromkeys(sizes, 10 + gap), nccl_a2a=dict.fromkeys(sizes, 10.0),
            nccl_ag_rs=dict.fromkeys(sizes, 50.0),
        )  # fmt: skip
        assert decide(facts, measured).transports == [taken], f"{gap} us apart, spread {spread}"


def test_the_shipped_table_prices_two_h200() -> None:
    decision = decide(facts_on(H200_X2))
    by_name = {price.transport: price for price in decision.prices[1]}
    assert by_name["nccl_a2a"].origin == ELSEWHERE
    assert by_name["nccl_a2a"].us == pytest.approx(12.59)
    assert by_name["cupy_ipc"].origin == MODEL
    assert decision.notes == ["nvidia-h200-x2-nv18.yaml: measured elsewhere"]
    without = decide(facts_on(H200_X2), forbid=["cupy_ipc"])
    assert {choice.transport for choice in without.choices} == {"nccl_a2a"}


def gb200(fabric: Fabric | None) -> Machine:
    return machine("NVIDIA GB200", "sm_100", 4, "NV18", host="host-1", fabric=fabric)


@pytest.mark.parametrize(
    ("facts", "link", "model"),
    [
        (facts_on(H100_X8), "NV18", "nvlink"),
        (facts_on(GB200_X4), "NV18", "nvlink"),
        (facts_on(PCIE_X4), "PHB", "pcie"),
        (facts_on(CPU_ONLY), "host", "host"),
        (facts_on(machine("NVIDIA H200", "sm_90", 2, "?")), "?", "gpu"),
        (across(GB200_X4, gb200(GB200_X4.gpus[0].fabric)), "fabric", "fabric"),
        (across(GB200_X4, gb200(Fabric("completed", "another", 1))), "network", "network"),
    ],
    ids=["8xH100", "4xGB200", "4xPCIe", "CPU", "unknown", "one fabric", "two fabrics"],
)  # fmt: skip
def test_where_nothing_was_measured_the_class_of_the_link_is_the_model(
    facts: list[Facts], link: str, model: str
) -> None:
    assert key(facts).link == link
    decision = decide(facts)
    found = [price for row in decision.prices.values() for price in row]
    assert {price.origin for price in found} == {MODEL}
    rate = load_costs("builtin")[0].table.links[model]  # type: ignore[index]
    name = "gloo_a2a" if model == "host" else "nccl_a2a"
    of_one = next(price for price in decision.prices[1] if price.transport == name)
    n = len(facts)
    assert of_one.us == pytest.approx(rate.latency_us + (n - 1) * (128 // n) * 256 / (rate.gb_s * 1e3))
    assert decision.notes == []


@pytest.mark.parametrize(
    ("links", "slowest"),
    [(["NV18", "NV4", "NV12"], "NV4"), (["NV18", "SYS", "PIX"], "SYS"), (["PIX", "PXB", "PIX"], "PXB"),
     (["NV18", "?", "SYS"], "?")],
)  # fmt: skip
def test_a_group_is_as_fast_as_its_slowest_pair(links: list[str], slowest: str) -> None:
    whole = machine("NVIDIA A100", "sm_80", 3, "NV12")
    pairs = tuple(replace(pair, link=link) for pair, link in zip(whole.pairs, links, strict=True))
    assert key(facts_on(replace(whole, pairs=pairs))).link == slowest


def test_what_is_equal_is_projected_after_the_merge() -> None:
    from dcpcomm.costtable import Projection, ProjectionRow

    facts, latent = facts_on(H200_X2), shape(head_dim=512, v_head_dim=128)
    row = (ProjectionRow(tokens=1, median_us=5, mad_us=50, n=60),)
    products = tuple(Projection(heads=h, latent=512, value=128, rows=row) for h in (64, 128))
    measured = table(facts, nccl_a2a={16: 12, 64: 13, 16384: 40}).model_copy(
        update={"projections": {"bfloat16": products}}
    )
    decision = decide(facts, measured, of=latent, transport="nccl_a2a")
    assert {choice.projection for choice in decision.choices} == {"after"}


def test_the_order_of_projection_follows_the_figures_of_the_products() -> None:
    from dcpcomm.costtable import Projection, ProjectionRow

    facts = facts_on(H200_X2)
    latent = shape(head_dim=512, v_head_dim=128)

    def products(all_heads_us: float) -> CostTable:
        rows = {128: all_heads_us, 64: 5.0}
        return table(facts, nccl_a2a={16: 12, 64: 13, 4096: 41, 16384: 124}).model_copy(
            update={
                "projections": {
                    "bfloat16": tuple(
                        Projection(heads=h, latent=512, value=128, rows=(
                            ProjectionRow(tokens=1, median_us=us, mad_us=0.1, n=60),
                            ProjectionRow(tokens=256, median_us=us + 1, mad_us=0.1, n=60),
                        ))
                        for h, us in rows.items()
                    )
                }
            }
        )  # fmt: skip

    def orders(all_heads_us: float) -> list[str]:
        decision = decide(facts, products(all_heads_us), of=latent, transport="nccl_a2a")
        return [choice.projection for choice in decision.choices]

    cheap, dear, between = orders(5.5), orders(500.0), orders(20.0)
    assert set(cheap) == {"before"}
    assert set(dear) == {"after"}
    assert between == sorted(between), "few rows gain nothing on the wire, many do: after, then before"
    assert set(between) == {"after", "before"}
    decision = decide(facts, products(20.0), of=latent, transport="nccl_a2a")
    assert {price.origin for row in decision.prices.values() for price in row} == {HERE}


@pytest.mark.parametrize("one", MACHINES.values(), ids=MACHINES)
def test_a_machine_survives_json(one: Machine) -> None:
    assert Machine.from_dict(json.loads(json.dumps(one.as_dict()))) == one
