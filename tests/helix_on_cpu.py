"""`flashinfer_helix` on a CPU, over a FlashInfer that only stands in for it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from dcpcomm.backends.flashinfer_helix import FlashInferHelix
from dcpcomm.transport import Capabilities

SOAK = 1 << 20


class HelixOnCpu(FlashInferHelix):
    """Everything but the GPU and the library."""

    name: ClassVar[str] = "helix_on_cpu"
    capabilities: ClassVar[Capabilities] = dataclasses.replace(
        FlashInferHelix.capabilities, devices=("cpu",), graph_capturable=False, soak_bytes=SOAK
    )
    package: ClassVar[str] = "tests.helix_stand_in"
