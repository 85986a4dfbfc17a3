"""All cases, in the order in which they are taken: what arrives, what is computed, what follows, what goes wrong."""

from __future__ import annotations

from fnmatch import fnmatchcase

from dcpcomm.errors import ConfigError
from dcpcomm.testing.conformance.case import Case
from dcpcomm.testing.conformance.cases_calls import CALLS
from dcpcomm.testing.conformance.cases_life import LIFE
from dcpcomm.testing.conformance.cases_numbers import NUMBERS
from dcpcomm.testing.conformance.cases_rows import ROWS

__all__ = ["CASES", "cases_like"]

CASES: tuple[Case, ...] = (*ROWS, *NUMBERS, *CALLS, *LIFE)


def cases_like(pattern: str) -> tuple[Case, ...]:
    """The cases whose name matches `pattern`: a name, a part of one, or with wildcards (`width-*`).

    Raises:
        ConfigError: none does; names them all.
    """
    wild = pattern if any(mark in pattern for mark in "*?[") else f"*{pattern}*"
    found = tuple(case for case in CASES if fnmatchcase(case.name, wild))
    if not found:
        raise ConfigError(f"no case is named like {pattern!r}; the cases are {', '.join(c.name for c in CASES)}")
    return found
