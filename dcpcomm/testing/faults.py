"""Transports that go wrong on purpose, to prove that whatever uses them notices. Public, for users' own tests.

Three properties shape this file:

* A faulty transport *is* the one it wraps, by inheritance: same options, same capabilities, same bytes, until a fault
  strikes. So what a test finds is about the fault, not about the wrapper.
* What was done is on record: `injected` says which word of which source in which call was made wrong, so that a test
  can hold a report against it instead of against a guess.
* A hang can always be ended, by an event or by its time: a test that leaks a thread spoils the next one.

Faults of a message strike after it has arrived, on the receiving rank, and on the host: in a captured CUDA graph they
are part of the capture or they are not there.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from dcpcomm.topology import Facts
from dcpcomm.transport import Capabilities, MergeTransport, Verdict

__all__ = ["Fault", "FaultyTransport", "InjectedFault", "Injection", "RankDied", "faulty"]

Kind = Literal[
    "raise", "hang", "die", "delay", "refuse", "drop", "corrupt", "reorder", "swap", "stale", "shift", "zero"
]
Stage = Literal["check", "prepare", "connect", "exchange"]

OF_RANKS = ("raise", "hang", "die", "delay")
OF_MESSAGES = ("drop", "corrupt", "reorder", "swap", "stale", "shift", "zero")
STAGES = ("check", "prepare", "connect", "exchange")
_SHIFT = 16  # bytes: one vector of a copy kernel, the usual unit of an address computed wrongly
_WORD = 4


class InjectedFault(RuntimeError):
    """What a fault of kind "raise" raises."""


class RankDied(BaseException):
    """The end of a rank that is a thread.

    No `Exception`, so that nothing that reports a rank's errors to its peers reports this one: the dead don't.
    """


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, where and when.

    Args:
        kind: what happens. To the rank, in any stage:
            "raise" raises `InjectedFault(reason)`;
            "hang" stands still until `until` is set or `seconds` have passed, then goes on as if nothing had happened;
            "die" ends the rank, by `RankDied` where it is a thread, by `os._exit(1)` where it is a process;
            "delay" stands still for `seconds`.
            In stage "check" only: "refuse" says no, with `reason`.
            To a message that has arrived, in stage "exchange" only:
            "drop" leaves the source's block as it was before the call;
            "corrupt" flips bits of one 32-bit word;
            "reorder" is payload that comes after its flag: the first row is this call's, and so are some others, but
            at least one row is the previous call's;
            "swap" exchanges the blocks of two sources;
            "stale" gives the source's whole block of `age` calls before;
            "shift" moves the rows after the first by 16 bytes;
            "zero" fills the block with zeros.
            "reorder" and "stale" take the block as it was before the call where there is no such call yet.
        rank: on which rank; None: on all.
        stage: "check", "prepare", "connect" or "exchange".
        call: in which exchange of a channel, counted from 0 since the transport was connected, the framework's
            verification included; None: in every one.
        channel: on which channel; None: on all.
        source: whose message; None: a peer drawn by `seed`.
        other: the second source of "swap"; None: another one, drawn by `seed`.
        row, word: which 32-bit word "corrupt" hits: row of the block (packed: 0 is the header) and word of the row;
            None: drawn by `seed`.
        age: see "stale".
        probability: of striking in an exchange that it is meant for.
        seed: of everything drawn; the same seed draws the same in every run.
        seconds: of "delay" and "hang".
        until: ends a "hang".
        reason: the words of "raise" and "refuse".

    Raises:
        ValueError: a combination that can't be.
    """

    kind: Kind
    _: KW_ONLY
    rank: int | None = None
    stage: Stage = "exchange"
    call: int | None = None
    channel: int | None = None
    source: int | None = None
    other: int | None = None
    row: int | None = None
    word: int | None = None
    age: int = 1
    probability: float = 1.0
    seed: int = 0
    seconds: float | None = None
    until: threading.Event | None = None
    reason: str = "injected"

    def __post_init__(self) -> None:
        if self.kind not in (*OF_RANKS, *OF_MESSAGES, "refuse"):
            raise ValueError(f"Fault.kind is {self.kind!r}; expected one of {(*OF_RANKS, 'refuse', *OF_MESSAGES)}")
        if self.stage not in STAGES:
            raise ValueError(f"Fault.stage is {self.stage!r}; expected one of {STAGES}")
        if self.kind in OF_MESSAGES and self.stage != "exchange":
            raise ValueError(f"a fault of kind {self.kind!r} is of stage 'exchange'; stage is {self.stage!r}")
        if self.kind == "refuse" and self.stage != "check":
            raise ValueError(f"a fault of kind 'refuse' is of stage 'check'; stage is {self.stage!r}")
        if self.kind == "delay" and self.seconds is None:
            raise ValueError("a fault of kind 'delay' needs seconds")
        if self.kind == "hang" and self.seconds is None and self.until is None:
            raise ValueError("a fault of kind 'hang' needs until, seconds or both, so that it can be ended")
        if self.age < 1:
            raise ValueError(f"Fault.age is {self.age}; expected 1 or more calls")
        if not 0 <= self.probability <= 1:
            raise ValueError(f"Fault.probability is {self.probability}; expected 0 to 1")


