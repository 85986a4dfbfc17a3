"""For tests of dcpcomm, of transports, and of what is built on them. Public API."""

from __future__ import annotations

from dcpcomm.testing.loopback import LoopbackRank, LoopbackWorld

__all__ = ["LoopbackRank", "LoopbackWorld"]
