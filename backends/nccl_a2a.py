"""`nccl_a2a`: rows and LSE in one message per peer, by one NCCL group call on the current stream. Any GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from dcpcomm.backends.nccl_groups import NcclTransport, done, on_this_stream
from dcpcomm.backends.nccl_library import PeerExchange
from dcpcomm.group import Group
from dcpcomm.transport import Capabilities, MergeShape

__all__ = ["NcclA2A"]

_KNOWN = 1024


class NcclA2A(NcclTransport):
    """Every packed block to its rank, over communicators of its own."""

    name: ClassVar[str] = "nccl_a2a"
    capabilities: ClassVar[Capabilities] = Capabilities(devices=("cuda",), multi_host=True, graph_capturable=True)

    def __init__(self, group: Group, shape: MergeShape, options: Any) -> None:
        super().__init__(group, shape, options)
        self._bound: dict[int, tuple[torch.Tensor, torch.Tensor, int, Callable[[], object]]] = {}

    def exchange(self, send: torch.Tensor, channel: int, recv: torch.Tensor | None = None) -> torch.Tensor:
        assert recv is not None
        found = self._bound.get(id(send))  # kept alive below, so that no other tensor gets its id
        if found is None or found[0] is not send or found[1] is not recv or found[2] != channel:
            if len(self._bound) >= _KNOWN:
                self._bound.clear()
            bound = self._bind(self._comms[channel], channel, send, recv)
            found = self._bound[id(send)] = send, recv, channel, bound
        self.notice_capture()
        found[3]()
        return recv

    def _bind(self, comm: int | None, channel: int, send: torch.Tensor, recv: torch.Tensor) -> Callable[[], object]:
        if comm is not None:
            return PeerExchange(comm, self.group.rank, self.group.device, send, recv)
        return functools.partial(_all_to_all, self._groups[channel], recv.view(-1), send.view(-1))

    def close(self) -> None:
        super().close()
        self._bound = {}


def _all_to_all(group: Any, recv: torch.Tensor, send: torch.Tensor) -> None:
    """By torch, where its NCCL can't be called."""
    done(group.alltoall_base(recv, send, [], [], on_this_stream(dist.AllToAllOptions())))
