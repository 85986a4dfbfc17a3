"""What this machine offers to merges: GPUs and links, libraries, rights, and what each transport makes of them.

Local, and nothing is connected or sent: a verdict here says what could be tried; verification says what works.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dcpcomm.config import MergeConfig
from dcpcomm.cost import Costs, load_costs
from dcpcomm.costkey import key_of, machine_id
from dcpcomm.libraries import Library, libraries, versions_that_matter
from dcpcomm.machine import Card, Gpu, Machine
from dcpcomm.registry import registered_transports
from dcpcomm.rights import Right, rights
from dcpcomm.screen import screen
from dcpcomm.topology import Facts, this_machine
from dcpcomm.transport import MergeShape

__all__ = ["Probed", "TransportVerdict", "facts_of", "probe", "verdicts_on"]


@dataclass(frozen=True)
class TransportVerdict:
    """What a transport makes of this machine.

    Attributes:
        verdict: "yes", "if named" (works here, but isn't proven on this kind of machine), or "no".
        stage: where it fell ("import", "declared", "check").
    """

    name: str
    verdict: str
    stage: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class Probed:
    """All of it.

    Attributes:
        visible: UUIDs of the GPUs that CUDA shows this process, in its order.
        ranks: size of the group that the verdicts and tables are for.
        tables: what is known of cost tables for such a group.
    """

    machine: Machine
    visible: tuple[str, ...]
    ranks: int
    device: str
    libraries: tuple[Library, ...]
    rights: tuple[Right, ...]
    transports: tuple[TransportVerdict, ...]
    tables: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `Machine.from_dict` takes the machine back."""
        return asdict(self)


def probe(
    ranks: int | None = None, device: str | None = None, config: MergeConfig | None = None, *, transports: bool = True
) -> Probed:
    """Look at this machine.

    Args:
        ranks: size of the group to judge for; default: one for each visible GPU, 2 at least.
        device: "cpu" or "cuda"; default: cuda where there is one.
        config: what transports and tables are judged by; default: auto.
        transports: whether to judge them; else none is listed.
    """
    given = config or MergeConfig()
    machine, visible = this_machine(), _visible()
    on = device or ("cuda" if visible else "cpu")
    size = ranks or max(2, len(visible))
    facts = facts_of(machine, visible if on == "cuda" else (), size, on)
    key = key_of(machine, facts.ranks, versions_that_matter())
    found = load_costs(given.cost_table, key)
    costs = Costs.of(key, on, found, machine=machine_id(machine, facts.ranks), options=given.options)
    return Probed(
        machine=machine,
        visible=visible,
        ranks=size,
        device=on,
        libraries=tuple(libraries()),
        rights=tuple(rights()),
        transports=tuple(verdicts_on(facts, given)) if transports else (),
        tables=costs.notes,
    )


def verdicts_on(facts: Facts, config: MergeConfig, shape: MergeShape | None = None) -> list[TransportVerdict]:
    """What every registered transport makes of a rank's facts.

    Args:
        shape: of the merges; default: bfloat16, 128 columns.
    """
    of = shape or MergeShape(
        max_tokens=64, num_heads=facts.world_size, head_dim=128, dtype=torch.bfloat16, lse_base="e"
    )
    verdicts = []
    for name in registered_transports():
        one = screen(name, of, config, facts)
        verdict = "no" if one.stage else "yes"
        if one.stage == "declared" and not screen(name, of, config.model_copy(update={"transport": name}), facts).stage:
            verdict = "if named"
        verdicts.append(TransportVerdict(name, verdict, one.stage, one.reason, one.remedy))
    return verdicts


def facts_of(machine: Machine, gpus: Sequence[str], size: int, device: str, rank: int = 0) -> Facts:
    """The facts of one rank of a group of `size` on that machine alone, the ranks on its GPUs in turn.

    Args:
        gpus: their UUIDs; none on CPU.
    """
    uuids = list(itertools.islice(itertools.cycle(gpus), size)) if gpus else [""] * size
    mine: Gpu | None = machine.gpu(uuids[rank])
    cards = tuple(machine.card(uuid) if uuid else Card(machine.host) for uuid in uuids)
    place = device if device != "cuda" else mine.architecture if mine is not None else "an unknown GPU"
    return replace(Facts(rank, size, machine.host, device, place, torch.__version__), machine=machine, ranks=cards)


def _visible() -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ()
    return tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count()))
