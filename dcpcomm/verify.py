"""Proof at construction: a transport is used only after every bit of what it was given arrived, here, today.

Every word sent is a function of (source, destination, round, place), so whatever arrives wrong can be told: a word of
an earlier round is stale, a word of another place is shifted. The rows travel through the very calls and buffers that
merges use, back to back, with one rank late. A transport that can tear a message (`Capabilities.soak_bytes`) also
sends a soak; its verdict is remembered on each machine and counts only where all ranks remember it. Outside of the
places where such a transport is proven, no level leaves the soak out.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dcpcomm import topology, verdicts
from dcpcomm.combine.wire import block_bytes, row_bytes
from dcpcomm.control import Outcome, first_failure, left
from dcpcomm.decision import Fallen
from dcpcomm.errors import TransportTimeout
from dcpcomm.group import Group
from dcpcomm.log import log
from dcpcomm.rounds import TURNS, Rounds, Wrong
from dcpcomm.transport import MergeShape, MergeTransport
from dcpcomm.workspace import Workspace

if TYPE_CHECKING:
    from dcpcomm.config import VerifyConfig

__all__ = ["Load", "load_of", "owes_a_soak", "verify_transport"]

_QUICK, _STANDARD = 4, 12  # rounds
_BLOCK_LIMIT = 1 << 18  # bytes of a block, unless it takes more for a single row or a soak
_SOAK_BLOCK_LIMIT = 1 << 22
_SOAK_DEFAULT, _SOAK_MOST_ROUNDS = 1 << 30, 1000
_WRONG = "wrong bits: "


@dataclass(frozen=True)
class Load:
    """How much a verification sends: `rounds` back to back, and then on until `nbytes` have been sent by each rank, or
    in `most_rounds`.
    """

    rounds: int
    nbytes: int
    block_limit: int
    most_rounds: float = math.inf


def load_of(level: str, soak_bytes: int, remembered: bool, owed: bool = False) -> Load:
    """What `level` asks of a transport that declares `soak_bytes`.

    Args:
        remembered: all ranks hold an earlier soak's verdict.
        owed: see `owes_a_soak`.
    """
    if level == "soak" or ((level == "standard" or owed) and soak_bytes and not remembered):
        if soak_bytes:
            return Load(_STANDARD, soak_bytes, _SOAK_BLOCK_LIMIT)
        # Of small rows a GiB would take minutes; nobody has said that this transport needs one.
        return Load(_STANDARD, _SOAK_DEFAULT, _SOAK_BLOCK_LIMIT, _SOAK_MOST_ROUNDS)
    return Load(_QUICK if level == "quick" else _STANDARD, 0, _BLOCK_LIMIT)


def owes_a_soak(transport: MergeTransport, group: Group) -> bool:
    """Whether a transport that can tear a message is somewhere where it isn't proven: it is then never trusted without
    a soak, whatever `verify.level` says, unless its user takes what comes (`MergeTransport.unverified`). The same on
    every rank.
    """
    can = transport.capabilities
    proven = not can.proven_on or all(place in can.proven_on for place in group.places)
    return bool(can.soak_bytes) and not proven and not transport.unverified


def verify_transport(
    transport: MergeTransport, group: Group, shape: MergeShape, config: VerifyConfig, workspace: Workspace
) -> Fallen | None:
    """Have a connected transport prove itself. Collective over `group`.

    Returns:
        None where every rank found every bit right, else on which rank first, and what. The same on every rank.
    """
    name = transport.name
    key = verdicts.key_of(transport, group)
    held = group.control.agree(Outcome(verdicts.holds(key)), config.deadline_s, f"recalling soaks of {name!r}")
    soak_bytes = 0 if transport.unverified else transport.capabilities.soak_bytes
    load = load_of(config.level, soak_bytes, all(one.ok for one in held), owes_a_soak(transport, group))
    group.control.note("doing", f"verifying transport {name!r}")
    patience = group.exchange_timeout_s
    started = time.monotonic()
    ok, reason = False, ""
    try:
        _check_rounds(transport, group, shape, load, config.deadline_s, workspace)
        doubt = "" if transport.unverified else transport.distrusted()
        ok, reason = not doubt, f"not proven: {doubt}" if doubt else ""
    except Wrong as found:
        reason = f"{_WRONG}{found}"
    except TransportTimeout as error:
        reason = f"could not verify: {error}"
    except Exception as error:  # whatever a plug-in raises is its reason; the ranks must stay together
        reason = f"could not verify: {type(error).__name__}: {error}"
    finally:
        group.exchange_timeout_s = patience
    mine = Outcome(ok, reason, time.monotonic() - started)
    outcomes = group.control.agree(mine, left(config.deadline_s, mine), f"verifying transport {name!r}")
    # A rank that saw wrong bits knows more than one that merely waited for it.
    saw_wrong = [one if one.reason.startswith(_WRONG) else Outcome(True) for one in outcomes]
    failure = first_failure(saw_wrong) or first_failure(outcomes)
    if failure is None:
        if load.nbytes:
            verdicts.remember(key)
        return None
    wrong = failure[1].startswith(_WRONG)
    if wrong and transport.unverified:
        log.warning(
            "rank %d: %r delivers wrong rows, and is used all the same, as its option allow_unverified says: rank %d: "
            "%s", group.rank, name, *failure,
        )  # fmt: skip
        return None
    remedy = "don't use it on this machine"
    if not wrong and failure[1].startswith("could not"):
        remedy = "look at that rank's log; is its process alive?"
    return Fallen("verify", *failure, remedy, wrong)


def _check_rounds(
    transport: MergeTransport, group: Group, shape: MergeShape, load: Load, deadline_s: float, workspace: Workspace
) -> None:
    shuffle = random.Random(0)  # the same on all ranks: which one is late, and how many rows there are
    ends = time.monotonic() + deadline_s
    sent = 0
    replayed = _replayed_rounds(transport, shape, load, workspace.device)
    rounds = Rounds(transport, group, shape, workspace, replayed, ends)
    widths = shape.widths if rounds.merges else (max(shape.widths),)
    sizes = _sizes(shape, group.size, max(widths), load)
    first = ""
    wrong_rounds = 0
    for number in itertools.count():
        if number >= load.rounds + len(replayed) and (sent >= load.nbytes or number >= load.most_rounds):
            break
        # What is left of the deadline, so that a rank that waits and one that waits for it give up together.
        group.exchange_timeout_s = ends - time.monotonic()
        if group.exchange_timeout_s <= 0:
            if first:
                break
            raise TransportTimeout(f"{deadline_s:g} s were over after {number} rounds, {sent} of {load.nbytes} bytes")
        tokens, width = sizes[number % len(sizes)], widths[number % len(widths)]
        late = shuffle.randrange(4 * group.size)
        if late == group.rank:
            time.sleep(0.002)
        if number in replayed:
            tokens, width = sizes[1], widths[0]
        try:
            rounds.play(number, tokens, width)
        except Wrong as found:
            first = first or str(found)  # and on: the peers would wait out their deadline for a rank that stopped here
            wrong_rounds += 1
        except TransportTimeout:
            if not first:
                raise
            break
        sent += block_bytes(shape.rows_per_destination(tokens, group.size), width, shape.dtype.itemsize) * (
            group.size - 1
        )
    if first:
        raise Wrong(f"{first}; {wrong_rounds} of {number} rounds brought wrong bits" if wrong_rounds > 1 else first)


def _replayed_rounds(transport: MergeTransport, shape: MergeShape, load: Load, device: torch.device) -> range:
    """The rounds, after the first ones, in which each channel replays what it captured, an eager call in between."""
    if not topology.on_gpu(device) or not transport.capabilities.graph_capturable:
        return range(0)
    return range(load.rounds, load.rounds + TURNS * shape.channels)


def _sizes(shape: MergeShape, n: int, width: int, load: Load) -> list[int]:
    """Rows of the rounds in turn: few, many, few, some. All that a block may hold, as far as the limit goes."""
    row = row_bytes(width, shape.dtype.itemsize)
    unit = n if shape.scatter == "tokens" else 1
    most = shape.tokens_per_exchange(n)
    rows_of_unit = max(1, shape.rows_per_destination(unit, n))
    fits = max(1, load.block_limit // (row * rows_of_unit)) * unit
    most = min(most, fits)
    if load.nbytes:
        return [unit, most, most, most]
    return [unit, most, unit, max(unit, most // 2 // unit * unit)]
