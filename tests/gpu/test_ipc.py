"""`cupy_ipc` between processes: the conformance suite, on as many GPUs as there are, or on one for all."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from dcpcomm.testing import TransportConformance

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
    pytest.mark.timeout(120),
]


class TestIpc(TransportConformance):
    transport = "cupy_ipc"
    ranks = (2,)
    device: ClassVar[str | None] = "cuda"
