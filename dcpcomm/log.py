"""The logger of the package, `logging.getLogger("dcpcomm")`; `DCPCOMM_LOG` gives it a level and a place to write to.

Without the variable nothing is configured: the engine's own logging decides what is shown, and warnings reach standard
error.
"""

from __future__ import annotations

import logging
import os

__all__ = ["log"]

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

log = logging.getLogger("dcpcomm")


def _configure(asked_for: str) -> None:
    level = _LEVELS.get(asked_for.lower())
    if level is None:
        log.warning("DCPCOMM_LOG is %r; expected one of %s: it is ignored", asked_for, ", ".join(_LEVELS))
        return
    log.setLevel(level)
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s dcpcomm %(levelname)s: %(message)s"))
        log.addHandler(handler)
        log.propagate = False


if os.environ.get("DCPCOMM_LOG"):
    _configure(os.environ["DCPCOMM_LOG"])
