"""The bare exchange on CPU: one Gloo all-to-all of as many bytes as a packed merge sends. It is the limit there."""

from __future__ import annotations

from typing import ClassVar

import torch

from dcpcomm.bench.ranks import ProcessRanks
from dcpcomm.bench.rivals.nccl_packed import NcclPacked

__all__ = ["GlooPacked"]


class GlooPacked(NcclPacked):
    """As over NCCL, in the default process group, which speaks Gloo."""

    name: ClassVar[str] = "gloo_packed (bare)"

    def prepare(self) -> None:
        assert isinstance(self.ranks, ProcessRanks)
        self._group = None
        self._seed = self.ranks.gather(torch.randint(2**30, ()).item())[0]
