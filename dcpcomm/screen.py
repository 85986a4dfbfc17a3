"""From facts to candidates: what each transport says of itself and of this machine, against what is asked.

Nothing here talks to other ranks, allocates, or touches a device, so that a decision can be looked at where its machine
isn't: facts in, reasons out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcpcomm.combine.wire import row_bytes
from dcpcomm.config import MergeConfig, options_for
from dcpcomm.cost import Costs
from dcpcomm.decision import Decision, Fallen
from dcpcomm.errors import ConfigError
from dcpcomm.pricing import priced
from dcpcomm.registry import registered_transports, try_load
from dcpcomm.topology import Facts
from dcpcomm.transport import MergeShape, MergeTransport, Verdict

__all__ = ["Screened", "asked_for", "candidate_names", "declared", "foreseen", "screen", "union"]

_ABSENT = ("import", "it is not registered there", "install it on every rank", "")


@dataclass(frozen=True)
class Screened:
    """What one rank makes of one candidate.

    Attributes:
        stage: where it fell; "" where it stands.
        source: the distribution it comes from.
        cls: where it stands.
    """

    stage: str
    reason: str
    remedy: str
    source: str
    cls: type[MergeTransport] | None = None

    @property
    def told(self) -> tuple[str, str, str, str]:
        """What the other ranks need to know."""
        return self.stage, self.reason, self.remedy, self.source


def candidate_names(config: MergeConfig) -> list[str]:
    """The transports that `config` allows, in canonical order: the named one, the preferred ones, the rest by name."""
    names = [] if config.transport == "auto" else [config.transport]
    if config.transport == "auto" or config.on_unavailable == "fallback":
        names += [*config.prefer, *registered_transports()]
    return [name for name in dict.fromkeys(names) if name not in config.forbid]


def asked_for(name: str, config: MergeConfig) -> bool:
    """Whether `config` names or prefers it: then it is taken without asking its price, proven or not."""
    return name == config.transport or name in config.prefer


def foreseen(facts: Sequence[Facts], shape: MergeShape, config: MergeConfig, costs: Costs) -> Decision:
    """What would be decided if all that can be tried also connects and proves itself.

    Args:
        facts: of each rank, by rank.
        costs: rank 0's.
    """
    by_rank = [{name: screen(name, shape, config, one).told for name in candidate_names(config)} for one in facts]
    candidates, fallen = union(by_rank)
    standing = []
    for name in candidates:
        if name not in fallen:
            standing.append(name)
            if asked_for(name, config):
                break
    return priced(shape, config, costs, candidates, fallen, standing)


def screen(name: str, shape: MergeShape, config: MergeConfig, facts: Facts) -> Screened:
    """The local stages of one candidate on one rank: import, declared, check."""
    stage, found = "import", None
    entry = registered_transports().get(name)
    try:
        cls, verdict = try_load(name)
        if cls is not None:
            stage = "declared"
            verdict = declared(cls, name, shape, config, facts)
            if verdict.ok:
                options_for(config, cls)
                stage = "check"
                verdict = cls.check(facts)
                found = cls
    except Exception as error:  # whatever a plug-in raises is its reason; the ranks must stay together
        remedy = "mend the configuration" if isinstance(error, ConfigError) else ""
        verdict = Verdict(False, f"{type(error).__name__}: {error}", remedy)
    source = entry.distribution if entry is not None else ""
    return Screened("" if verdict.ok else stage, verdict.reason, verdict.remedy, source, found if verdict.ok else None)


def union(by_rank: Sequence[Mapping[str, Sequence[str]]]) -> tuple[list[str], dict[str, Fallen]]:
    """What all ranks together make of it: the candidates in order, and where they fell.

    Args:
        by_rank: of each rank, `Screened.told` by name.
    """
    candidates = list(dict.fromkeys(name for verdicts in by_rank for name in verdicts))
    fallen: dict[str, Fallen] = {}
    for name in candidates:
        sources = {theirs[name][3] for theirs in by_rank if name in theirs}
        for rank, theirs in enumerate(by_rank):
            stage, reason, remedy, _ = theirs.get(name, _ABSENT)
            if not stage and len(sources) > 1:
                stage, reason = "import", f"the ranks have different versions of it: {', '.join(sorted(sources))}"
                remedy = "install the same version on every rank"
            if stage and name not in fallen:
                fallen[name] = Fallen(stage, rank, reason, remedy)
    return candidates, fallen


def declared(cls: type[MergeTransport], name: str, shape: MergeShape, config: MergeConfig, facts: Facts) -> Verdict:
    """What the transport says of itself, against what is asked of it."""
    can, size = cls.capabilities, facts.world_size
    if facts.device not in can.devices:
        return Verdict(False, f"works on {', '.join(can.devices)}; the merger is on {facts.device}")
    if shape.dtype not in can.dtypes:
        return Verdict(False, f"carries {', '.join(map(str, can.dtypes))}; the shape has {shape.dtype}")
    if not can.world_sizes[0] <= size <= can.world_sizes[1]:
        return Verdict(
            False, f"serves groups of {can.world_sizes[0]} to {can.world_sizes[1]} ranks; this group has {size}"
        )
    if not can.multi_host and facts.hosts > 1:
        return Verdict(False, f"stays within one host; the group spans {facts.hosts}", "use a transport for many hosts")
    widths = [width for width in shape.widths if row_bytes(width, shape.dtype.itemsize) % can.row_alignment]
    if widths and can.layout == "packed":
        return Verdict(
            False, f"needs rows of a multiple of {can.row_alignment} bytes; those of width {widths[0]} aren't"
        )
    if shape.require_graph and not (can.graph_capturable and facts.device == "cuda"):
        return Verdict(False, "can't be captured in a CUDA graph; the shape has require_graph=True")
    if config.deterministic and not can.deterministic:
        return Verdict(False, "isn't bit-equal to the canonical arithmetic; the config has deterministic: true")
    if can.proven_on and facts.place not in can.proven_on and not asked_for(name, config):
        return Verdict(
            False,
            f"proven on {', '.join(can.proven_on)}; this is {facts.place}",
            f"name it (transport: {name}) or prefer it",
        )
    return Verdict(True)
