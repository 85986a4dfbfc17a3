"""What both NCCL transports stand on: process groups of their own, one per channel."""

from __future__ import annotations

import ctypes
import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dcpcomm import topology
from dcpcomm.backends import nccl_library
from dcpcomm.errors import TransportUnavailable
from dcpcomm.group import Group
from dcpcomm.log import log
from dcpcomm.topology import Facts
from dcpcomm.transport import MergeShape, MergeTransport, Verdict

__all__ = ["NcclTransport", "done", "nccl_groups", "on_this_stream"]

_NO_DEADLINE_S = 365 * 86400.0


class NcclTransport(MergeTransport):
    """Moves rows over connected NCCL groups, one for each channel."""

    def __init__(self, group: Group, shape: MergeShape, options: Any) -> None:
        super().__init__(group, shape, options)
        self._groups: tuple[Any, ...] = ()
        self._comms: tuple[int | None, ...] = ()
        self._captured = False
        self._interrupted: dict[int, Exception] = {}

    @classmethod
    def check(cls, facts: Facts) -> Verdict:
        if not dist.is_available() or not dist.is_nccl_available():
            return Verdict(False, "this build of torch has no NCCL", "install a CUDA build of torch")
        if facts.place == "loopback":
            return Verdict(
                False, "the ranks are threads of one process; NCCL wants a process for each", "use loopback_peer"
            )
        return Verdict(True)

    def prepare(self) -> bytes:
        uuid = str(torch.cuda.get_device_properties(self.group.device).uuid)
        return json.dumps({"gpu": uuid, "nccl": list(torch.cuda.nccl.version())}).encode()

    def connect(self, peers: list[bytes]) -> None:
        self._groups = tuple(nccl_groups(self.group, self.shape.channels, peers))
        self._comms = tuple(nccl_library.communicator(one) for one in self._groups)
        for nccl in self._groups:
            # Never to be collected: torch would end it wherever that happens to be, and wait for a graph that uses it.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(nccl))

    def notice_capture(self) -> None:
        """Before each call."""
        if not self._captured and topology.on_gpu(self.group.device) and torch.cuda.is_current_stream_capturing():
            self._captured = True

    def poll(self, channel: int) -> None:
        if self._interrupted and channel in self._interrupted:
            raise self._interrupted[channel]

    def interrupt(self, channel: int, error: Exception) -> None:
        if channel >= len(self._comms) or channel in self._interrupted:
            return
        comm = self._comms[channel]
        if comm is None:
            log.error("rank %d: %s; nothing but the end of this process ends the wait here", self.group.rank, error)
            return
        self._interrupted[channel] = error
        nccl_library.abort(comm)  # its kernels end at once, captured ones too

    def close(self) -> None:
        groups, self._groups, self._comms = self._groups, (), ()
        if self._captured:
            # Ending one waits for the graphs that its calls were captured in, and nobody knows whether they still live.
            log.info(
                "rank %d: %d NCCL groups stay until the process ends: graphs use them", self.group.rank, len(groups)
            )
            return
        for channel, nccl in enumerate(groups):
            if channel in self._interrupted:
                continue  # it is being ended
            nccl.abort()  # not a shutdown, which would wait for peers: one of them may be gone
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(nccl))


def nccl_groups(group: Group, channels: int, cards: list[bytes]) -> list[Any]:
    """Connected NCCL groups, by channel. Collective over `group`.

    Channels don't share one: two of them may be entered in opposite order on two ranks.

    Args:
        cards: by rank, what `NcclTransport.prepare` returned.

    Raises:
        TransportUnavailable: two ranks sit on one GPU, or their NCCL differs.
    """
    told = [json.loads(card) for card in cards]
    for rank, card in enumerate(told):
        first = next(other for other, one in enumerate(told) if one["gpu"] == card["gpu"])
        if first != rank:
            raise TransportUnavailable(
                f"ranks {first} and {rank} are both on GPU {card['gpu']}; NCCL wants a GPU for each rank: give every "
                "process its own (CUDA_VISIBLE_DEVICES, or device=)"
            )
        if card["nccl"] != told[0]["nccl"]:
            raise TransportUnavailable(
                f"rank 0 has NCCL {told[0]['nccl']} and rank {rank} has {card['nccl']}; install the same on both"
            )
    limit = group.exchange_timeout_s
    made = []
    with torch.cuda.device(group.device):
        for channel in range(channels):
            options = dist.ProcessGroupNCCL.Options()
            # Past it torch's watchdog ends this process, where dcpcomm's has not ended the call.
            options._timeout = timedelta(seconds=_NO_DEADLINE_S if limit is None else 3 * max(limit, group.timeout_s))
            nccl: Any = dist.ProcessGroupNCCL(group.store(f"nccl/{channel}"), group.rank, group.size, options)
            made.append(nccl)
        for nccl in made:
            # NCCL connects at the first call, which must not be one in a capture.
            one = torch.ones(group.size, dtype=torch.uint8, device=group.device)
            nccl.alltoall_base(torch.empty_like(one), one, [], []).wait()
        torch.cuda.current_stream(group.device).synchronize()
    return made


def on_this_stream(options: Any) -> Any:
    """`options` of a collective that is to run on the current stream, and not on one of torch's that waits for it."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def done(work: Any) -> None:
    """What follows on the current stream comes after `work`, None where that is so already."""
    if work is not None:
        work.wait()
