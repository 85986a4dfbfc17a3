"""Names of transports -> their classes. Nothing is imported until a class is asked for.

Three properties shape this file:

* dcpcomm's own transports come by the same entry point, `dcpcomm.transports`, as anyone's: none of them is
  special.
* One name means one class on every rank. Two packages that claim a name are an error that names both, never a
  race of `sys.path` order.
* A plug-in is somebody else's code. Whatever it does when imported becomes a reason to leave it out, not a
  crash.

`DCPCOMM_PLUGINS` is an allow-list, comma-separated: names of distributions or of transports. Where it is set
(empty too), third-party entry points outside it are listed but never imported. dcpcomm's own, and what the
process registers itself with `register_transport`, are always allowed.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import inspect
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcpcomm.errors import ConfigError, TransportUnavailable

if TYPE_CHECKING:
    from dcpcomm.transport import MergeTransport, Verdict

__all__ = [
    "GROUP",
    "TransportEntry",
    "load_transport",
    "nearest",
    "register_transport",
    "registered_transports",
    "try_load",
    "unregister_transport",
]

GROUP = "dcpcomm.transports"
PLUGINS_VARIABLE = "DCPCOMM_PLUGINS"
BY_CALL = "register_transport"
_OWN = "dcpcomm"
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_RESERVED = ("auto",)
_DOTTED = re.compile(r"(?P<module>\w+(\.\w+)*)(:(?P<attribute>\w+(\.\w+)*))?(\s*\[.*\])?")
_by_call: dict[str, str | type[MergeTransport]] = {}


@dataclass(frozen=True)
class TransportEntry:
    """One registered name; its class need not be importable.

    Args:
        name: what configs call it.
        target: the class, or the dotted path to it.
        distribution: "NAME VERSION" of the package whose entry point gave it, or "register_transport".
        blocked: why it may not be loaded; empty where it may.
    """

    name: str
    target: str | type[MergeTransport]
    distribution: str
    blocked: str = ""

    @property
    def dotted_path(self) -> str:
        """`target` as text."""
        if isinstance(self.target, str):
            return self.target
        return f"{self.target.__module__}:{self.target.__qualname__}"


class _Refused(Exception):
    """A class could not be had; `__cause__` is what the plug-in raised, if it did."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


def register_transport(name: str, cls_or_dotted_path: str | type[MergeTransport]) -> None:
    """Give a transport of this process a name, as an entry point would.

    Args:
        name: letters, digits, `_` and `-`; what the class calls itself in its `name`.
        cls_or_dotted_path: the class, or "pkg.mod:Class" or "pkg.mod.Class", imported when it is first asked
            for.

    Raises:
        ConfigError: the name or the path is malformed, or the name belongs to another class.
    """
    call = f"register_transport({name!r})"
    fault = _name_fault(name)
    if fault:
        raise ConfigError(f"register_transport: {fault}")
    if isinstance(cls_or_dotted_path, str):
        _split(cls_or_dotted_path, ConfigError(f"{call}: {_malformed(cls_or_dotted_path)}"))
    elif not isinstance(cls_or_dotted_path, type):
        raise ConfigError(f"{call}: got {cls_or_dotted_path!r:.60}; expected a class or a dotted path to one")
    known = registered_transports().get(name)
    if known is not None and not known.blocked and known.target != cls_or_dotted_path:
        raise ConfigError(
            f"{call}: {known.distribution} has already registered {known.dotted_path} by this name; choose another "
            "name, or call unregister_transport first if that was register_transport"
        )
    if known is None or known.blocked:
        _by_call[name] = cls_or_dotted_path


def unregister_transport(name: str) -> None:
    """Take back what `register_transport` did; entry points stay. Safe for a name that isn't there."""
    _by_call.pop(name, None)


def registered_transports() -> dict[str, TransportEntry]:
    """Every registered transport by name, sorted. Imports none of them.

    Raises:
        ConfigError: two distributions claim one name.
    """
    claims: dict[str, list[TransportEntry]] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        owner, version = _owner(point)
        entry = TransportEntry(point.name, point.value, f"{owner} {version}".strip(), _blocked(point.name, owner))
        claims.setdefault(point.name, []).append(entry)
    for name, target in list(_by_call.items()):  # a copy: other threads, too, may register
        claims.setdefault(name, []).append(TransportEntry(name, target, BY_CALL))
    return {name: _only(claims[name]) for name in sorted(claims)}


