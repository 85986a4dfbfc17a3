"""Machines as probes find them, to decide for where they aren't.

Of two H200 the name, link and driver are those of bench/results/merge_h200x2.json. The others are put together from
what such machines are known to report; UUIDs are made up.
"""

from __future__ import annotations

import itertools

from dcpcomm.machine import Card, Fabric, Gpu, Machine, Pair
from dcpcomm.probe import facts_of
from dcpcomm.topology import Facts

__all__ = ["CPU_ONLY", "GB200_X4", "H100_X8", "H200_X2", "MACHINES", "PCIE_X4", "across", "facts_on", "machine"]


def machine(
    name: str,
    architecture: str,
    count: int,
    link: str,
    *,
    access: bool | None = True,
    reason: str = "",
    host: str = "host-0",
    driver: str = "580.159.04",
    fabric: Fabric | None = None,
) -> Machine:
    """A host with `count` GPUs of a kind, and the same between each two of them."""
    gpus = tuple(Gpu(i, name, f"{host}-{i}", architecture, f"00000000:{i:02x}:00.0", fabric) for i in range(count))
    pairs = tuple(Pair(a.uuid, b.uuid, link, access, reason) for a, b in itertools.combinations(gpus, 2))
    return Machine(host, "cpu Some Processor x64", driver, "13.0", gpus, pairs)


H200_X2 = machine("NVIDIA H200", "sm_90", 2, "NV18")
H100_X8 = machine("NVIDIA H100 80GB HBM3", "sm_90", 8, "NV18", driver="570.86.10", fabric=Fabric("completed"))
_CLUSTER = "7d1c2a30-5b0c-4a33-9b44-0d8f5f1a6c11"
GB200_X4 = machine("NVIDIA GB200", "sm_100", 4, "NV18", driver="580.95.05", fabric=Fabric("completed", _CLUSTER, 32766))
PCIE_X4 = machine(
    "NVIDIA L40S", "sm_89", 4, "PHB", access=False, reason="the chipset doesn't support it", driver="550.54.15"
)
CPU_ONLY = Machine("host-0", "cpu Some Processor x64")
MACHINES = {"2xH200": H200_X2, "8xH100": H100_X8, "4xGB200": GB200_X4, "4xPCIe": PCIE_X4, "CPU": CPU_ONLY}


def facts_on(one: Machine, size: int | None = None) -> list[Facts]:
    """Of each rank of a group on that machine, a GPU each."""
    gpus = [gpu.uuid for gpu in one.gpus]
    n = size or max(2, len(gpus))
    return [facts_of(one, gpus, n, "cuda" if gpus else "cpu", rank) for rank in range(n)]


def across(*hosts: Machine) -> list[Facts]:
    """Of each rank of a group with a rank on every GPU of several hosts."""
    from dataclasses import replace

    cards: tuple[Card, ...] = tuple(one.card(gpu.uuid) for one in hosts for gpu in one.gpus)
    facts = []
    for one in hosts:
        for mine in facts_on(one, len(one.gpus)):
            facts.append(replace(mine, rank=len(facts), world_size=len(cards), ranks=cards))
    return facts
