"""What a user may set, where it comes from, and what is wrong with it.

Every mistake is found before a transport is built, all of them at once, each with its file, line and nearest
valid word: a mistyped key that is silently ignored sends a cluster into production with another transport
than its owner believes.

Authority: argument, environment, file, auto. An argument that is a mapping or a `MergeConfig` wins over the
environment in what it sets. A file is a file, whether its path came as the argument or in `DCPCOMM_CONFIG`:
there the environment (`DCPCOMM_TRANSPORT`) wins. Empty environment variables count as unset.

pydantic is imported here and in cost.py, and nowhere else in the framework.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dcpcomm import registry
from dcpcomm.configcheck import (
    MAPPING,
    Source,
    field_problems,
    name_problems,
    option_problems,
    plain,
    raise_all,
)
from dcpcomm.errors import ConfigError
from dcpcomm.yamlfile import Problem, read_yaml

if TYPE_CHECKING:
    from dcpcomm.transport import MergeTransport

__all__ = [
    "MergeConfig",
    "Reading",
    "VerifyConfig",
    "WatchdogConfig",
    "config_fingerprint",
    "config_schema",
    "load_config",
    "options_for",
    "read_config",
]

_LONGEST_S = 1e7  # four months; what is longer, clocks of libraries below can't count
CONFIG_VARIABLE = "DCPCOMM_CONFIG"
TRANSPORT_VARIABLE = "DCPCOMM_TRANSPORT"
_TABLES = ("auto", "builtin")


class _Part(BaseModel):
    # strict: a quoted "2" or a `yes` is a slip of the pen to report, not a value to guess at.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class VerifyConfig(_Part):
    """How a transport is proven at construction, before it carries a merge."""

    level: Literal["off", "quick", "standard", "soak"] = Field(
        default="standard", description="how much is sent and compared"
    )
    deadline_s: float = Field(default=30.0, gt=0, le=_LONGEST_S, description="seconds, for each candidate")


class WatchdogConfig(_Part):
    """What happens when a peer does not arrive."""

    timeout_s: float = Field(default=120.0, gt=0, le=_LONGEST_S, description="seconds that a merge waits for a peer")
    action: Literal["raise", "log"] = Field(default="raise", description="what to do then")


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]  # YAML has lists; frozen fields must not


class _Fields(_Part):
    transport: str = Field(default="auto", description="auto, or the registered name of the only transport to use")
    prefer: _Names = Field(default=(), description="registered names, tried first, in this order")
    forbid: _Names = Field(default=(), description="registered names, never used")
    on_unavailable: Literal["error", "fallback"] = Field(
        default="error", description="when the named transport can't be used: raise, or choose as auto would"
    )
    projection: Literal["auto", "before", "after"] = Field(
        default="auto", description="project through W_UV before or after the merge"
    )
    deterministic: bool = Field(
        default=False,
        description="bit-equal transports only, and one projection order for every number of rows",
    )
    max_live: int = Field(default=2, gt=0, description="transports that stay connected, at most")
    max_sms: Literal["auto"] | Annotated[int, Field(gt=0)] = Field(
        default="auto",
        description="SMs that a merger's waiting kernels may occupy, over all its channels; auto: half of the GPU's",
    )
    cost_table: str = Field(
        default="auto",
        min_length=1,
        description="auto (what `dcpcomm tune` measured, over the built-in tables), builtin (those alone), or the path "
        "of a table; relative to the file that names it",
    )
    verify: VerifyConfig = Field(default=VerifyConfig(), description="proof of a transport before use")
    watchdog: WatchdogConfig = Field(default=WatchdogConfig(), description="peers that don't arrive")
    options: dict[str, dict[str, Any]] = Field(
        default={}, description="each transport's own options, by its registered name"
    )


class MergeConfig(_Fields):
    """The whole configuration of a merger, checked and frozen; configs/auto.yaml explains each field.

    Built from keywords, or by `load_config`. `options` holds each transport's options as plain data;
    `options_for` makes the transport's own model of them.

    Raises:
        ConfigError: naming everything that is wrong with the keywords.
    """

    if not TYPE_CHECKING:  # type checkers see the fields instead

        def __init__(self, **values: Any) -> None:
            source = Source(MAPPING, values=plain(values))
            _check(source)
            raise_all(source.problems)
            super().__init__(**source.values)


@dataclass
class Reading:
    """What `read_config` found: `config` where nothing is wrong, else `problems`; `notes` on what could not
    be checked.
    """

    source: str
    config: MergeConfig | None
    problems: list[Problem]
    notes: list[str]


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | MergeConfig | None = None,
) -> MergeConfig:
    """The configuration that `source` and the environment ask for.

    Args:
        source: the path of a YAML file; the name of one that dcpcomm ships ("auto", "node.yaml") where no
            such file exists; a mapping; a `MergeConfig`; or None for the file that `DCPCOMM_CONFIG` names,
            else auto.

    `DCPCOMM_TRANSPORT` overrides the `transport` of a file, also of one whose path is the argument. It does
    not override a `transport` that a mapping or a `MergeConfig` sets (`auto` is setting it), but counts where
    they don't.

    Raises:
        ConfigError: one line for each thing that is wrong: FILE:LINE, what came, the nearest valid word, what
            to do.
    """
    reading = read_config(source, os.environ)
    raise_all(reading.problems)
    assert reading.config is not None
    return reading.config


def read_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | MergeConfig | None, environ: Mapping[str, str]
) -> Reading:
    """As `load_config`, but what is wrong is returned. An empty `environ` judges the source alone.

    Raises:
        ConfigError: there is nothing to read: the file is missing or unreadable, or `source` is of another
            kind.
    """
    origin = "config"
    if source is None:
        source, origin = environ.get(CONFIG_VARIABLE) or {}, CONFIG_VARIABLE
    if isinstance(source, str | os.PathLike):
        found, is_argument = _from_file(os.fspath(source), origin), False
    elif isinstance(source, BaseModel | Mapping):
        if isinstance(source, BaseModel) and not isinstance(source, MergeConfig):
            raise ConfigError(f"config is a {type(source).__name__}; expected a dcpcomm.MergeConfig, mapping or path")
        found, is_argument = Source(MAPPING, values=plain(source)), True
    else:
        raise ConfigError(f"config is {source!r:.80}; expected a path, a mapping, a dcpcomm.MergeConfig or None")
    named = environ.get(TRANSPORT_VARIABLE)
    if named and isinstance(found.values, dict) and not (is_argument and "transport" in found.values):
        found.values["transport"] = named
        found.places[("transport",)] = f"environment {TRANSPORT_VARIABLE}"
    _check(found)
    problems = sorted(found.problems, key=lambda problem: problem.line or 0)
    return Reading(found.label, None if problems else MergeConfig(**found.values), problems, found.notes)


def options_for(config: MergeConfig, cls: type[MergeTransport]) -> Any:
    """An instance of `cls.Options` made of `config.options`, or None where the class has no options.

    Raises:
        ConfigError: the options are not what the class asks for.
    """
    source = Source("config", values={})
    made = _make_options(source, cls, config.options.get(cls.name, {}))
    raise_all(source.problems)
    return made


def config_fingerprint(config: MergeConfig) -> dict[str, str]:
    """Dotted key -> value as JSON text, for ranks to compare. A cost table counts by its content, not by its path; one
    that was tuned doesn't count, as only rank 0's is read.

    Raises:
        ConfigError: the cost table can't be read.
    """
    values = config.model_dump(mode="json")
    if config.cost_table not in _TABLES:
        try:
            content = Path(config.cost_table).read_bytes()
        except OSError as error:
            raise ConfigError(f"cost_table {config.cost_table!r} can't be read: {error.strerror}") from error
        values["cost_table"] = f"sha256:{hashlib.sha256(content).hexdigest()}"
    flat: dict[str, str] = {}
    _flatten(values, "", flat)
    return flat


def config_schema() -> dict[str, Any]:
    """JSON schema of a configuration file, with names and options of the transports registered here."""
    schema = MergeConfig.model_json_schema()
    schema["title"] = "dcpcomm configuration"
    definitions = schema.setdefault("$defs", {})
    options: dict[str, Any] = {}
    entries = registry.registered_transports()
    for name in entries:
        cls, verdict = registry.try_load(name)
        if cls is None:
            options[name] = {"type": "object", "description": f"not checked here: {verdict.reason}"}
        elif cls.Options is None:
            options[name] = {"type": "object", "maxProperties": 0, "description": "has no options"}
        else:
            # Prefixed, because two plug-ins may both define a model called `Ring`.
            own = cls.Options.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")
            definitions.update({f"{name}.{model}": body for model, body in own.pop("$defs", {}).items()})
            options[name] = {"additionalProperties": False, **own}
    properties = schema["properties"]
    properties["transport"]["enum"] = ["auto", *entries]
    for key in ("prefer", "forbid"):
        properties[key]["items"] = {"type": "string", "enum": list(entries)}
    properties["options"].update(properties=options, additionalProperties=False)
    return schema


def _check(source: Source) -> None:
    """Record everything that is wrong with `source.values`."""
    if not isinstance(source.values, dict):
        if not source.problems:
            source.add((), f"holds {source.values!r:.60}; expected a mapping, such as `transport: auto`")
        return
    try:
        _Fields.model_validate(source.values)
    except ValidationError as failure:
        field_problems(source, failure.errors(include_url=False), _KEYS)
    if not source.values.keys().isdisjoint(("transport", "prefer", "forbid", "options")):
        # Of what names none nothing can be wrong, whatever is installed.
        name_problems(source, list(registry.registered_transports()))
    table = source.values.get("cost_table")
    if isinstance(table, str) and table not in ("", *_TABLES):
        source.values["cost_table"] = str(Path(table).expanduser().absolute())
        if not Path(source.values["cost_table"]).is_file():
            kind = "a folder" if Path(source.values["cost_table"]).is_dir() else "no such file"
            source.add(("cost_table",), f"cost_table: {kind}, {table!r}; correct the path, or write auto or builtin")
    options = source.values.get("options")
    for name, given in options.items() if isinstance(options, dict) else ():
        if name in registry.registered_transports() and isinstance(given, dict):
            cls, verdict = registry.try_load(name)
            if cls is None:
                source.notes.append(f"options.{name} can't be checked here: {verdict.reason}; {verdict.remedy}")
            else:
                _make_options(source, cls, given)


def _make_options(source: Source, cls: type[MergeTransport], given: dict[str, Any]) -> Any:
    """An instance of the class's own model, or None and perhaps a problem recorded."""
    path = ("options", cls.name)
    if cls.Options is None:
        if given:
            source.add(path, f"transport {cls.name!r} has no options; remove options.{cls.name}", at_key=True)
        return None
    keys = _keys(cls.Options)
    # A model that says nothing of extra keys drops them, and a mistyped option would go unseen.
    if cls.Options.model_config.get("extra", "ignore") == "ignore":
        unknown = [key for key in given if key not in keys]
        option_problems(source, cls.name, [{"type": "extra_forbidden", "loc": (key,)} for key in unknown], keys)
    try:
        return cls.Options.model_validate(given)
    except ValidationError as failure:
        option_problems(source, cls.name, failure.errors(include_url=False), keys)
    except Exception as error:  # a plug-in's own validator: its fault is a reason, not a crash
        source.add(path, f"options.{cls.name}: checking it raised {type(error).__name__}: {error}", at_key=True)
    return None


