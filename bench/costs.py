"""From the results of `dcpcomm bench` to a cost table: the tables that come with dcpcomm are made by this.

    python -m dcpcomm.bench.costs bench/results/merge_h200x2.json bench/results/merge_h200x2_direct.json \\
        --write configs/costs/nvidia-h200-x2-nv18.yaml

Registered transports count, with their default options; rivals, and what was wrong, don't. Of several results for one
size the newest counts. All must be of one kind of machine, one size of group and the same versions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dcpcomm.bench.result import Result
from dcpcomm.costkey import CostKey
from dcpcomm.costtable import CostTable, MergeRow, dump
from dcpcomm.registry import registered_transports

__all__ = ["main", "table_of", "text_of"]

_HEAD = """\
# Made by: python -m dcpcomm.bench.costs {files}
# Don't edit: a test compares. What it was measured on is the key; `explain` calls it "measured elsewhere".
"""
_MATTER = ("torch", "cuda", "nccl")


def table_of(documents: Mapping[str, Mapping[str, Any]]) -> CostTable:
    """The table of some results.

    Args:
        documents: file's name -> what `dcpcomm bench --json` wrote there.

    Raises:
        ValueError: they aren't of one kind of machine, or of no processes with GPUs of their own.
    """
    newest_last = sorted(documents.items(), key=lambda item: str(item[1]["when"]))
    keys = [_key(name, document) for name, document in newest_last]
    if len({key.model_dump_json() for key in keys}) != 1:
        raise ValueError(f"the results are of different machines, groups or versions: {', '.join(map(str, keys))}")
    cells: dict[tuple[str, str], dict[int, MergeRow]] = {}
    known = registered_transports()
    for name, document in newest_last:
        for row in Result.of(document, name).rows:
            times, plain = row.times, row.projection == "none" and not row.empty and not row.skew_us
            if row.transport not in known or times is None or not plain:
                continue
            cells.setdefault((row.transport, row.dtype), {})[row.size] = MergeRow(
                wire_bytes=row.size, median_us=_figure(times.p50), mad_us=_figure(times.mad), n=times.count
            )
    merges: dict[str, dict[str, tuple[MergeRow, ...]]] = {}
    for (name, dtype), rows in sorted(cells.items()):
        merges.setdefault(name, {})[dtype] = tuple(rows[size] for size in sorted(rows))
    sources = tuple(f"{name} of {document['when']}, commit {document['commit']}" for name, document in newest_last)
    return CostTable(key=keys[0], sources=sources, merges=merges)


def text_of(files: Sequence[Path]) -> str:
    """The text of the table of some files of results."""
    documents = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in files}
    named = " ".join(f"bench/results/{file.name}" for file in files)
    return _HEAD.format(files=named) + dump(table_of(documents))


def _key(name: str, document: Mapping[str, Any]) -> CostKey:
    machine, groups = document["machine"], Result.of(document, name).groups
    if len(groups) != 1:
        raise ValueError(f"{name} is of {[group.count for group in groups]} ranks; expected one number of them")
    (group,) = groups
    if group.are != "processes" or not machine["link"]:
        raise ValueError(f"{name} is of {group.are}, link {machine['link']}; expected processes with a GPU each")
    return CostKey(
        device=" + ".join(sorted(set(machine["gpus"]))),
        ranks=group.count,
        link=machine["link"],
        driver=machine["driver"] or "",
        versions={part: document["versions"][part] for part in _MATTER if document["versions"].get(part)},
    )


def _figure(us: float) -> float:
    """Nanoseconds are more than a clock of half a microsecond is worth, over 20 merges."""
    return round(us, 3)


def main(
    results: Annotated[list[Path], typer.Argument(help="what `dcpcomm bench --json` wrote")],
    write: Annotated[Path | None, typer.Option("--write", help="the table's file; default: standard output")] = None,
) -> None:
    """Make a cost table of results."""
    try:
        text = text_of(results)
    except (OSError, ValueError, KeyError) as error:
        raise typer.BadParameter(str(error)) from None
    if write is None:
        print(text, end="")
    else:
        write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
