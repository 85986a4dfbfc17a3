"""The environment variable that turns a plug-in on: engines load whatever is installed."""

from __future__ import annotations

import os

from dcpcomm.errors import ConfigError

__all__ = ["switched_on"]


def switched_on(variable: str) -> bool:
    """Whether it is 1; not where it is 0, empty or unset.

    Raises:
        ConfigError: it is something else.
    """
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{variable} is {value!r}; expected 0 or 1")
    return value == "1"
