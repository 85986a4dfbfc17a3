"""`gloo_a2a`: rows over TCP by torch.distributed's Gloo. Any CPU, any number of hosts.

Each message is one send and one receive per peer, not a collective: a receive that has room for the largest message
takes a shorter one too, so ranks that disagree about B read each other's header and say so. A Gloo collective of
unequal sizes ends the process instead. Channels are told apart by tag, so two of them may be entered in opposite order
on two ranks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from dcpcomm.errors import TransportTimeout
from dcpcomm.topology import Facts
from dcpcomm.transport import Capabilities, MergeTransport, Verdict
from dcpcomm.workspace import block_capacity

__all__ = ["GlooA2A"]

_NO_DEADLINE = timedelta(days=365)


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
        self._blocks: dict[int, list[torch.Tensor]] = {}
        return b""

    def connect(self, peers: list[bytes]) -> None:
        limit = timedelta(seconds=self.group.timeout_s)
        # Gloo closes all connections of a process group when one receive runs into its deadline: one group per channel.
        self._gloo = [
            dist.ProcessGroupGloo(self.group.store(f"gloo/{channel}"), self.group.rank, self.group.size, limit)
            for channel in range(self.shape.channels)
        ]

    def exchange(self, send: torch.Tensor, channel: int, recv: torch.Tensor | None = None) -> torch.Tensor:
        assert recv is not None
        started = time.monotonic()
        if self._unread[channel]:
            for peer, work in self._unread[channel]:
                self._wait(work, peer, started)
            self._unread[channel].clear()
        room = self._room(recv, channel)
        # Receives first: a message that finds its receive posted goes straight to its place.
        works = [(peer, self._begin("recv", room[peer], peer, channel)) for peer in self._peers]
        works += [(peer, self._begin("send", send[peer].view(-1), peer, channel)) for peer in self._peers]
        recv[self.group.rank].copy_(send[self.group.rank])
        for peer, work in works:
            self._wait(work, peer, started)
        return recv

    def cancel(self, send: torch.Tensor, channel: int) -> None:
        for peer in self._peers:
            # What the peer sends for this call is dropped; it isn't waited for here, but before this channel's next
            # exchange.
            dropped = torch.empty(block_capacity(self.shape, self.group.size), dtype=torch.uint8)
            self._unread[channel].append((peer, self._begin("recv", dropped, peer, channel)))
            header = send[peer].clone().view(-1)
            self._unread[channel].append((peer, self._begin("send", header, peer, channel)))

    def close(self) -> None:
        self._unread, self._blocks, self._gloo = {}, {}, ()

    def _room(self, recv: torch.Tensor, channel: int) -> list[torch.Tensor]:
        """By source, all the memory of its block in `recv`: room for the largest message, not just for the one
        awaited.
        """
        found = self._blocks.get(channel)
        if found is None:
            stride = recv.stride(0)
            with torch.inference_mode(False):
                found = self._blocks[channel] = list(recv.as_strided((self.group.size, stride), (stride, 1)))
        return found

    def _begin(self, what: str, tensor: torch.Tensor, peer: int, channel: int) -> Any:
        try:
            return getattr(self._gloo[channel], what)([tensor], peer, 0)
        except RuntimeError as error:
            raise TransportTimeout(f"the connection to rank {peer} is gone ({_first_line(error)})", (peer,)) from error

    def _wait(self, work: Any, peer: int, started: float) -> None:
        limit = self.group.exchange_timeout_s
        left = _NO_DEADLINE if limit is None else timedelta(seconds=max(0.001, limit - (time.monotonic() - started)))
        try:
            work.wait(left)
        except RuntimeError as error:
            if "imed out" in str(error):
                raise TransportTimeout(f"rank {peer} did not arrive within {limit:g} s", (peer,)) from error
            raise TransportTimeout(f"the connection to rank {peer} is gone ({_first_line(error)})", (peer,)) from error


def _first_line(error: Exception) -> str:
    """Gloo's words without the place in its source that they begin with."""
    return re.sub(r"^\[.*?\] *", "", str(error).splitlines()[0])
