"""What memory is allocated with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class MnnvlConfig:
    """How ranks meet."""

    comm_backend: Any = None
