"""One decision, the same on all ranks.

The bug this field keeps filing is ranks that choose differently and hang. Here every choice is a function of a record
that rank 0 published and all ranks read (`Control.exchange`), so there is nothing left to choose differently by.

    fingerprint -> candidates -> import, declared, check -> prepare -> connect -> verify -> price -> decision

A rank that raises in a stage reports "no" and its reason, and stays; the candidate is closed on every rank before the
next one is tried. A transport whose connecting may hang does it first in child processes, which can be killed.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import torch

import dcpcomm
from dcpcomm.combine.engine import engine_in_words
from dcpcomm.combine.wire import row_bytes
from dcpcomm.config import MergeConfig, config_fingerprint, options_for
from dcpcomm.control import Outcome, first_failure, left
from dcpcomm.cost import load_cost_table
from dcpcomm.decision import Decision, Fallen
from dcpcomm.errors import ConfigError, SelectionMismatch, TransportUnavailable, VerificationFailed
from dcpcomm.group import Group
from dcpcomm.log import log
from dcpcomm.pricing import priced
from dcpcomm.registry import registered_transports, try_load
from dcpcomm.topology import Facts, local_facts
from dcpcomm.transport import MergeShape, MergeTransport, PeerMemoryTransport, Verdict
from dcpcomm.trial import try_in_children
from dcpcomm.verify import owes_a_soak, verify_transport
from dcpcomm.workspace import Workspace

__all__ = ["candidate_names", "connect_transport", "establish", "select"]

T = TypeVar("T")
_ENVIRONMENT_THAT_MATTERS = ("DCPCOMM_CONFIG", "DCPCOMM_TRANSPORT", "DCPCOMM_PLUGINS")


def candidate_names(config: MergeConfig) -> list[str]:
    """The transports that `config` allows, in canonical order: the named one, the preferred ones, the rest by name."""
    names = [] if config.transport == "auto" else [config.transport]
    if config.transport == "auto" or config.on_unavailable == "fallback":
        names += [*config.prefer, *registered_transports()]
    return [name for name in dict.fromkeys(names) if name not in config.forbid]


def select(
    group: Group, shape: MergeShape, config: MergeConfig, device: torch.device, workspace: Workspace
) -> tuple[Decision, dict[str, MergeTransport]]:
    """Agree on transports, connect and verify them. Collective over `group`.

    Returns:
        the decision, and the connected transports that it uses, by name.

    Raises:
        SelectionMismatch: shapes, configs, versions or environments differ between ranks, naming the fields.
        TransportUnavailable: no candidate is left, with the reason of each; the same on every rank.
        VerificationFailed: likewise, where one was left out because it delivered wrong bits.
        TransportTimeout: naming the ranks that did not arrive.
    """
    try:
        facts = local_facts(group.rank, group.size, device, group.loopback is not None)
        table = load_cost_table(config.cost_table)
        settings = _settings(group, shape, config, device, facts)
    except Exception as error:  # on this rank only, perhaps: the others must hear of it
        group.control.fail(_reason(error))
        raise
    _agree_on(group, settings, facts)
    candidates: list[str] = []
    fallen: dict[str, Fallen] = {}
    standing: dict[str, MergeTransport] = {}
    try:
        if group.size > 1:
            candidates, fallen, classes = _screen(group, shape, config, facts)
            for name in candidates:
                if name in fallen:
                    continue
                group.control.note("doing", f"connecting transport {name!r}")
                made = establish(group, shape, config, classes[name], workspace)
                if isinstance(made, Fallen):
                    fallen[name] = made
                    log.info("rank %d: transport %s fell: %s", group.rank, name, made)
                    continue
                standing[name] = made
                if name == config.transport or name in config.prefer:
                    break  # it was asked for, and it works: the others are only for when it doesn't
        # Rank 0's view of the prices is the decision, as its view of everything else is.
        mine = priced(group, shape, config, table, candidates, fallen, list(standing), facts)
        published = group.control.exchange(mine.to_json(), config.verify.deadline_s, "publishing the decision")
        decision = Decision.from_json(published[0])
    except BaseException:
        for transport in standing.values():
            _close(transport)
        raise
    for name, transport in list(standing.items()):
        if name not in decision.transports:
            _attempt(transport.close)
            del standing[name]
    if group.size > 1 and not standing:
        wrong = any(one.wrong for one in decision.fallen.values())
        raise (VerificationFailed if wrong else TransportUnavailable)(_none_left(group.rank, config, decision))
    return decision, standing


def connect_transport(
    group: Group, shape: MergeShape, config: MergeConfig, cls: type[MergeTransport], workspace: Workspace
) -> MergeTransport | Fallen:
    """Construct, prepare and connect one transport on all ranks; closed on all where it fails on any. Collective."""
    deadline, name = config.verify.deadline_s, cls.name
    group.generation += 1
    transport: MergeTransport | None = None
    try:
        if cls.needs_workspace():
            workspace.regions()  # memory that isn't there is this rank's reason too
        transport = cls(group, shape, options_for(config, cls))
        posted = b"+" + transport.prepare()
    except Exception as error:  # whatever a plug-in raises is its reason; the ranks must stay together
        posted = b"-" + _reason(error).encode()
    peers = _together(transport, lambda: group.control.exchange(posted, deadline, f"preparing transport {name!r}"))
    failed = [(rank, peer[1:].decode()) for rank, peer in enumerate(peers) if peer[:1] == b"-"]
    if failed or transport is None:
        _close(transport)
        return Fallen("prepare", *failed[0])

    def connect() -> None:
        transport.connect([peer[1:] for peer in peers])
        if isinstance(transport, PeerMemoryTransport):
            transport.attach()

    started = time.monotonic()
    patience, group.timeout_s = group.timeout_s, deadline  # what a library waits for its peers is this step's
    verdict = _attempt(connect)
    group.timeout_s = patience
    mine = Outcome(verdict.ok, verdict.reason, time.monotonic() - started)
    outcomes = _together(
        transport, lambda: group.control.agree(mine, left(deadline, mine), f"connecting transport {name!r}")
    )
    failure = first_failure(outcomes)
    if failure is not None:
        _close(transport)
        return Fallen("connect", *failure)
    return transport


def establish(
    group: Group, shape: MergeShape, config: MergeConfig, cls: type[MergeTransport], workspace: Workspace
) -> MergeTransport | Fallen:
    """Connect one transport and have it prove itself; closed on all ranks where it fails on any. Collective."""
    # A child process can't stand for a thread of this one.
    if cls.capabilities.may_hang and group.loopback is None:
        fallen = try_in_children(group, shape, config, cls, workspace.device)
        if fallen is not None:
            return fallen
    transport = connect_transport(group, shape, config, cls, workspace)
    if isinstance(transport, Fallen) or (config.verify.level == "off" and not owes_a_soak(transport, group)):
        return transport
    connected = transport
    fallen = _together(connected, lambda: verify_transport(connected, group, shape, config.verify, workspace))
    if fallen is not None:
        _close(connected)
        return fallen
    return connected


def _settings(
    group: Group, shape: MergeShape, config: MergeConfig, device: torch.device, facts: Facts
) -> dict[str, str]:
    """Whatever must be the same on every rank, as text."""
    return {
        "dcpcomm version": dcpcomm.__version__,
        "torch version": torch.__version__,
        "device": facts.device,
        "combine engine": engine_in_words(device, shape.dtype, group.size),
        **{f"shape.{key}": str(value) for key, value in asdict(shape).items()},
        **{f"config.{key}": value for key, value in config_fingerprint(config).items()},
        **{f"environment {key}": os.environ.get(key, "") for key in _ENVIRONMENT_THAT_MATTERS},
    }


def _agree_on(group: Group, settings: dict[str, str], facts: Facts) -> None:
    """Raise `SelectionMismatch` unless all ranks came with the same settings; learn their hosts on the way."""
    card = {"roster": uuid.uuid4().hex, "host": facts.host, "place": facts.place, "compared": settings}
    mine = json.dumps(card).encode()
    theirs = [json.loads(raw) for raw in group.control.exchange(mine, group.timeout_s, "constructing the merger")]
    group.hosts = [peer["host"] for peer in theirs]
    group.places = [peer["place"] for peer in theirs]
    group.roster = [peer["roster"] for peer in theirs]
    keys = sorted({key for peer in theirs for key in peer["compared"]})
    differing = [key for key in keys if len({peer["compared"].get(key) for peer in theirs}) > 1]
    if differing:
        lines = []
        for key in differing:
            values = (f"rank {rank}: {peer['compared'].get(key, 'absent')}" for rank, peer in enumerate(theirs))
            lines.append(f"  {key}: {', '.join(values)}")
        raise SelectionMismatch(
            f"rank {group.rank}: the ranks came to this construction with different settings:\n"
            + "\n".join(lines)
            + "\nGive every rank of the group the same shape, configuration, versions and environment."
        )


def _screen(
    group: Group, shape: MergeShape, config: MergeConfig, facts: Facts
) -> tuple[list[str], dict[str, Fallen], dict[str, type[MergeTransport]]]:
    """The local stages of all candidates at once: candidates, those fallen, and the classes of the others."""
    classes: dict[str, type[MergeTransport]] = {}
    verdicts: dict[str, tuple[str, str, str, str]] = {}
    entries = registered_transports()
    for name in candidate_names(config):
        group.control.note("doing", f"looking at transport {name!r}")
        stage = "import"
        try:
            cls, verdict = try_load(name)
            if cls is not None:
                stage = "declared"
                verdict = _declared(cls, name, group, shape, config, facts)
                if verdict.ok:
                    options_for(config, cls)
                    stage = "check"
                    verdict = cls.check(facts)
                    if verdict.ok:
                        stage = "import"
                        group.control.note("doing", f"loading what transport {name!r} needs")
                        verdict = cls.load(facts)
                    classes[name] = cls
        except Exception as error:  # whatever a plug-in raises is its reason; the ranks must stay together
            remedy = "mend the configuration" if isinstance(error, ConfigError) else ""
            verdict = Verdict(False, _reason(error), remedy)
        source = entries[name].distribution if name in entries else ""
        verdicts[name] = ("" if verdict.ok else stage, verdict.reason, verdict.remedy, source)

    posted = json.dumps(verdicts).encode()
    by_rank = [json.loads(raw) for raw in group.control.exchange(posted, group.timeout_s, "checking the transports")]
    candidates = list(dict.fromkeys(name for verdicts in by_rank for name in verdicts))
    fallen: dict[str, Fallen] = {}
    for name in candidates:
        absent = ("import", "it is not registered there", "install it on every rank", "")
        sources = {theirs[name][3] for theirs in by_rank if name in theirs}
        for rank, theirs in enumerate(by_rank):
            stage, reason, remedy, _ = theirs.get(name, absent)
            if not stage and len(sources) > 1:
                stage, reason = "import", f"the ranks have different versions of it: {', '.join(sorted(sources))}"
                remedy = "install the same version on every rank"
            if stage and name not in fallen:
                fallen[name] = Fallen(stage, rank, reason, remedy)
    return candidates, fallen, classes


def _declared(
    cls: type[MergeTransport], name: str, group: Group, shape: MergeShape, config: MergeConfig, facts: Facts
) -> Verdict:
    """What the transport says of itself, against what is asked of it."""
    can = cls.capabilities
    hosts = len(set(group.hosts))
    if facts.device not in can.devices:
        return Verdict(False, f"works on {', '.join(can.devices)}; the merger is on {facts.device}")
    if shape.dtype not in can.dtypes:
        return Verdict(False, f"carries {', '.join(map(str, can.dtypes))}; the shape has {shape.dtype}")
    if not can.world_sizes[0] <= group.size <= can.world_sizes[1]:
        return Verdict(
            False, f"serves groups of {can.world_sizes[0]} to {can.world_sizes[1]} ranks; this group has {group.size}"
        )
    if not can.multi_host and hosts > 1:
        return Verdict(False, f"stays within one host; the group spans {hosts}", "use a transport for many hosts")
    widths = [width for width in shape.widths if row_bytes(width, shape.dtype.itemsize) % can.row_alignment]
    if widths and can.layout == "packed":
        return Verdict(
            False, f"needs rows of a multiple of {can.row_alignment} bytes; those of width {widths[0]} aren't"
        )
    if shape.require_graph and not (can.graph_capturable and facts.device == "cuda"):
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


def _none_left(rank: int, config: MergeConfig, decision: Decision) -> str:
    lines = []
    for name, fallen in decision.fallen.items():
        remedy = f" ({fallen.remedy})" if fallen.remedy else ""
        lines.append(f"  {name}: fell at {fallen.stage} on rank {fallen.rank}: {fallen.reason}{remedy}")
    head = f"rank {rank}: no transport can serve this group"
    if config.transport != "auto" and config.on_unavailable == "error":
        head = (
            f"rank {rank}: transport {config.transport!r} was named and can't be used; `on_unavailable: fallback` "
            "would try the others"
        )
    return "\n".join([head, *(lines or ["  no candidate: the configuration forbids all of them"])])


def _together(transport: MergeTransport | None, step: Callable[[], T]) -> T:
    """`step`, an agreement with the other ranks; where that fails, nobody will use the transport: close it."""
    try:
        return step()
    except BaseException:
        _close(transport)
        raise


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
