"""`gloo_a2a`: rows over TCP by torch.distributed's Gloo. Any CPU, any number of hosts.

Each message is one send and one receive per peer, not a collective: a receive that has room for the largest message
takes a shorter one too, so ranks that disagree about B read each other's header and say so. A Gloo collective of
unequal sizes ends the process instead.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from dcpcomm.errors import TransportTimeout
from dcpcomm.topology import Facts
from dcpcomm.transport import Capabilities, MergeTransport, Verdict
from dcpcomm.workspace import block_capacity

__all__ = ["GlooA2A"]

_NO_DEADLINE_S = 365 * 86400.0
_KNOWN = 1024
#: Bytes from which a group of two ranks, on a host without two cores for each, send one after the other. Both at once
#: fill each other's receive windows before either reads, and then wait for a timer of TCP's, milliseconds long.
_TAKE_TURNS_FROM = 1 << 16


class GlooA2A(MergeTransport):
    """All-to-all by point-to-point messages of a Gloo process group of its own, so that nothing of the caller's can
    get in between.
    """

    name: ClassVar[str] = "gloo_a2a"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cpu",), multi_host=True, ragged=True, proven_on=("cpu",)
    )

    _gloo: Sequence[Any] = ()

    @classmethod
    def check(cls, facts: Facts) -> Verdict:
        if not dist.is_available() or not dist.is_gloo_available():
            return Verdict(False, "this build of torch has no Gloo", "install a torch built with USE_GLOO=1")
        return Verdict(True)

    def prepare(self) -> bytes:
        self._peers = self.group.peers
        self._unread: dict[int, list[tuple[int, Any]]] = {channel: [] for channel in range(self.shape.channels)}
        self._known: dict[Any, tuple[list[_Message], list[_Message]]] = {}
        return b""

    def connect(self, peers: list[bytes]) -> None:
        hosts, rank = self.group.hosts, self.group.rank
        # Of two alone: with a third, a rank that waits for its turn would be late itself for somebody else.
        in_turn = self.group.size == 2 and hosts[0] == hosts[1] and _cores() < 4
        self._answered = [0] if in_turn and rank == 1 else []
        limit = timedelta(seconds=self.group.timeout_s)
        # Gloo closes all connections of a process group when one receive runs into its deadline: one group per channel.
        self._gloo = [
            dist.ProcessGroupGloo(self.group.store(f"gloo/{channel}"), rank, self.group.size, limit)
            for channel in range(self.shape.channels)
        ]

    def exchange(self, send: torch.Tensor, channel: int, recv: torch.Tensor | None = None) -> torch.Tensor:
        assert recv is not None
        gloo, limit = self._gloo[channel], self.group.exchange_timeout_s
        deadline = time.monotonic() + (_NO_DEADLINE_S if limit is None else limit)
        if self._unread[channel]:
            for peer, work in self._unread[channel]:
                self._wait(work, peer, deadline)
            self._unread[channel].clear()
        at_once, in_turn = self._messages(send, channel, recv)
        peer, first = 0, len(at_once)
        try:
            # Receives first: a message that finds its receive posted goes straight to its place.
            incoming = [gloo.recv(message.room, peer := message.peer, 0) for message in (*at_once, *in_turn)]
            outgoing = [gloo.send(message.rows, peer := message.peer, 0) for message in at_once]
            for work, message in zip(incoming[first:], in_turn, strict=True):
                self._wait(work, message.peer, deadline)
                outgoing.append(gloo.send(message.rows, peer := message.peer, 0))
        except RuntimeError as error:
            raise _gone(peer, error) from error
        for work, message in zip(incoming[:first], at_once, strict=True):
            self._wait(work, message.peer, deadline)
        for work, message in zip(outgoing, (*at_once, *in_turn), strict=True):
            self._wait(work, message.peer, deadline)
        return recv

    def cancel(self, send: torch.Tensor, channel: int) -> None:
        gloo, unread = self._gloo[channel], self._unread[channel]
        for peer in self._peers:
            # What the peer sends for this call is dropped; it isn't waited for here, but before this channel's next
            # exchange.
            dropped = torch.empty(block_capacity(self.shape, self.group.size), dtype=torch.uint8)
            try:
                unread.append((peer, gloo.recv([dropped], peer, 0)))
                unread.append((peer, gloo.send([send[peer].clone().view(-1)], peer, 0)))
            except RuntimeError as error:
                raise _gone(peer, error) from error

    def close(self) -> None:
        self._unread, self._known, self._gloo = {}, {}, ()

    def _messages(self, send: torch.Tensor, channel: int, recv: torch.Tensor) -> tuple[list[_Message], list[_Message]]:
        """Those to send at once, and those to send when the peer's has come; known from one exchange to the next."""
        key = channel, send.data_ptr(), send.shape, recv.data_ptr()
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            stride = recv.stride(0)
            with torch.inference_mode(False):
                # All the memory of a block: room for the largest message, not just for the one awaited.
                rooms = recv.as_strided((self.group.size, stride), (stride, 1))
                messages = [_Message(peer, [rooms[peer]], [send[peer].view(-1)]) for peer in self._peers]
            answered = self._answered if send[0].numel() >= _TAKE_TURNS_FROM else ()
            found = self._known[key] = (
                [message for message in messages if message.peer not in answered],
                [message for message in messages if message.peer in answered],
            )
        return found

    def _wait(self, work: Any, peer: int, deadline: float) -> None:
        try:
            work.wait(timedelta(0, max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:
            if "imed out" not in str(error):
                raise _gone(peer, error) from error
            limit = self.group.exchange_timeout_s
            raise TransportTimeout(f"rank {peer} did not arrive within {limit:g} s", (peer,)) from error


def _cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Message(NamedTuple):
    """What a peer sends, and is sent, in the lists of one that Gloo takes."""

    peer: int
    room: list[torch.Tensor]
    rows: list[torch.Tensor]


def _gone(peer: int, error: Exception) -> TransportTimeout:
    said = re.sub(r"^\[.*?\] *", "", str(error).splitlines()[0])  # without the place in Gloo's source
    return TransportTimeout(f"the connection to rank {peer} is gone ({said})", (peer,))