def load_transport(name: str) -> type[MergeTransport]:
    """Import the class registered as `name`, and hold it to the contract.

    Raises:
        ConfigError: no transport has this name.
        TransportUnavailable: it can't be imported, is blocked, or isn't what the contract asks; with reason
            and remedy.
    """
    entry = _entry(name)
    try:
        return _load(entry)
    except _Refused as refused:
        raise TransportUnavailable(
            f"transport {name!r} of {entry.distribution} can't be loaded: {refused.reason}; {refused.remedy}"
        ) from refused.__cause__


def try_load(name: str) -> tuple[type[MergeTransport] | None, Verdict]:
    """As `load_transport`, but what keeps the class from being loaded is returned, for tables and reports.

    Raises:
        ConfigError: no transport has this name.
    """
    from dcpcomm.transport import Verdict

    entry = _entry(name)
    try:
        return _load(entry), Verdict(True)
    except _Refused as refused:
        return None, Verdict(False, refused.reason, refused.remedy)


def nearest(word: object, words: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest of `words`, or nothing where none is near. For error messages."""
    close = difflib.get_close_matches(str(word), list(words), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _entry(name: str) -> TransportEntry:
    entries = registered_transports()
    if name not in entries:
        raise ConfigError(
            f"no transport is registered as {name!r}{nearest(name, entries) or '.'} Registered: "
            f"{', '.join(entries) or 'none'}. Correct the name, or install the package that provides it"
        )
    return entries[name]


def _only(claims: list[TransportEntry]) -> TransportEntry:
    """The one entry that a name stands for. What is blocked claims nothing."""
    allowed = [entry for entry in claims if not entry.blocked]
    if not allowed:
        return claims[0]
    if len({(_owner_key(entry), entry.target) for entry in allowed}) > 1:
        listed = " and ".join(sorted(f"{entry.distribution} ({entry.dotted_path})" for entry in allowed))
        raise ConfigError(
            f"transport name {allowed[0].name!r} is claimed by {listed}; uninstall one of them, or leave it out of the "
            f"allow-list in {PLUGINS_VARIABLE}"
        )
    return allowed[0]


def _owner(point: importlib.metadata.EntryPoint) -> tuple[str, str]:
    """Name and version of the distribution that an entry point came from."""
    # Half-installed packages have no metadata, and indexing it for what is missing warns on some Pythons.
    metadata: Any = (point.dist and point.dist.metadata) or {}
    return metadata.get("Name", "unknown-distribution"), metadata.get("Version", "")


def _owner_key(entry: TransportEntry) -> str:
    return _normal(entry.distribution.split(" ")[0])


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _blocked(name: str, owner: str) -> str:
    fault = _name_fault(name)
    if fault:
        return f"{fault}; {owner} must rename its entry point"
    text = os.environ.get(PLUGINS_VARIABLE)
    if text is None or _normal(owner) == _OWN:
        return ""
    allowed = [word.strip() for word in text.split(",") if word.strip()]
    if name in allowed or _normal(owner) in map(_normal, allowed):
        return ""
    return f"{PLUGINS_VARIABLE}={text!r} allows neither {owner!r} nor {name!r}; add one of them to allow it"


def _name_fault(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return f"{name!r} can't be a transport's name; expected letters, digits, '_' and '-'"
    if name in _RESERVED:
        return f"{name!r} can't be a transport's name: it means something else in a config"
    return ""


def _malformed(target: str) -> str:
    return f"{target!r} is no dotted path to a class; expected 'pkg.mod:Class' or 'pkg.mod.Class'"


def _split(target: str, error: Exception) -> tuple[str, str]:
    """Module and attribute of a dotted path; `error` is raised where it has not both."""
    match = _DOTTED.fullmatch(target.strip())
    if match is None:
        raise error
    module, attribute = match["module"], match["attribute"]
    if attribute is None:
        module, _, attribute = module.rpartition(".")
    if not module:
        raise error
    return module, attribute


def _load(entry: TransportEntry) -> type[MergeTransport]:
    if entry.blocked:
        reason, _, remedy = entry.blocked.rpartition("; ")
        raise _Refused(reason, remedy)
    return _held_to_contract(entry, _imported(entry) if isinstance(entry.target, str) else entry.target)


def _imported(entry: TransportEntry) -> Any:
    provider = f"the provider of {entry.dotted_path}"
    module, attribute = _split(
        entry.dotted_path, _Refused(_malformed(entry.dotted_path), f"{provider} must correct its entry point")
    )
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        if module == missing or module.startswith(missing + "."):
            reason = f"its own module, {missing}, isn't there"
            remedy = f"reinstall {entry.distribution}, or correct the path {entry.dotted_path!r}"
        else:
            reason, remedy = (
                f"it needs the module {missing!r}, which isn't installed",
                _install(entry, missing),
            )
        raise _Refused(reason, remedy) from error
    except ImportError as error:
        raise _Refused(
            f"importing it failed: {_said(error)}", f"install what that names, or {_leave_out(entry)}"
        ) from error
    except KeyboardInterrupt:
        raise
    # A plug-in may raise anything, and some call sys.exit when a driver is missing: neither may end an
    # engine.
    except BaseException as error:
        raise _Refused(
            f"importing {module} raised {_said(error)}",
            f"report that to {entry.distribution}, and meanwhile {_leave_out(entry)}",
        ) from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise _Refused(
                f"module {module} has no {attribute!r}",
                f"{provider} must correct the path {entry.dotted_path!r}",
            ) from error
    return found


def _held_to_contract(entry: TransportEntry, cls: Any) -> type[MergeTransport]:
    from dcpcomm.transport import API_VERSION, Capabilities, MergeTransport, PeerMemoryTransport

    def refuse(reason: str, change: str) -> _Refused:
        return _Refused(f"{entry.dotted_path} {reason}", change)

    if not (isinstance(cls, type) and issubclass(cls, MergeTransport)):
        came = f"class {cls.__qualname__}" if isinstance(cls, type) else f"{type(cls).__name__} {cls!r:.60}"
        raise refuse(f"is {came}; expected a subclass of dcpcomm.MergeTransport", "derive it from that class")
    if cls.api_version != API_VERSION:
        raise refuse(
            f"has api_version {cls.api_version!r}; this dcpcomm expects {API_VERSION}",
            f"install a release of {entry.distribution} made for transport API {API_VERSION}, or port it",
        )
    name, capabilities = getattr(cls, "name", None), getattr(cls, "capabilities", None)
    if name != entry.name:
        came = "has no class attribute `name`" if name is None else f"calls itself {name!r}"
        raise refuse(
            f"{came}; expected the registered name {entry.name!r}",
            f"set `name = {entry.name!r}` in the class, or register it by the name it has",
        )
    if not isinstance(capabilities, Capabilities):
        came = "no class attribute `capabilities`" if capabilities is None else f"capabilities {capabilities!r:.60}"
        raise refuse(f"has {came}; expected a dcpcomm.Capabilities", "set `capabilities = Capabilities(...)` in it")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise refuse(f"lacks {missing}; expected every abstract method to be there", f"write {missing}")
    moves = cls.exchange is not MergeTransport.exchange or cls.fused_merge is not None
    if not moves and not issubclass(cls, PeerMemoryTransport):
        raise refuse("has neither `exchange` nor `fused_merge`; expected one of them", "write `exchange`")
    options: Any = cls.Options
    if options is not None and not (isinstance(options, type) and hasattr(options, "model_validate")):
        raise refuse(
            f"has Options {options!r:.60}; expected a pydantic model or None",
            "derive Options from pydantic.BaseModel",
        )
    return cls


def _install(entry: TransportEntry, missing: str) -> str:
    if _owner_key(entry) == _OWN:
        return (
            f"install {missing.partition('.')[0]}: `pip install 'dcpcomm[cu12]'` brings what dcpcomm's transports need "
            "on CUDA 12, `pip install 'dcpcomm[cu13]'` on CUDA 13"
        )
    return f"install what provides {missing!r} (see the requirements and extras of {entry.distribution})"


def _leave_out(entry: TransportEntry) -> str:
    return f"leave it out with `forbid: [{entry.name}]`"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