@dataclass(frozen=True)
class Injection:
    """One strike of a fault.

    Attributes:
        fault: which.
        rank, stage: where.
        call, channel: of the exchange; None in other stages.
        source: whose message was made wrong; None where the fault was of the rank. A swap is two injections.
        row, offset: the first 32-bit word that is wrong for it, by row of the block and byte of the row; None where
            nothing is (old content may equal the new).
        wanted, got: that word, before and after.
        at: when, by `time.monotonic()`: what a deadline is to be measured from.
    """

    fault: Fault
    rank: int
    stage: str
    call: int | None = None
    channel: int | None = None
    source: int | None = None
    row: int | None = None
    offset: int | None = None
    wanted: int | None = None
    got: int | None = None
    at: float = field(default_factory=time.monotonic)


class FaultyTransport(MergeTransport):
    """Goes before the wrapped class in the order of inheritance; made by `faulty`.

    Attributes:
        faults: what may strike.
        injected: what has struck, on all ranks of this process, in order. Emptied by its owner.
    """

    # Private names begin with `_fault`: they share an object with those of whatever transport is wrapped.
    faults: ClassVar[tuple[Fault, ...]] = ()
    injected: ClassVar[list[Injection]] = []

    @classmethod
    def check(cls, facts: Facts) -> Verdict:
        for fault in cls._fault_meant("check", facts.rank):
            cls._fault_strike(fault, facts.rank, threads=facts.place == "loopback")
            if fault.kind == "refuse":
                return Verdict(False, fault.reason)
        return super().check(facts)

    def prepare(self) -> bytes:
        self._fault_calls: dict[int, int] = {}
        self._fault_arrived: dict[int, deque[list[torch.Tensor]]] = {}
        self._fault_befall("prepare")
        return super().prepare()  # type: ignore[safe-super]

    def connect(self, peers: list[bytes]) -> None:
        self._fault_befall("connect")
        super().connect(peers)  # type: ignore[safe-super]

    def exchange(self, send: Any, channel: int, recv: torch.Tensor | None = None) -> Any:
        call, active = self._fault_begin(channel)
        given = {} if recv is None else {"recv": recv}
        if not any(f.kind in OF_MESSAGES for f in self._fault_meant("exchange", self.group.rank)):
            return super().exchange(send, channel, **given)
        earlier = self._fault_arrived.setdefault(channel, deque(maxlen=max(f.age for f in self.faults)))
        before = None if recv is None else _blocks(recv)
        arrived = super().exchange(send, channel, **given)
        true = _blocks(arrived)
        if arrived is not recv or before is None:
            before = [torch.zeros_like(block) for block in true]
            if earlier:
                before = [_laid_over(old, empty) for old, empty in zip(earlier[-1], before, strict=True)]
        blocks = list(true)
        for fault, rng in active:
            if fault.kind in OF_MESSAGES:
                change = _damage(fault, rng, self.group.rank, blocks, before, list(earlier))
                for source, block in change.items():
                    where = _first_difference(blocks[source], block)
                    self.injected.append(Injection(fault, self.group.rank, "exchange", call, channel, source, *where))
                blocks = [change.get(source, block) for source, block in enumerate(blocks)]
        earlier.append(true)
        return _rewritten(arrived, blocks, in_place=arrived is recv)

    @classmethod
    def _fault_meant(cls, stage: str, rank: int) -> list[Fault]:
        return [fault for fault in cls.faults if fault.stage == stage and fault.rank in (None, rank)]

    @classmethod
    def _fault_strike(
        cls, fault: Fault, rank: int, threads: bool, call: int | None = None, channel: int | None = None
    ) -> None:
        """What a fault does to its rank. On record before it happens: afterwards there may be nobody to write."""
        cls.injected.append(Injection(fault, rank, fault.stage, call, channel))
        if fault.kind == "raise":
            raise InjectedFault(fault.reason)
        if fault.kind == "die":
            if threads:
                raise RankDied(f"rank {rank} died in {fault.stage}")
            os._exit(1)
        if fault.kind in ("hang", "delay"):
            (fault.until or threading.Event()).wait(None if fault.seconds == float("inf") else fault.seconds)

    def _fault_befall(self, stage: str) -> None:
        for fault in self._fault_meant(stage, self.group.rank):
            self._fault_strike(fault, self.group.rank, threads=self.group.loopback is not None)

    def _fault_begin(self, channel: int) -> tuple[int, list[tuple[Fault, random.Random]]]:
        """Number this exchange, let strike what is the rank's, and return what strikes in it."""
        call = self._fault_calls.get(channel, 0)
        self._fault_calls[channel] = call + 1
        active: list[tuple[Fault, random.Random]] = []
        for index, fault in enumerate(self._fault_meant("exchange", self.group.rank)):
            if fault.call not in (None, call) or fault.channel not in (None, channel):
                continue
            rng = random.Random(f"{fault.seed}/{index}/{self.group.rank}/{channel}/{call}")
            if rng.random() < fault.probability:
                active.append((fault, rng))
        for fault, _ in active:
            if fault.kind in OF_RANKS:
                self._fault_strike(fault, self.group.rank, self.group.loopback is not None, call, channel)
        return call, active


