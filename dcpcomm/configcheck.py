"""What is wrong with a configuration, in words that its owner can act on.

Takes plain values and where they came from; knows nothing of pydantic but the shape of its error records.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcpcomm.errors import ConfigError
from dcpcomm.registry import nearest
from dcpcomm.yamlfile import Path, Problem, dotted

__all__ = ["MAPPING", "Source", "field_problems", "name_problems", "option_problems", "plain", "raise_all"]

MAPPING = "config mapping"

_A_NAME = "the registered name of a transport"
_EXPECTED: dict[Path, str] = {
    ("transport",): f"auto, or {_A_NAME}",
    ("prefer",): "a list of transports' registered names",
    ("forbid",): "a list of transports' registered names",
    ("deterministic",): "true or false",
    ("max_live",): "a whole number above 0",
    ("max_sms",): "auto, or a whole number above 0",
    ("cost_table",): "auto, builtin, or the path of a cost table",
    ("verify",): "a mapping, such as {level: standard, deadline_s: 30}",
    ("verify", "deadline_s"): "a number of seconds above 0",
    ("watchdog",): "a mapping, such as {timeout_s: 120, action: raise}",
    ("watchdog", "timeout_s"): "a number of seconds above 0",
    ("options",): "a mapping of transports' names to mappings of their options",
}


@dataclass
class Source:
    """Values as they came, and where each came from.

    Args:
        label: the file's path, or MAPPING.
        values: plain data.
        lines: of a file: by path, the 1-based lines of key and value.
        places: what came from elsewhere, by path.
        problems: found so far.
        notes: what could not be checked, and why.
    """

    label: str
    values: Any
    lines: dict[Path, tuple[int, int]] = field(default_factory=dict)
    places: dict[Path, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, path: Path, message: str, *, at_key: bool = False) -> None:
        """Record a problem of the value, or else of the key, at `path`."""
        problem = self._place(path, message, at_key)
        if problem not in self.problems:
            self.problems.append(problem)

    def _place(self, path: Path, message: str, at_key: bool) -> Problem:
        for cut in range(len(path), 0, -1):
            here = path[:cut]
            if here in self.places:
                return Problem(self.places[here], None, dotted(path), message)
            if here in self.lines:
                # Of what is absent, the key that should hold it is the nearest thing to point at.
                line = self.lines[here][0 if at_key or cut < len(path) else 1]
                return Problem(self.label, line, dotted(path), message)
        return Problem(self.label, None if self.label == MAPPING else 1, dotted(path), message)


def plain(value: Any, path: Path = ()) -> Any:
    """A copy in the types that YAML has: what ranks compare and processes send each other must not hold
    objects.

    Raises:
        ConfigError: a value is of another type.
    """
    if hasattr(value, "model_dump") and not isinstance(value, type):
        return plain(value.model_dump(exclude_unset=True), path)
    if isinstance(value, Mapping):
        return {key: plain(item, (*path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, (*path, index)) for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ConfigError(
        f"{MAPPING}: {dotted(path)} is {value!r:.60}, of type {type(value).__name__}; expected text, a number, true or "
        "false, a list or a mapping"
    )


def field_problems(source: Source, errors: Iterable[Any], keys: Mapping[Path, Sequence[str]]) -> None:
    """Record pydantic's `errors` on the fields of a configuration. `keys` are the valid ones of each mapping
    in it.
    """
    for error in errors:
        path = error["loc"]
        if error["type"] in ("extra_forbidden", "invalid_key"):
            _unknown_key(source, path, keys[path[:-1]])
            continue
        if path[-1] == "[key]" and len(path) == 3:
            continue  # a name in `options` that is no text: name_problems says so
        while path not in _EXPECTED and error["type"] != "literal_error" and len(path) > 1:
            path = path[:-1]
        words: list[str] = re.findall(r"'(\w+)'", error.get("ctx", {}).get("expected", ""))
        if len(error["loc"]) > 1 and error["loc"][0] in ("prefer", "forbid"):
            path, expected = error["loc"], _A_NAME
        elif error["loc"][0] == "options" and len(error["loc"]) > 1:
            path, expected = error["loc"][:2], "a mapping of the transport's options"
        elif error["loc"][0] == "max_sms":
            path, words, expected = ("max_sms",), ["auto"], _EXPECTED[("max_sms",)]
        else:
            expected = _EXPECTED.get(path) or f"one of {', '.join(words)}"
        source.add(path, _wrong_value(path, error["input"], expected, words))


def name_problems(source: Source, names: Sequence[str]) -> None:
    """Record every transport name that is not registered, is listed twice, or is both asked for and
    forbidden.
    """
    values = source.values
    transport = values.get("transport", "auto")
    if isinstance(transport, str) and transport != "auto":
        _known(source, ("transport",), transport, names)
    asked = {transport: "transport"} if isinstance(transport, str) else {}
    for key in ("prefer", "forbid"):
        seen: set[str] = set()
        for index, name in _strings(values.get(key)):
            path = (key, index)
            if name in seen:
                source.add(path, f"{key} lists {name!r} twice; remove one")
            elif _known(source, path, name, names) and key == "prefer":
                asked.setdefault(name, "prefer")
            elif key == "forbid" and name in asked:
                whose = source.places.get(("transport",)) if asked[name] == "transport" else None
                also = whose or f"the key '{asked[name]}'"
                source.add(path, f"{name!r} is forbidden here, and asked for by {also}; take it out of one of them")
            seen.add(name)
    options = values.get("options")
    for name in options if isinstance(options, dict) else ():
        _known(source, ("options", name), name, names, at_key=True)


def option_problems(source: Source, name: str, errors: Iterable[Any], keys: Sequence[str]) -> None:
    """Record a plug-in model's `errors` on the options of transport `name`, whose own keys are `keys`."""
    for error in errors:
        path = ("options", name, *error["loc"])
        if error["type"] == "extra_forbidden" and len(path) == 3:
            _unknown_key(source, path, keys)
        elif error["type"] == "extra_forbidden":
            source.add(path, f"key {dotted(path)!r} is not known; remove it", at_key=True)
        elif error["type"] == "missing":
            source.add(path, f"{dotted(path)} is missing, and the transport needs it; add it")
        else:
            source.add(path, f"{dotted(path)}: {error['msg']}; it is {_shown(error['input'])}")


