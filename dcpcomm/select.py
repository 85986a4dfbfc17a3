"""One decision, the same on all ranks.

The bug this field keeps filing is ranks that choose differently and hang. Here every choice is a pure function of a
record that rank 0 published and all ranks read (`Control.exchange`), so there is nothing left to choose differently
by.

    fingerprint -> candidates -> import, declared, check -> prepare -> connect -> decision

A rank that raises in a stage reports "no" and its reason, and stays; the candidate is closed on every rank before the
next one is tried.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import dcpcomm
from dcpcomm import cost
from dcpcomm.config import MergeConfig, config_fingerprint, options_for
from dcpcomm.errors import ConfigError, SelectionMismatch, TransportUnavailable
from dcpcomm.group import Group
from dcpcomm.registry import load_transport, registered_transports
from dcpcomm.topology import Facts, local_facts
from dcpcomm.transport import MergeShape, MergeTransport, Verdict

__all__ = ["STAGES", "Decision", "Fallen", "candidate_names", "connect_transport", "select"]

STAGES = ("import", "declared", "check", "prepare", "connect")
_ENVIRONMENT_THAT_MATTERS = ("DCPCOMM_CONFIG", "DCPCOMM_TRANSPORT", "DCPCOMM_PLUGINS")


@dataclass(frozen=True)
class Fallen:
    """Where a candidate fell: on which stage, on which rank first, why, and what would change that."""

    stage: str
    rank: int
    reason: str
    remedy: str = ""


@dataclass(frozen=True)
class Decision:
    """What was decided, by rank 0, for all ranks; `describe` says why.

    Attributes:
        transport: the name of the one in use; None for a group of one rank.
        candidates: names in the order in which they were considered.
        fallen: candidate -> where it fell.
        projection: upper end of a bucket of B -> "before" or "after"; empty where nothing is projected.
        projection_origin: where the prices behind it came from: "model", or "config" where it was fixed.
    """

    transport: str | None
    candidates: list[str] = field(default_factory=list)
    fallen: dict[str, Fallen] = field(default_factory=dict)
    projection: dict[int, str] = field(default_factory=dict)
    projection_origin: str = "model"

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Decision:
        value = json.loads(raw)
        value["fallen"] = {name: Fallen(**fallen) for name, fallen in value["fallen"].items()}
        value["projection"] = {int(bucket): order for bucket, order in value["projection"].items()}
        return cls(**value)

    def projection_order(self, tokens: int) -> str:
        """ "before" or "after", for a merge of `tokens` rows."""
        for bucket, order in self.projection.items():
            if tokens <= bucket:
                return order
        return next(reversed(self.projection.values()))


def candidate_names(config: MergeConfig) -> list[str]:
    """The transports that `config` allows, in canonical order: the named one, the preferred ones, then the rest by
    name.
    """
    names = [] if config.transport == "auto" else [config.transport]
    if config.transport == "auto" or config.on_unavailable == "fallback":
        names += [*config.prefer, *registered_transports()]
    return [name for name in dict.fromkeys(names) if name not in config.forbid]


def select(
    group: Group, shape: MergeShape, config: MergeConfig, device: torch.device
) -> tuple[Decision, MergeTransport | None]:
    """Agree on a transport and connect it. Collective over `group`.

    Returns:
        the decision, and the connected transport (None for one rank).

    Raises:
        SelectionMismatch: shapes, configs, versions or environments differ between ranks, naming the fields.
        TransportUnavailable: no candidate is left, with the reason of each; the same on every rank.
        TransportTimeout: naming the ranks that did not arrive.
    """
    facts = local_facts(group.rank, group.size, device, group.loopback is not None)
    _compare_fingerprints(group, shape, config, facts)
    if group.size == 1:
        return Decision(
            None,
            projection=_projection(shape, config, facts)[0],
            projection_origin=_projection(shape, config, facts)[1],
        ), None

    candidates, fallen, classes = _screen(group, shape, config, facts)
    transport: MergeTransport | None = None
    for name in candidates:
        if name in fallen:
            continue
        made = connect_transport(group, shape, config, classes.get(name), name)
        if isinstance(made, Fallen):
            fallen[name] = made
            continue
        transport = made
        break

    orders, origin = _projection(shape, config, facts)
    mine = Decision(transport.name if transport is not None else None, candidates, fallen, orders, origin)
    decision = Decision.from_json(
        group.control.exchange(mine.to_json(), config.verify.deadline_s, "publishing the decision")[0]
    )
    if transport is None:
        raise TransportUnavailable(_none_left(group.rank, config, decision))
    return decision, transport


def connect_transport(
    group: Group, shape: MergeShape, config: MergeConfig, cls: type[MergeTransport] | None, name: str
) -> MergeTransport | Fallen:
    """Construct, prepare and connect one transport on all ranks; closed on all where it fails on any. Collective."""
    deadline = config.verify.deadline_s
    transport: MergeTransport | None = None
    try:
        if cls is None:
            raise TransportUnavailable(f"transport {name!r} is not registered on rank {group.rank}")
        transport = cls(group, shape, options_for(config, cls))
        posted = b"+" + transport.prepare()
    except Exception as error:  # whatever a plug-in raises is its reason; the ranks must stay together
        posted = b"-" + _reason(error).encode()
    peers = group.control.exchange(posted, deadline, f"preparing transport {name!r}")
    failed = [(rank, peer[1:].decode()) for rank, peer in enumerate(peers) if peer[:1] == b"-"]
    if failed:
        _close(transport)
        return Fallen("prepare", *failed[0])

    verdict = _attempt(lambda: transport.connect([peer[1:] for peer in peers]))  # type: ignore[union-attr]
    outcomes = group.control.agree(verdict.ok, verdict.reason, deadline, f"connecting transport {name!r}")
    for rank, outcome in enumerate(outcomes):
        if not outcome.ok:
            _close(transport)
            return Fallen("connect", rank, outcome.reason)
    assert transport is not None
    return transport


def _compare_fingerprints(group: Group, shape: MergeShape, config: MergeConfig, facts: Facts) -> None:
    compared = {
        "dcpcomm version": dcpcomm.__version__,
        "torch version": torch.__version__,
        "device": facts.device,
        **{f"shape.{key}": str(value) for key, value in asdict(shape).items()},
        **{f"config.{key}": value for key, value in config_fingerprint(config).items()},
        **{f"environment {key}": os.environ.get(key, "") for key in _ENVIRONMENT_THAT_MATTERS},
    }
    mine = json.dumps({"roster": uuid.uuid4().hex, "host": facts.host, "compared": compared}).encode()
    theirs = [json.loads(raw) for raw in group.control.exchange(mine, group.timeout_s, "constructing the merger")]
    group.hosts = [peer["host"] for peer in theirs]
    keys = sorted({key for peer in theirs for key in peer["compared"]})
    differing = [key for key in keys if len({peer["compared"].get(key) for peer in theirs}) > 1]
    if differing:
        lines = [
            f"  {key}: "
            + ", ".join(f"rank {rank}: {peer['compared'].get(key, 'absent')}" for rank, peer in enumerate(theirs))
            for key in differing
        ]
        raise SelectionMismatch(
            f"rank {group.rank}: the ranks came to this construction with different settings:\n"
            + "\n".join(lines)
            + "\nGive every rank of the group the same shape, configuration, versions and environment."
        )


def _screen(
    group: Group, shape: MergeShape, config: MergeConfig, facts: Facts
) -> tuple[list[str], dict[str, Fallen], dict[str, type[MergeTransport]]]:
    """The local stages of all candidates at once: candidates, those fallen, and the classes that this "
    "rank could load."""
    classes: dict[str, type[MergeTransport]] = {}
    verdicts: dict[str, tuple[str, str, str]] = {}
    for name in candidate_names(config):
        stage = "import"
        try:
            cls = load_transport(name)
            stage, verdict = "declared", _declared(cls, name, group, shape, config, facts)
            if verdict.ok:
                classes[name] = cls
                options_for(config, cls)
                stage, verdict = "check", cls.check(facts)
        except Exception as error:  # whatever a plug-in raises is its reason; the ranks must stay together
            verdict = Verdict(False, _reason(error), "mend the configuration" if isinstance(error, ConfigError) else "")
        verdicts[name] = ("" if verdict.ok else stage, verdict.reason, verdict.remedy)

    posted = json.dumps(verdicts).encode()
    by_rank = [json.loads(raw) for raw in group.control.exchange(posted, group.timeout_s, "checking the transports")]
    candidates = list(dict.fromkeys(name for verdicts in by_rank for name in verdicts))
    fallen: dict[str, Fallen] = {}
    for name in candidates:
        for rank, theirs in enumerate(by_rank):
            stage, reason, remedy = theirs.get(
                name, ("import", "not registered there", f"install it on rank {rank} too")
            )
            if stage and name not in fallen:
                fallen[name] = Fallen(stage, rank, reason, remedy)
    return candidates, fallen, classes


