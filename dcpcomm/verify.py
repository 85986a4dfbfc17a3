"""Proof at construction: a transport is used only after every bit of what it was given arrived, here, today.

Every word sent is a function of (source, destination, round, place), so whatever arrives wrong can be told: a word of
an earlier round is stale, a word of another place is shifted. The rows travel through the very calls and buffers that
merges use, back to back, with one rank late. A transport that can tear a message (`Capabilities.soak_bytes`) also
sends a soak; its verdict is remembered on each machine and counts only where all ranks remember it. Outside of the
places where such a transport is proven, no level leaves the soak out.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dcpcomm import pattern, topology, verdicts
from dcpcomm.combine.engine import by_destination
from dcpcomm.combine.wire import block_bytes, row_bytes, wire_views
from dcpcomm.control import Outcome, first_failure, left
from dcpcomm.decision import Fallen
from dcpcomm.errors import TransportTimeout
from dcpcomm.graphs import captured
from dcpcomm.group import Group
from dcpcomm.log import log
from dcpcomm.reference import merge_partials
from dcpcomm.transport import MergeShape, MergeTransport
from dcpcomm.workspace import Workspace

if TYPE_CHECKING:
    from dcpcomm.config import VerifyConfig

__all__ = ["Load", "load_of", "owes_a_soak", "verify_transport"]

_QUICK, _STANDARD = 4, 12  # rounds
_BLOCK_LIMIT = 1 << 18  # bytes of a block, unless it takes more for a single row or a soak
_SOAK_BLOCK_LIMIT = 1 << 22
_SOAK_DEFAULT = 1 << 30
_POISON = 0xA5
_REPLAYED, _EAGER_TURN = 4, 2  # rounds of a channel from one captured graph, and which of them is eager all the same
_Run = Callable[..., Any]
_WRONG = "wrong bits: "


class _Wrong(Exception):
    """Something else arrived than was sent. `what`: says it, or finds it out, which takes longer than a round."""

    def __init__(self, what: str | Callable[[], str]) -> None:
        super().__init__("wrong bits")
        self.what = what

    def __str__(self) -> str:
        return self.what if isinstance(self.what, str) else self.what()


@dataclass(frozen=True)
class Load:
    """How much a verification sends: `rounds` back to back, and then on until `nbytes` have been sent by each rank."""

    rounds: int
    nbytes: int
    block_limit: int


def load_of(level: str, soak_bytes: int, remembered: bool, owed: bool = False) -> Load:
    """What `level` asks of a transport that declares `soak_bytes`.

    Args:
        remembered: all ranks hold an earlier soak's verdict.
        owed: see `owes_a_soak`.
    """
    if level == "soak" or ((level == "standard" or owed) and soak_bytes and not remembered):
        return Load(_STANDARD, soak_bytes or _SOAK_DEFAULT, _SOAK_BLOCK_LIMIT)
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
    except _Wrong as found:
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
    merges = transport.fused_merge is not None or transport.fused is not None
    views = transport.capabilities.layout == "view"
    round_of = _round_of_merges if merges else _round_of_views if views else _round_of_blocks
    widths = shape.widths if merges else (max(shape.widths),)
    shuffle = random.Random(0)  # the same on all ranks: which one is late, and how many rows there are
    ends = time.monotonic() + deadline_s
    sent = 0
    sizes = _sizes(shape, group.size, max(widths), load)
    first = ""
    wrong_rounds = 0
    replayed = _replayed_rounds(transport, shape, load, workspace.device)
    replays = [_Replayed(workspace.device, _captures_of(group, number, ends)) for number in range(shape.channels)]
    for number in itertools.count():
        if number >= load.rounds + len(replayed) and sent >= load.nbytes:
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
        channel, run = _how(number, replayed, replays)
        try:
            round_of(transport, group, shape, number, channel, tokens, width, workspace, run)
        except _Wrong as found:
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
        raise _Wrong(f"{first}; {wrong_rounds} of {number} rounds brought wrong bits" if wrong_rounds > 1 else first)


def _replayed_rounds(transport: MergeTransport, shape: MergeShape, load: Load, device: torch.device) -> range:
    """The rounds, after the first ones, in which each channel replays what it captured, an eager call in between."""
    if not topology.on_gpu(device) or not transport.capabilities.graph_capturable:
        return range(0)
    return range(load.rounds, load.rounds + _REPLAYED * shape.channels)


def _eagerly(step: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    return step(*tensors)


class _Replayed:
    """Calls a step by replaying the graph in which its first call was captured, on that call's tensors.

    Args:
        meet: returns when all ranks have captured.
    """

    def __init__(self, device: torch.device, meet: Callable[[], None]) -> None:
        self._device, self._meet = device, meet
        self._graph: Any = None
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._result: Any = None

    def __call__(self, step: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        if self._graph is None:
            self._tensors = tensors

            def captured_step() -> None:
                self._result = step(*tensors)

            self._graph = captured(captured_step, self._device)
            self._meet()
        for kept, new in zip(self._tensors, tensors, strict=True):
            if kept.data_ptr() != new.data_ptr():
                kept.copy_(new)
        self._graph.replay()
        return self._result


def _captures_of(group: Group, channel: int, ends: float) -> Callable[[], None]:
    """What waits until all ranks have captured: a capture takes memory from the driver, which waits for the device, and
    in a process of several ranks for a peer's replay that waits for this rank.
    """

    def meet() -> None:
        if group.loopback is None:
            return
        store = group.store(f"captured/{channel}")
        store.set(str(group.rank), "1")
        late = group.peers
        while late := [rank for rank in late if not store.check([str(rank)])]:
            if time.monotonic() > ends:
                raise TransportTimeout(f"rank {', '.join(map(str, late))} captured nothing in time", tuple(late))
            time.sleep(0.0005)

    return meet


def _how(number: int, replayed: range, replays: list[_Replayed]) -> tuple[int, _Run]:
    """The channel of round `number`, and by what its step is called; `replays` by channel."""
    if number not in replayed:
        return number % len(replays), _eagerly
    channel, turn = divmod(number - replayed.start, _REPLAYED)
    return channel, _eagerly if turn == _EAGER_TURN else replays[channel]


def _arrived(transport: MergeTransport, channel: int, device: torch.device) -> None:
    """Wait for the rows, and hear what the transport found out."""
    if topology.on_gpu(device):
        torch.cuda.current_stream(device).synchronize()
    transport.poll(channel)


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


def _round_of_blocks(
    transport: MergeTransport,
    group: Group,
    shape: MergeShape,
    number: int,
    channel: int,
    tokens: int,
    width: int,
    workspace: Workspace,
    run: _Run,
) -> None:
    n, rows = group.size, shape.rows_per_destination(tokens, group.size)
    regions = workspace.regions()
    views = wire_views(
        regions[f"send[{channel}]"],
        regions[f"recv[{channel}]"],
        n,
        rows,
        1,
        width,
        shape.dtype,
        transport.capabilities.ragged,
    )
    send, recv = (one.blocks for one in views)
    nbytes = (1 + rows) * send.shape[2]
    for destination in range(n):
        send[destination].view(-1).copy_(pattern.block(nbytes, group.rank, destination, number, workspace.device))
    recv.fill_(_POISON)
    arrived = run(lambda send, recv: transport.exchange(send, channel, recv=recv), send, recv)
    _arrived(transport, channel, workspace.device)
    if tuple(arrived.shape) != tuple(send.shape):
        raise _Wrong(f"exchange returned shape {tuple(arrived.shape)}; expected {tuple(send.shape)}")
    for source in sorted(group.peers):
        _compare(arrived[source].reshape(-1), source, group, number, send.shape[2])


def _round_of_views(
    transport: MergeTransport,
    group: Group,
    shape: MergeShape,
    number: int,
    channel: int,
    tokens: int,
    width: int,
    workspace: Workspace,
    run: _Run,
) -> None:
    n, device = group.size, workspace.device
    t, h = shape.result_rows(tokens, n)
    size = t * h * width * shape.dtype.itemsize

    def fields(source: int, destination: int) -> tuple[torch.Tensor, torch.Tensor]:
        raw = pattern.block(size + 4 * t * h, source, destination, number, device)
        return raw[:size].view(shape.dtype).view(t, h, width), raw[size:].view(torch.float32).view(t, h)

    outs, lses = zip(*(fields(group.rank, destination) for destination in range(n)), strict=True)
    # Strided as a merge's views are: the destination's rows lie side by side in neither of the two.
    out, lse = torch.stack(outs).transpose(0, 1), torch.stack(lses).transpose(0, 1)
    got_out, got_lse = run(lambda out, lse: transport.exchange((out, lse), channel), out, lse)
    _arrived(transport, channel, device)
    for source in range(n):
        parts = (got_out[:, source].contiguous(), got_lse[:, source].contiguous())
        raw = torch.cat([part.view(-1).view(torch.uint8) for part in parts])
        _compare(raw, source, group, number, width * shape.dtype.itemsize, t * h)


def _compare(got: torch.Tensor, source: int, group: Group, number: int, row: int, rows: int | None = None) -> None:
    """Raise `_Wrong` with how much of `got`, uint8, is wrong, where it begins, and what is there instead.

    Args:
        row: bytes of one.
        rows: how many there are; behind them are float32 LSEs. None: all of it is rows.
    """
    # Both on its device: a soak is for more bytes than a host makes in the time.
    want = pattern.block(got.numel(), source, group.rank, number, got.device)
    if not torch.equal(got, want):
        whole = len(got) // row if rows is None else rows
        at = source, group.rank, number, group.size
        raise _Wrong(functools.partial(pattern.difference, got, want, *at, row, whole, _POISON))


def _round_of_merges(
    transport: MergeTransport,
    group: Group,
    shape: MergeShape,
    number: int,
    channel: int,
    tokens: int,
    width: int,
    workspace: Workspace,
    run: _Run,
) -> None:
    """Random partials, which every rank can make, against the oracle. In half of the rows one rank alone has something,
    and its bits must come through.
    """
    device = workspace.device
    n, ulp = group.size, 2.0 ** {torch.float16: -10, torch.bfloat16: -7, torch.float32: -20}[shape.dtype]
    generator = torch.Generator().manual_seed(number)
    outs = torch.randn(n, tokens, shape.num_heads, width, generator=generator).to(shape.dtype)
    lses = torch.randn(n, tokens, shape.num_heads, generator=generator)
    lses[torch.rand(lses.shape, generator=generator) < 0.1] = -torch.inf
    alone = torch.rand(lses.shape[1:], generator=generator) < 0.5
    who = torch.randint(0, n, lses.shape[1:], generator=generator)
    for rank in range(n):
        lses[rank][alone & (who != rank)] = -torch.inf
    outs[lses == -torch.inf] = torch.nan
    mine = outs[group.rank].to(device), lses[group.rank].to(device)
    out, lse = run(functools.partial(_fused, transport, channel), *mine)
    _arrived(transport, channel, device)
    wants = [one[group.rank] for one in merge_partials(outs, lses, lse_base=shape.lse_base, scatter=shape.scatter)]
    exact = by_destination(alone, shape.scatter, n)[group.rank] if transport.capabilities.deterministic else None
    for what, got, want in (("out", out, wants[0]), ("lse", lse, wants[1])):
        got = got.cpu().double().reshape(want.shape)
        close = torch.isclose(got, want, rtol=2 * ulp if what == "out" else 1e-5, atol=ulp)
        if what == "out" and exact is not None:
            close &= (got == want) | ~exact.unsqueeze(-1)
        if not bool(close.all()):
            place = tuple(int(i) for i in (~close).nonzero()[0])
            raise _Wrong(
                f"rank {group.rank}, round {number}: merged {what} at {place} is {float(got[place])}, the oracle "
                f"says {float(want[place])}; {int((~close).sum())} of {close.numel()} are wrong"
            )


def _fused(transport: MergeTransport, channel: int, out: torch.Tensor, lse: torch.Tensor) -> Any:
    if transport.fused is not None:
        return transport.fused.merge_once(out, lse, channel)
    return transport.fused_merge(out, lse, channel)
