"""A transport that may hang, for the trials in child processes: Gloo, with a fault on one rank."""

from __future__ import annotations

import os
import threading
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel

from dcpcomm.backends.gloo_a2a import GlooA2A
from dcpcomm.transport import Capabilities


class Faults(BaseModel):
    """What goes wrong on `rank`."""

    rank: int = -1
    fault: Literal["hang", "die", "raise", "corrupt"] = "hang"


class Hanging(GlooA2A):
    """As its options say."""

    name: ClassVar[str] = "hanging"
    capabilities: ClassVar[Capabilities] = Capabilities(devices=("cpu",), multi_host=True, ragged=True, may_hang=True)
    Options = Faults

    def connect(self, peers: list[bytes]) -> None:
        if self.group.rank == self.options.rank:
            if self.options.fault == "hang":
                threading.Event().wait()
            if self.options.fault == "die":
                os._exit(7)
            if self.options.fault == "raise":
                raise OSError("no such device")
        super().connect(peers)

    def exchange(self, send: torch.Tensor, channel: int, recv: torch.Tensor | None = None) -> torch.Tensor:
        arrived = super().exchange(send, channel, recv)
        if self.options.fault == "corrupt" and self.group.rank == self.options.rank:
            arrived[0, -1, 4] ^= 1
        return arrived