def _declared(
    cls: type[MergeTransport], name: str, group: Group, shape: MergeShape, config: MergeConfig, facts: Facts
) -> Verdict:
    """What the transport says of itself, against what is asked of it."""
    can = cls.capabilities
    if facts.device not in can.devices:
        return Verdict(False, f"works on {', '.join(can.devices)}; the merger is on {facts.device}")
    if shape.dtype not in can.dtypes:
        return Verdict(False, f"carries {', '.join(map(str, can.dtypes))}; the shape has {shape.dtype}")
    if not can.world_sizes[0] <= group.size <= can.world_sizes[1]:
        return Verdict(
            False,
            f"serves groups of {can.world_sizes[0]} to {can.world_sizes[1]} ranks; this group has {group.size}",
        )
    if not can.multi_host and len(set(group.hosts)) > 1:
        return Verdict(
            False,
            f"stays within one host; the group spans {len(set(group.hosts))}",
            "use a transport for many hosts",
        )
    if shape.require_graph and not can.graph_capturable:
        return Verdict(False, "can't be captured in a CUDA graph; the shape has require_graph=True")
    if config.deterministic and not can.deterministic:
        return Verdict(False, "isn't bit-equal to the canonical arithmetic; the config has deterministic: true")
    asked_for = name == config.transport or name in config.prefer
    if can.proven_on and facts.place not in can.proven_on and not asked_for:
        return Verdict(
            False,
            f"proven on {', '.join(can.proven_on)}; this is {facts.place}",
            f"name it (transport: {name}) or prefer it",
        )
    return Verdict(True)


