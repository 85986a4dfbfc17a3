"""For tests of dcpcomm, of transports, and of what is built on them. Public API."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dcpcomm.testing.faults import Fault, FaultyTransport, InjectedFault, Injection, RankDied, faulty
from dcpcomm.testing.loopback import LoopbackRank, LoopbackWorld

if TYPE_CHECKING:
    from dcpcomm.testing.conformance import Case, TransportConformance, run_conformance

__all__ = [
    "Case",
    "Fault",
    "FaultyTransport",
    "InjectedFault",
    "Injection",
    "LoopbackRank",
    "LoopbackWorld",
    "RankDied",
    "TransportConformance",
    "faulty",
    "run_conformance",
]

#: Loaded when first asked for: the loopback transport lives on this package, and must not bring the whole suite along.
_OF_CONFORMANCE = ("Case", "TransportConformance", "run_conformance")


def __getattr__(name: str) -> Any:
    if name not in _OF_CONFORMANCE:
        raise AttributeError(f"module 'dcpcomm.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module("dcpcomm.testing.conformance"), name)
    globals()[name] = value
    return value