def faulty(
    inner: type[MergeTransport],
    *faults: Fault,
    name: str | None = None,
    capabilities: Capabilities | None = None,
) -> type[FaultyTransport]:
    """A transport that is `inner`, except for `faults`.

    Args:
        name: to register it by; default `faulty_` and the name of `inner`.
        capabilities: to declare instead of those of `inner`.

    Raises:
        ValueError: faults of messages, for a transport that hands no messages over (its own merge, or peer memory).

    Example:
        broken = faulty(Loopback, Fault("reorder", rank=1, call=2))
        dcpcomm.register_transport(broken.name, broken)
    """
    name = name or f"faulty_{inner.name}"
    hands_over = inner.fused_merge is None and inner.exchange is not MergeTransport.exchange
    for fault in faults:
        if fault.kind in OF_MESSAGES and not hands_over:
            raise ValueError(f"{inner.name!r} hands no messages over: a fault of kind {fault.kind!r} can't strike it")
    body: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": f"{inner.name}, with {len(faults)} fault(s).",
        "name": name,
        "capabilities": capabilities or replace(inner.capabilities),
        "faults": faults,
        "injected": [],
    }
    if inner.fused_merge is not None:
        body["fused_merge"] = _fused_merge(inner)
    elif not hands_over:
        body["exchange"] = inner.exchange
    return type(f"Faulty{inner.__name__}", (FaultyTransport, inner), body)


def _fused_merge(inner: type[MergeTransport]) -> Any:
    def fused_merge(self: FaultyTransport, partial_out: torch.Tensor, partial_lse: torch.Tensor, channel: int) -> Any:
        self._fault_begin(channel)
        return inner.fused_merge(self, partial_out, partial_lse, channel)

    return fused_merge


