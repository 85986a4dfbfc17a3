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
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch

import dcpcomm
from dcpcomm import topology
from dcpcomm.combine.engine import engine_in_words
from dcpcomm.config import MergeConfig, config_fingerprint, options_for
from dcpcomm.control import Outcome, first_failure, left
from dcpcomm.cost import Costs, load_costs
from dcpcomm.costkey import key_of, machine_id
from dcpcomm.decision import Decision, Fallen
from dcpcomm.errors import SelectionMismatch, TransportUnavailable, VerificationFailed
from dcpcomm.group import Group
from dcpcomm.libraries import versions_that_matter
from dcpcomm.log import log
from dcpcomm.machine import Card
from dcpcomm.pricing import priced
from dcpcomm.screen import Screened, asked_for, candidate_names, screen, union
from dcpcomm.topology import Facts, local_facts
from dcpcomm.transport import MergeShape, MergeTransport, PeerMemoryTransport, Verdict
from dcpcomm.trial import try_in_children
from dcpcomm.verify import owes_a_soak, verify_transport
from dcpcomm.workspace import Workspace

__all__ = ["connect_transport", "establish", "select"]

T = TypeVar("T")
_ENVIRONMENT_THAT_MATTERS = ("DCPCOMM_CONFIG", "DCPCOMM_TRANSPORT", "DCPCOMM_PLUGINS")


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
        load_costs(config.cost_table)  # what is wrong with a file is told before the ranks agree on anything
        settings = _settings(group, shape, config, device, facts)
    except Exception as error:  # on this rank only, perhaps: the others must hear of it
        group.control.fail(_reason(error))
        raise
    facts = _agree_on(group, settings, facts)
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
                if asked_for(name, config):
                    break  # it was asked for, and it works: the others are only for when it doesn't
        # Rank 0's view of the prices is the decision, as its view of everything else is.
        mine = b""
        if group.rank == 0:
            try:
                mine = priced(shape, config, _costs(config, facts), candidates, fallen, list(standing)).to_json()
            except Exception as error:  # here only: the others must not wait for a decision that never comes
                group.control.fail(_reason(error))
                raise
        published = group.control.exchange(mine, config.verify.deadline_s, "publishing the decision")
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
        if cls.needs_workspace(topology.on_gpu(group.device)):
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


def _costs(config: MergeConfig, facts: Facts) -> Costs:
    """What rank 0 prices by."""
    assert facts.machine is not None
    threads = facts.place == "loopback"
    key = key_of(facts.machine, facts.ranks, versions_that_matter(), threads=threads)
    here = machine_id(facts.machine, facts.ranks)
    found = load_costs(config.cost_table, key)
    costs = Costs.of(key, facts.device, found, machine=here, options=config.options)
    for stale in costs.stale:
        log.warning("%s", stale)
    return costs


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


def _agree_on(group: Group, settings: dict[str, str], facts: Facts) -> Facts:
    """Raise `SelectionMismatch` unless all ranks came with the same settings; the facts, with where every rank is."""
    card = asdict(facts.ranks[0])
    told = {"roster": uuid.uuid4().hex, "card": card, "place": facts.place, "compared": settings}
    mine = json.dumps(told).encode()
    theirs = [json.loads(raw) for raw in group.control.exchange(mine, group.timeout_s, "constructing the merger")]
    cards = tuple(Card(**peer["card"]) for peer in theirs)
    group.hosts = [card.host for card in cards]
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
    return replace(facts, ranks=cards)


def _screen(
    group: Group, shape: MergeShape, config: MergeConfig, facts: Facts
) -> tuple[list[str], dict[str, Fallen], dict[str, type[MergeTransport]]]:
    """The local stages of all candidates at once: candidates, those fallen, and the classes of the others."""
    screened = {}
    for name in candidate_names(config):
        group.control.note("doing", f"looking at transport {name!r}")
        one = screen(name, shape, config, facts)
        if one.cls is not None:
            group.control.note("doing", f"loading what transport {name!r} needs")
            one = _loaded(one, one.cls, facts)
        screened[name] = one
    posted = json.dumps({name: one.told for name, one in screened.items()}).encode()
    by_rank = [json.loads(raw) for raw in group.control.exchange(posted, group.timeout_s, "checking the transports")]
    return *union(by_rank), {name: one.cls for name, one in screened.items() if one.cls is not None}


def _loaded(one: Screened, cls: type[MergeTransport], facts: Facts) -> Screened:
    """`one`, which stands so far, once what it needs is loaded."""
    try:
        verdict = cls.load(facts)
    except Exception as error:  # whatever a plug-in raises is its reason; the ranks must stay together
        verdict = Verdict(False, _reason(error))
    return one if verdict.ok else Screened("import", verdict.reason, verdict.remedy, one.source)


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
