"""YAML with a line for every value, so that an error can say where.

Scalars resolve as in YAML 1.2: only `true` and `false` are booleans, so `level: off` is the word "off" and
`no` is "no"; `010` is ten, `1e3` is a number, and `1:30` is text. Duplicate keys, which PyYAML lets the last
one win, are problems.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

__all__ = ["Lines", "Path", "Problem", "YamlFile", "dotted", "dump_yaml", "read_yaml"]

Path = tuple[Any, ...]  # keys and list indices, from the top down
_TAG = "tag:yaml.org,2002:"
_MOST_VALUES = 100_000  # a dozen aliases to aliases are billions


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a configuration. `str()` of it is the line to print."""

    source: str
    line: int | None
    key: str
    message: str

    def __str__(self) -> str:
        place = self.source if self.line is None else f"{self.source}:{self.line}"
        return f"{place}: {self.message}"


@dataclass
class YamlFile:
    """What a file says: values, and for each path the 1-based lines of its key and of its value."""

    source: str
    values: Any = None
    lines: dict[Path, tuple[int, int]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


class _TooMany(Exception):
    pass


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012  a fresh table, or YAML 1.1's would be extended in place


for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(f"^(?:{_pattern})$"), _first)


class Lines(list[Any]):
    """A list of which `dump_yaml` puts each item on a line of its own."""


class _Dumper(yaml.SafeDumper):
    # As it is read back: by YAML 1.1 "2e5" would be text and stand without quotes.
    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


_Dumper.add_representer(Lines, lambda dumper, items: dumper.represent_sequence(f"{_TAG}seq", items, flow_style=False))


def dump_yaml(values: Any) -> str:
    """Text that `read_yaml` takes back; innermost lists and mappings on one line."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=1000)


def read_yaml(text: str, source: str) -> YamlFile:
    """The values of one YAML document, with lines. What is wrong with it is in `problems`; nothing is
    raised.
    """
    file = YamlFile(source)
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is not None:
            file.values = _value(file, node, (), ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = ", ".join(part for part in (error.problem, error.context) if part)
        _report(file, (), mark.line + 1 if mark else 1, f"not valid YAML: {said}; correct the syntax there")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        _report(file, (), line, f"not valid YAML: {error.reason}; remove that character")
    except _TooMany:
        file.values, message = None, f"more than {_MOST_VALUES} values, with what aliases repeat; write less"
        _report(file, (), 1, message)
    except RecursionError:
        _report(file, (), 1, "nested too deeply to be read; a configuration needs four levels")
    return file


def dotted(path: Path) -> str:
    """`("prefer", 1)` -> "prefer[1]", `("verify", "level")` -> "verify.level"."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) and text else f".{part}" if text else str(part)
    return text


def _report(file: YamlFile, path: Path, line: int, message: str) -> None:
    file.problems.append(Problem(file.source, line, dotted(path), message))


def _value(file: YamlFile, node: yaml.Node, path: Path, above: tuple[yaml.Node, ...]) -> Any:
    line = node.start_mark.line + 1
    if len(file.lines) > _MOST_VALUES:
        raise _TooMany
    if node in above:  # an alias to what holds it: YAML allows the loop, a configuration has no use for it
        _report(file, path, line, f"{dotted(path)} contains itself through an alias; write it out")
        return None
    if isinstance(node, yaml.ScalarNode):
        return _scalar(file, node, path)
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        items = []
        for index, item in enumerate(node.value):
            here, item_line = (*path, index), item.start_mark.line + 1
            file.lines[here] = (item_line, item_line)
            items.append(_value(file, item, here, (*above, node)))
        return items
    if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key_line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                _report(file, path, key_line, "a list or mapping is used as a key; expected a word")
                continue
            key = _scalar(file, key_node, path)
            here = (*path, key)
            if key in mapping:
                first = file.lines[here][0]
                _report(
                    file,
                    here,
                    key_line,
                    f"key {dotted(here)!r} is given twice, first in line {first}; remove one",
                )
                continue
            file.lines[here] = (key_line, value_node.start_mark.line + 1)
            mapping[key] = _value(file, value_node, here, (*above, node))
        return mapping
    _report(file, path, line, f"tag {node.tag!r} is not supported; write plain values")
    return None


def _scalar(file: YamlFile, node: yaml.ScalarNode, path: Path) -> Any:
    kind, text = node.tag.removeprefix(_TAG), node.value
    try:
        if kind == "str":
            return text
        if kind == "null":
            return None
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        if kind == "int":
            return int(text, 8 if "0o" in text else 16 if "0x" in text else 10)
        if kind == "float":
            return float(re.sub(r"^([-+]?)\.(inf|nan)$", r"\1\2", text.lower()))
    except (ValueError, KeyError):
        _report(
            file,
            path,
            node.start_mark.line + 1,
            f"{text[:40]!r} can't be read as {kind}; correct or quote it",
        )
        return None
    _report(file, path, node.start_mark.line + 1, f"tag {node.tag!r} is not supported; write plain values")
    return text
