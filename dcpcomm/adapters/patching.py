"""Put functions in the place of an engine's, wherever its modules hold them, and say what was done.

`from ... import name` binds the function itself in the importing module, so it isn't enough to replace it where it was
defined. A module imported later takes what it finds there; one that is already loaded is searched for it, under any
name. Objects that already hold the function, such as a model that was built before, keep what they have.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from dcpcomm.log import log

__all__ = ["Patch", "Replacement", "Report"]


@dataclass(frozen=True)
class Replacement:
    """What takes a function's place.

    Attributes:
        function: called in its place, with the same arguments.
        fits: None where the original may be replaced, else why not.
    """

    function: Callable[..., Any]
    fits: Callable[[Any], str | None]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Replacement:
        """Fits where the original's parameters are the first ones of `function`, by name and in order."""
        return cls(function, lambda original: _differs(original, function))


@dataclass
class Report:
    """What a patch did.

    Attributes:
        engine, version: what was patched; version None where it isn't installed as a distribution.
        patched: "module.name" of every function that was replaced.
        refused: why something was not.
    """

    engine: str
    version: str | None
    patched: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"dcpcomm in {self.engine} {self.version or '(no version found)'}"
        lines = [f"  swapped in: {name}" for name in self.patched] or ["  nothing was swapped in"]
        return "\n".join([head, *lines, *(f"  left alone: {reason}" for reason in self.refused)])


class Patch:
    """Replaces functions of one engine. Safe to apply twice, as engines load their plug-ins.

    Args:
        engine: the name of its package.
        homes: the modules that may define the functions, over releases.
        replacements: by the function's name, the candidates; the first that fits is taken.
    """

    def __init__(self, engine: str, homes: Sequence[str], replacements: Mapping[str, Sequence[Replacement]]) -> None:
        self._engine, self._homes, self._replacements = engine, tuple(homes), replacements
        self._replaced: dict[tuple[str, str], Any] = {}  # (module, name) -> the original
        self._originals: dict[int, tuple[Any, Callable[..., Any]]] = {}  # id -> the original and its replacement
        self._told = ""

    def apply(self) -> Report:
        """Replace what can be, also in modules that have been loaded since the last time."""
        report = Report(self._engine, _version(self._engine))
        found = [module for module in (_load(home, report) for home in self._homes) if module is not None]
        if not found and not report.refused:
            report.refused.append(self._absent())
        for module in found:
            for name in self._replacements:
                self._choose(module, name, report)
        for module_name, module in sorted(sys.modules.items()):
            if module_name.split(".")[0].startswith(self._engine) and isinstance(module, ModuleType):
                self._replace_in(module_name, module)
        report.patched += [f"{module}.{name}" for module, name in self._replaced]
        if str(report) != self._told:  # engines load their plug-ins more than once in a process
            self._told = str(report)
            log.log(logging.WARNING if report.refused else logging.INFO, "%s", report)
        return report

    def undo(self) -> None:
        """Put the originals back."""
        for (module_name, name), original in self._replaced.items():
            module = sys.modules.get(module_name)
            if module is not None:
                setattr(module, name, original)
        self._replaced.clear()
        self._originals.clear()
        self._told = ""

    def _choose(self, module: ModuleType, name: str, report: Report) -> None:
        original = vars(module).get(name)
        if original is None or id(original) in self._originals or self._is_ours(original):
            return
        reasons = []
        for candidate in self._replacements[name]:
            reason = candidate.fits(original)
            if reason is None:
                self._originals[id(original)] = original, candidate.function
                return
            reasons.append(reason)
        report.refused.append(f"{module.__name__}.{name}: {reasons[0]}")

    def _replace_in(self, module_name: str, module: ModuleType) -> None:
        for name, value in list(vars(module).items()):
            original, replacement = self._originals.get(id(value), (None, None))
            if original is value and replacement is not None:
                setattr(module, name, replacement)
                self._replaced[module_name, name] = original

    def _is_ours(self, value: Any) -> bool:
        return any(value is one.function for candidates in self._replacements.values() for one in candidates)

    def _absent(self) -> str:
        if self._engine not in sys.modules and importlib.util.find_spec(self._engine) is None:
            return f"{self._engine} isn't installed here"
        homes = ", ".join(self._homes)
        return f"this release has none of the modules that are known to hold its merge: {homes}"


def _load(name: str, report: Report) -> ModuleType | None:
    """The module, or None where this release has none of that name; an import that fails is told."""
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            return None
        report.refused.append(f"{name}: importing it raised ModuleNotFoundError: {error}")
    except Exception as error:  # an engine's module may raise anything: its words become the reason
        report.refused.append(f"{name}: importing it raised {type(error).__name__}: {error}")
    return None


def _differs(original: Any, function: Callable[..., Any]) -> str | None:
    """Why `function` can't be called as `original` is."""
    try:
        theirs = list(inspect.signature(original).parameters.values())
    except (TypeError, ValueError, NameError) as error:
        return f"its parameters can't be read: {error}"
    ours = list(inspect.signature(function).parameters.values())
    positional = [one.name for one in ours if one.kind is one.POSITIONAL_OR_KEYWORD]
    asked = [one.name for one in theirs]
    unknown = [one.name for one in theirs if one.name not in {mine.name for mine in ours}]
    if unknown:
        return f"it takes {', '.join(unknown)}, which dcpcomm doesn't know"
    if asked != positional[: len(asked)]:
        return f"it takes ({', '.join(asked)}); expected ({', '.join(positional)}) in this order"
    defaults = {one.name: one.default for one in ours}
    changed = [one.name for one in theirs if one.default is not one.empty and one.default != defaults[one.name]]
    if changed:
        return f"the default of {', '.join(changed)} is another one there"
    return None


def _version(engine: str) -> str | None:
    try:
        return importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        return None