def _keys(model: type[BaseModel]) -> list[str]:
    """Every key that a mapping for `model` may have."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        aliases = [alias for alias in (info.alias, info.validation_alias) if isinstance(alias, str)]
        keys += dict.fromkeys(aliases or [name])
        if aliases and model.model_config.get("populate_by_name"):
            keys.append(name)
    return keys


_KEYS = {(): _keys(_Fields), ("verify",): _keys(VerifyConfig), ("watchdog",): _keys(WatchdogConfig)}


def _from_file(name: str, origin: str) -> Source:
    path = Path(name).expanduser()
    if not path.is_file():
        shipped = _shipped()
        bare = name.removesuffix(".yaml")
        if bare not in shipped:
            kind = "it is a directory" if path.is_dir() else "not a regular file" if path.exists() else "no such file"
            hint = registry.nearest(bare, shipped) or "."
            raise ConfigError(
                f"{origin} {name!r}: {kind}{hint} Give the path of a YAML file, or the name of one that dcpcomm ships: "
                f"{', '.join(shipped)}"
            )
        path = shipped[bare]
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{origin} {name!r} can't be read: {error.strerror}; give a readable YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{origin} {name!r} is not UTF-8 text ({error.reason}); save it as UTF-8") from error
    file = read_yaml(text, str(path))
    values = {} if file.values is None else file.values
    table = values.get("cost_table") if isinstance(values, dict) else None
    if isinstance(table, str) and table not in ("", *_TABLES):
        values["cost_table"] = str(path.absolute().parent / Path(table).expanduser())
    return Source(str(path), values=values, lines=file.lines, problems=file.problems)


def _shipped() -> dict[str, Path]:
    """The configurations in this package, by name without suffix."""
    folder = Path(str(importlib.resources.files("dcpcomm.configs")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _flatten(value: Any, key: str, into: dict[str, str]) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            _flatten(item, f"{key}.{name}" if key else str(name), into)
    else:
        into[key] = json.dumps(value, sort_keys=True)
