"""For tests of dcpcomm, of transports, and of what is built on them. Public API."""

from __future__ import annotations

from dcpcomm.testing.faults import Fault, FaultyTransport, InjectedFault, Injection, RankDied, faulty
from dcpcomm.testing.loopback import LoopbackRank, LoopbackWorld

__all__ = [
    "Fault",
    "FaultyTransport",
    "InjectedFault",
    "Injection",
    "LoopbackRank",
    "LoopbackWorld",
    "RankDied",
    "faulty",
]