def _damage(
    fault: Fault,
    rng: random.Random,
    rank: int,
    blocks: list[torch.Tensor],
    before: list[torch.Tensor],
    earlier: list[list[torch.Tensor]],
) -> dict[int, torch.Tensor]:
    """Source -> its block as the fault makes it.

    Args:
        blocks: by source, uint8 `[rows, W]`.
        before: what lay in their place before the call.
        earlier: blocks of calls before, the latest last.
    """
    peers = [peer for peer in range(len(blocks)) if peer != rank]
    source = rng.choice(peers) if fault.source is None else fault.source
    block = blocks[source].clone()
    rows, width = block.shape
    if fault.kind == "drop":
        return {source: before[source]}
    if fault.kind == "zero":
        return {source: torch.zeros_like(block)}
    if fault.kind == "stale":
        stale = earlier[-fault.age] if len(earlier) >= fault.age else before
        return {source: _laid_over(stale[source], before[source])}
    if fault.kind == "swap":
        rest = [other for other in range(len(blocks)) if other != source]
        other = rng.choice(rest) if fault.other is None else fault.other
        return {source: blocks[other].clone(), other: block}
    if fault.kind == "shift":
        flat, first = block.view(-1), width if rows > 1 else 0
        flat[first + _SHIFT :] = flat[first:-_SHIFT].clone()
        return {source: block}
    if fault.kind == "reorder":
        old = _laid_over((earlier[-1] if earlier else before)[source], before[source])
        late = rng.sample(range(1, rows), rng.randint(1, max(1, rows // 2))) if rows > 1 else [0]
        block[late] = old[late]
        return {source: block}
    row = rng.randrange(rows) if fault.row is None else fault.row
    at = (rng.randrange(width // _WORD) if fault.word is None else fault.word) * _WORD
    flip = rng.randint(1, 2**32 - 1).to_bytes(_WORD, "little")
    block[row, at : at + _WORD] ^= torch.tensor(list(flip), dtype=torch.uint8, device=block.device)
    return {source: block}


def _blocks(arrived: Any) -> list[torch.Tensor]:
    """By source, a copy of what came from it, uint8 `[rows, W]`; of the view layout a row is a token, its LSEs last."""
    if isinstance(arrived, torch.Tensor):
        return [block.clone() for block in arrived]
    return [torch.cat([_bytes(part[:, i]) for part in arrived], dim=1) for i in range(arrived[0].shape[1])]


def _bytes(part: torch.Tensor) -> torch.Tensor:
    return part.contiguous().view(torch.uint8).flatten(1)


def _rewritten(arrived: Any, blocks: list[torch.Tensor], in_place: bool) -> Any:
    """`arrived` with the bytes of `blocks`. What isn't the framework's own `recv` is copied: it may be the caller's
    input.
    """
    if isinstance(arrived, torch.Tensor):
        target = arrived if in_place else arrived.clone()
        for place, block in zip(target, blocks, strict=True):
            place.copy_(block)
        return target
    parts = [part.clone(memory_format=torch.contiguous_format) for part in arrived]
    for source, block in enumerate(blocks):
        at = 0
        for part in parts:
            size = part[:, source].numel() // part.shape[0] * part.dtype.itemsize
            raw = block[:, at : at + size].contiguous().view(part.dtype)
            part[:, source] = raw.view_as(part[:, source])
            at += size
    return tuple(parts)


def _laid_over(old: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The bytes of `old`, of a call of perhaps another size, in the memory that held `before`."""
    laid = before.clone()
    size = min(old.numel(), laid.numel())
    laid.view(-1)[:size] = old.reshape(-1)[:size]
    return laid


def _first_difference(true: torch.Tensor, got: torch.Tensor) -> tuple[int, int, int, int] | tuple[()]:
    """Row, byte offset, and the words of the first 32-bit word that differs; nothing where none does."""
    differ = (true != got).nonzero()
    if not len(differ):
        return ()
    row, byte = differ[0].tolist()
    at = byte // _WORD * _WORD
    wanted, was = (int.from_bytes(bytes(b[row, at : at + _WORD].tolist()), "little") for b in (true, got))
    return row, at, wanted, was
