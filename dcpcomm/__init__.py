"""dcpcomm: merge decode-context-parallel attention partials across GPUs, over any transport.

Importing this package imports torch and nothing else: each public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if importlib.util.find_spec("dcpcomm.backends") is None:
    raise ImportError(
        "dcpcomm was imported from a source folder without being installed, so its transports can't be found. Install "
        "it first: `pip install -e .` in the repository's root, or `make` there. If it is installed, Python has found "
        "this folder before it: start elsewhere, or with PYTHONSAFEPATH=1."
    )

if TYPE_CHECKING:
    from dcpcomm import reference, sharding
    from dcpcomm.config import MergeConfig, load_config
    from dcpcomm.errors import (
        CallMismatch,
        ConfigError,
        DCPCommError,
        SelectionMismatch,
        ShapeError,
        TransportTimeout,
        TransportUnavailable,
        VerificationFailed,
    )
    from dcpcomm.merger import DCPMerger
    from dcpcomm.registry import register_transport, registered_transports
    from dcpcomm.transport import (
        Capabilities,
        MergeShape,
        MergeTransport,
        PeerBuffers,
        PeerMemoryTransport,
        Verdict,
    )
    from dcpcomm.workspace import plan_bytes

__version__ = "0.1.0"

__all__ = [
    "CallMismatch",
    "Capabilities",
    "ConfigError",
    "DCPCommError",
    "DCPMerger",
    "MergeConfig",
    "MergeShape",
    "MergeTransport",
    "PeerBuffers",
    "PeerMemoryTransport",
    "SelectionMismatch",
    "ShapeError",
    "TransportTimeout",
    "TransportUnavailable",
    "Verdict",
    "VerificationFailed",
    "load_config",
    "plan_bytes",
    "reference",
    "register_transport",
    "registered_transports",
    "sharding",
]

_HOME = {
    "config": ("MergeConfig", "load_config"),
    "errors": (
        "CallMismatch",
        "ConfigError",
        "DCPCommError",
        "SelectionMismatch",
        "ShapeError",
        "TransportTimeout",
        "TransportUnavailable",
        "VerificationFailed",
    ),
    "merger": ("DCPMerger",),
    "registry": ("register_transport", "registered_transports"),
    "transport": (
        "Capabilities",
        "MergeShape",
        "MergeTransport",
        "PeerBuffers",
        "PeerMemoryTransport",
        "Verdict",
    ),
    "workspace": ("plan_bytes",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in ("reference", "sharding"):
        return importlib.import_module(f"dcpcomm.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'dcpcomm' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"dcpcomm.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
