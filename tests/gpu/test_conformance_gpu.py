"""The conformance suite over one GPU: every rank a stream."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from dcpcomm.testing import TransportConformance

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
    pytest.mark.timeout(120),
]


class TestLoopbackPeer(TransportConformance):
    transport = "loopback_peer"
    ranks = (2, 3, 8)
    device: ClassVar[str | None] = "cuda"
