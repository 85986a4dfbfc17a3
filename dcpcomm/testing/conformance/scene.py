"""What a case's rank function and its judge both know, so that the data need not travel: both make them from one
seed.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dcpcomm.testing.conformance.partials import Partials
from dcpcomm.transport import Capabilities, MergeShape

__all__ = ["Scene"]

#: Heads per rank, and the row width, of cases that are about something else.
HEADS_PER_RANK = 2
WIDTH = 32


@dataclass(frozen=True)
class Scene:
    """One case on one group size.

    Attributes:
        case: the case's name.
        n: ranks.
        seed: of the whole run.
        transport: registered name.
        capabilities: what the transport declares.
        fused: whether it merges by itself instead of exchanging rows.
        device: "cpu" or "cuda".
        config: what mergers are configured with, the transport named.
        deadline_s: how long a merge waits for a peer, where the case doesn't say otherwise.
    """

    case: str
    n: int
    seed: int
    transport: str
    capabilities: Capabilities
    fused: bool = False
    device: str = "cpu"
    config: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float = 10.0

    def generator(self) -> torch.Generator:
        """At the start of this case's own random numbers, every time."""
        return torch.Generator().manual_seed(self.seed ^ zlib.crc32(f"{self.case}/{self.n}".encode()))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of cases that aren't about dtypes: the widest carried, because it hides the least."""
        carried = self.capabilities.dtypes
        return torch.float32 if torch.float32 in carried else carried[0]

    def shape(self, **changes: Any) -> MergeShape:
        """A small shape, `changes` apart."""
        usual: dict[str, Any] = {
            "max_tokens": 24,
            "num_heads": HEADS_PER_RANK * self.n,
            "head_dim": WIDTH,
            "dtype": self.dtype,
            "lse_base": "e",
        }
        return MergeShape(**{**usual, **changes})

    def partials(
        self, rng: torch.Generator, b: int, shape: MergeShape, lse_dtype: torch.dtype = torch.float32
    ) -> Partials:
        """Fresh partials of `b` rows for `shape`."""
        return Partials.random(rng, self.n, b, shape.num_heads, shape.head_dim, shape.dtype, shape.lse_base, lse_dtype)

    def over(self, transport: str) -> Scene:
        """The same data over another transport, without this one's configuration."""
        config = {"transport": transport, "verify": {"level": "quick"}}
        return dataclasses.replace(self, transport=transport, config=config)
