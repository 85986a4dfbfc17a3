"""The exception tree: one class per meaning of failure.

    DCPCommError
    ├── ShapeError(ValueError)        an argument, a shape or a dtype is wrong; nothing was sent
    ├── ConfigError(ValueError)       a configuration file, mapping, environment variable or option is wrong
    ├── TransportUnavailable          no transport, or not the named one, can serve this group on this machine
    │   └── VerificationFailed        a transport ran, but what arrived was not what was sent
    ├── SelectionMismatch             ranks came to a construction with different shapes, configs or versions
    ├── CallMismatch                  ranks met in one exchange with different calls, or a peer raised before it sent
    └── TransportTimeout              a peer did not arrive within the deadline, or is gone

Every message says what came, what was expected, on which rank, and what to do.
"""

from __future__ import annotations

__all__ = [
    "CallMismatch",
    "ConfigError",
    "DCPCommError",
    "SelectionMismatch",
    "ShapeError",
    "TransportTimeout",
    "TransportUnavailable",
    "VerificationFailed",
]


class DCPCommError(Exception):
    """The root of all errors that dcpcomm raises."""


class ShapeError(DCPCommError, ValueError):
    """An argument, a shape or a dtype is wrong. Nothing was exchanged."""


class ConfigError(DCPCommError, ValueError):
    """A configuration file, mapping, environment variable or transport option is wrong."""


class TransportUnavailable(DCPCommError):
    """No transport, or not the one that was named, can serve this group on this machine."""


class VerificationFailed(TransportUnavailable):
    """A transport ran, but what arrived was not bit for bit what was sent."""


class SelectionMismatch(DCPCommError):
    """Ranks met in one construction with different shapes, configurations or versions."""


class CallMismatch(DCPCommError):
    """Ranks met in one exchange with different calls, or a peer raised instead of sending its rows."""


class TransportTimeout(DCPCommError):
    """A peer did not arrive within the deadline, or its process is gone.

    `ranks` holds the group ranks that did not arrive, as far as this rank can tell.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message, ranks)  # both, so that it survives pickling between processes
        self.ranks = ranks

    def __str__(self) -> str:
        return str(self.args[0])
