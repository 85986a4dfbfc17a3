"""`loopback`: the ranks are threads of one process, and a message is a copy handed over through a queue.

For tests, and for the CI of people who use dcpcomm: every promise of a merge can be tried without a second process.
"""

from __future__ import annotations

import queue
import time
from typing import ClassVar

import torch

from dcpcomm.combine.peer_options import PeerOptions
from dcpcomm.errors import TransportTimeout
from dcpcomm.testing.loopback import Office
from dcpcomm.topology import Facts, hardware_queues
from dcpcomm.transport import Capabilities, MergeTransport, PeerBuffers, PeerMemoryTransport, Verdict

__all__ = ["Loopback", "LoopbackPeer"]


class Loopback(MergeTransport):
    """All-to-all between threads. The group must come from `dcpcomm.testing.LoopbackWorld`."""

    name: ClassVar[str] = "loopback"
    capabilities: ClassVar[Capabilities] = Capabilities(devices=("cpu",), ragged=True)

    _key = ""

    @classmethod
    def check(cls, facts: Facts) -> Verdict:
        if facts.place != "loopback":
            return Verdict(
                False,
                "the ranks are processes, not threads of one process",
                "build the group with dcpcomm.testing.LoopbackWorld",
            )
        return Verdict(True)

    def prepare(self) -> bytes:
        self._peers = self.group.peers
        self._unread = dict.fromkeys(range(self.shape.channels), 0)
        return b""

    def connect(self, peers: list[bytes]) -> None:
        self._key = f"{self.group.prefix}/{self.group.generation}"
        self._mail = self.group.loopback.world.mail(self._key)

    def exchange(self, send: torch.Tensor, channel: int, recv: torch.Tensor | None = None) -> torch.Tensor:
        assert recv is not None
        started = time.monotonic()
        self._check_poison(channel)
        self._post(send, channel)
        recv[self.group.rank].copy_(send[self.group.rank])
        for source in self._peers:
            for _ in range(self._unread[channel]):
                self._take(source, channel, started)
            message = self._take(source, channel, started)
            room = recv.as_strided((recv.stride(0),), (1,), recv.storage_offset() + source * recv.stride(0))
            room[: message.numel()].copy_(message)
        self._unread[channel] = 0
        return recv

    def cancel(self, send: torch.Tensor, channel: int) -> None:
        self._post(send, channel)
        self._unread[channel] += 1

    def close(self) -> None:
        if self._key:
            self.group.loopback.world.leave(self._key, self.group.rank)
        self._mail, self._key = Office(), ""

    def _post(self, send: torch.Tensor, channel: int) -> None:
        for peer in self._peers:
            self._mail[channel, self.group.rank, peer].put(send[peer].flatten().clone())

    def _take(self, source: int, channel: int, started: float) -> torch.Tensor:
        limit = self.group.exchange_timeout_s
        try:
            return self._mail[channel, source, self.group.rank].get(  # type: ignore[no-any-return]
                timeout=None if limit is None else max(0.001, limit - (time.monotonic() - started))
            )
        except queue.Empty:
            text = f"rank {source} did not arrive within {limit:g} s"
            self._mail.poison[channel] = (self.group.rank, text)
            raise TransportTimeout(text, (source,)) from None

    def _check_poison(self, channel: int) -> None:
        """Keep a rank that comes too late from merging what the others sent before they gave up."""
        if channel in self._mail.poison:
            rank, text = self._mail.poison[channel]
            raise TransportTimeout(f"rank {rank} has given this channel up: {text}", (rank,))


class LoopbackPeer(PeerMemoryTransport):
    """The peer family between threads: every rank's memory is every other's, as CUDA IPC makes it between processes. On
    a GPU every rank has a stream, and their kernels wait for each other on one device.
    """

    name: ClassVar[str] = "loopback_peer"
    capabilities: ClassVar[Capabilities] = Capabilities(devices=("cpu", "cuda"), graph_capturable=True, ragged=True)
    Options = PeerOptions

    _memory: torch.Tensor | None = None
    _leaked: ClassVar[list[torch.Tensor]] = []

    @classmethod
    def check(cls, facts: Facts) -> Verdict:
        verdict = Loopback.check(facts)
        connections = hardware_queues()
        if verdict.ok and facts.device == "cuda" and connections < 2 * facts.world_size:
            return Verdict(
                False,
                f"streams share {connections} queues of the GPU, so kernels of {facts.world_size} ranks that wait for "
                "each other may stand in one queue",
                "set CUDA_DEVICE_MAX_CONNECTIONS=32, or make the LoopbackWorld, before this process uses CUDA",
            )
        return verdict

    def prepare(self) -> bytes:
        with torch.inference_mode(False):
            self._memory = torch.zeros(self.peer_bytes, dtype=torch.uint8, device=self.group.device)
        self._key = f"{self.group.prefix}/{self.group.generation}/peer"
        self._office = self.group.loopback.world.mail(self._key)
        self._office.memory[self.group.rank] = self._memory
        return b""

    def connect(self, peers: list[bytes]) -> None:
        self._opened = [self._office.memory[rank] for rank in range(self.group.size)]

    def map_symmetric(self, nbytes: int) -> PeerBuffers:
        assert self._memory is not None
        return PeerBuffers(
            self._memory, [one.data_ptr() for one in self._opened], sharing=self.group.size, kept=list(self._opened)
        )

    def close(self) -> None:
        if self._memory is not None:
            if self._engine is not None and self._engine.given_up:
                self._leaked.append(self._memory)  # a peer that was late may still store there when it comes
            self.group.loopback.world.leave(self._key, self.group.rank)
            self._office.memory.pop(self.group.rank, None)
        self._memory, self._engine, self._opened = None, None, []