def _projection(shape: MergeShape, config: MergeConfig, facts: Facts) -> tuple[dict[int, str], str]:
    if shape.v_head_dim is None:
        return {}, "config"
    if config.projection != "auto":
        return {shape.max_tokens: config.projection}, "config"
    return cost.projection_orders(shape, facts.world_size, cost.load_model(facts.place), config.deterministic), "model"


def _none_left(rank: int, config: MergeConfig, decision: Decision) -> str:
    named = config.transport != "auto" and config.on_unavailable == "error"
    lines = [
        f"  {name}: fell at {fallen.stage} on rank {fallen.rank}: {fallen.reason}"
        + (f" ({fallen.remedy})" if fallen.remedy else "")
        for name, fallen in decision.fallen.items()
    ]
    head = (
        f"rank {rank}: transport {config.transport!r} was named and can't be used; `on_unavailable: "
        "fallback` would try the others"
        if named
        else f"rank {rank}: no transport can serve this group"
    )
    return "\n".join([head, *(lines or ["  no candidate: the configuration forbids all of them"])])


def _attempt(step: Callable[[], Any]) -> Verdict:
    try:
        step()
    except Exception as error:  # whatever a plug-in raises is its reason; the ranks must stay together
        return Verdict(False, _reason(error))
    return Verdict(True)


def _close(transport: MergeTransport | None) -> None:
    if transport is not None:
        _attempt(transport.close)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
