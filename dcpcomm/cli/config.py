"""`dcpcomm config`: judge a configuration file before a cluster does, and describe one to an editor."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(help="Check a configuration file, or print the schema.", no_args_is_help=True, add_completion=False)


@app.command()
def check(
    file: Annotated[str, typer.Argument(help="A YAML file, or the name of one that dcpcomm ships.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")] = False,
) -> None:
    """Say all that is wrong with a configuration file. The environment is left out of it.

    Exit status: 0 nothing, 1 something, 2 there is no such file.
    """
    from dcpcomm.config import read_config

    reading = read_config(file, {})
    if as_json:
        report = {
            "file": reading.source,
            "ok": reading.config is not None,
            "problems": [dataclasses.asdict(problem) for problem in reading.problems],
            "notes": reading.notes,
            "config": None if reading.config is None else reading.config.model_dump(mode="json"),
        }
        print(json.dumps(report, indent=2))
    else:
        for problem in reading.problems:
            print(problem, file=sys.stderr)
        for note in reading.notes:
            print(f"{reading.source}: note: {note}", file=sys.stderr)
        if reading.config is not None:
            print(f"{reading.source}: nothing wrong")
    if reading.problems:
        raise typer.Exit(1)


@app.command()
def schema() -> None:
    """Print the JSON schema of a configuration file, with the options of the transports installed here."""
    from dcpcomm.config import config_schema

    print(json.dumps(config_schema(), indent=2))