def raise_all(problems: Sequence[Problem]) -> None:
    """Raise one ConfigError with a line for each problem, if there is any."""
    if problems:
        raise ConfigError("\n".join(str(problem) for problem in problems))


def _unknown_key(source: Source, path: Path, keys: Sequence[str]) -> None:
    where = f" of {dotted(path[:-1])}" if len(path) > 1 else ""
    source.add(
        path,
        f"key {dotted(path)!r} is not known{nearest(path[-1], keys) or '; remove it.'} Valid keys{where}: "
        f"{', '.join(keys)}",
        at_key=True,
    )


def _known(source: Source, path: Path, name: object, names: Sequence[str], *, at_key: bool = False) -> bool:
    if name in names:
        return True
    source.add(
        path,
        f"{dotted(path)}: no transport is registered as {name!r}{nearest(name, names) or '.'} Registered: "
        f"{', '.join(names) or 'none'}. Correct the name, or install the package that provides it",
        at_key=at_key,
    )
    return False


def _wrong_value(path: Path, value: object, expected: str, words: Sequence[str]) -> str:
    hint = nearest(value, words) if isinstance(value, str) else ""
    if isinstance(value, str) and expected.startswith("a list"):
        hint = f"; write [{value}]"
    elif isinstance(value, str) and value.lower() in ("yes", "on", "no", "off") and expected == "true or false":
        hint = f"; write {'true' if value.lower() in ('yes', 'on') else 'false'}"
    return f"{dotted(path)} is {_shown(value)}; expected {expected}{hint}"


def _shown(value: object) -> str:
    return "empty" if value is None else f"{value!r:.60}"


def _strings(value: object) -> list[tuple[int, str]]:
    return [(i, v) for i, v in enumerate(value) if isinstance(v, str)] if isinstance(value, list) else []
