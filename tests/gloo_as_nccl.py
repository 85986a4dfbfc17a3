"""The NCCL transports with Gloo in the place of NCCL: everything but NCCL itself, on CPU."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from dcpcomm.backends.nccl_a2a import NcclA2A
from dcpcomm.backends.nccl_ag_rs import NcclAgRs
from dcpcomm.topology import Facts
from dcpcomm.transport import Capabilities, Verdict


class _OverGloo:
    group: Any
    shape: Any

    @classmethod
    def check(cls, facts: Facts) -> Verdict:
        return Verdict(facts.place != "loopback")

    def close(self) -> None:
        self._groups = ()

    def connect(self, peers: list[bytes]) -> None:
        limit = timedelta(seconds=self.group.exchange_timeout_s or 100)
        self._comms = (None,) * self.shape.channels
        self._groups = tuple(
            dist.ProcessGroupGloo(self.group.store(f"over/{channel}"), self.group.rank, self.group.size, limit)
            for channel in range(self.shape.channels)
        )


class A2AOverGloo(_OverGloo, NcclA2A):
    name: ClassVar[str] = "a2a_over_gloo"
    capabilities: ClassVar[Capabilities] = Capabilities(devices=("cpu",), interruptible=False)

    def prepare(self) -> bytes:
        return b""


class AgRsOverGloo(_OverGloo, NcclAgRs):
    name: ClassVar[str] = "ag_rs_over_gloo"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cpu",), dtypes=(torch.float32,), deterministic=False, interruptible=False
    )

    def prepare(self) -> bytes:
        return b""
