"""The command line: `dcpcomm COMMAND`, and `python -m dcpcomm COMMAND`.

One file per command, imported when that command runs: `dcpcomm list --help` must not wait for torch, and a
command that can't be imported must not take the others along.

Exit status: 0 fine, 1 a check failed, 2 wrong usage (a wrong configuration is one).
"""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dcpcomm.errors import ConfigError, DCPCommError

__all__ = ["COMMANDS", "app", "main"]

#: Command -> where it lives, and its line in `dcpcomm --help`. A function is one command, a Typer a group.
COMMANDS = {
    "demo": ("dcpcomm.cli.demo:demo", "Decode with a small model across local processes."),
    "list": (
        "dcpcomm.cli.list:list_transports",
        "Registered transports, where each came from, installed or not.",
    ),
    "probe": ("dcpcomm.cli.probe:probe", "What this machine offers: GPUs, links, libraries, transports."),
    "explain": ("dcpcomm.cli.explain:explain", "What would be chosen for a shape and a configuration, and why."),
    "verify": ("dcpcomm.cli.verify:verify", "Prove one or all transports on this machine."),
    "bench": ("dcpcomm.cli.bench:bench", "Time merges over a sweep: checked, against the limit and rivals."),
    "tune": ("dcpcomm.cli.tune:tune", "Measure this machine, and write its cost table."),
    "conformance": ("dcpcomm.cli.conformance:conformance", "Run the conformance suite on a transport."),
    "workspace": (
        "dcpcomm.cli.workspace:workspace",
        "Bytes for the TRT-LLM sparse-MLA workspace at a DCP decode shape.",
    ),
    "doctor": ("dcpcomm.cli.doctor:doctor", "One report to paste into a bug."),
    "config": ("dcpcomm.cli.config:app", "Check a configuration file, or print the schema."),
}


#: What a write raises that can't go on: a reader that has gone, a full disk.
_NO_MORE_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _LazyGroup(TyperGroup):
    """Knows the commands by name, and imports the one that runs."""

    _listing = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands = {name: _command(name, _placeholder) for name in COMMANDS}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if self._listing or cmd_name not in COMMANDS:
            return self.commands.get(cmd_name)
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        return _command(cmd_name, getattr(importlib.import_module(module), attribute))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True  # the help of the group needs one line of each command, which COMMANDS has
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


def _command(name: str, what: Any) -> Any:
    group = what if isinstance(what, typer.Typer) else typer.Typer(add_completion=False)
    if group is not what:
        group.command(name, help=COMMANDS[name][1] if what is _placeholder else None)(what)
    command = typer.main.get_command(group)
    command.name = name
    return command


def _placeholder() -> None:
    pass


app = typer.Typer(
    cls=_LazyGroup,
    help="Merge decode-context-parallel attention partials across GPUs, over any transport.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        print(f"dcpcomm {importlib.metadata.version('dcpcomm')}")
        raise typer.Exit


@app.callback()
def _dcpcomm(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    # Without a callback Typer would take a group of one command for that command.
    pass


def main() -> None:
    """Run the command in `sys.argv`, and exit with its status."""
    try:
        try:
            app(prog_name="dcpcomm")
        finally:
            sys.stdout.flush()  # while what it raises can still be told
    except OSError as error:
        if error.errno not in _NO_MORE_OUTPUT:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more when it ends
        if error.errno != errno.EPIPE:
            print(f"dcpcomm: the output could not be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)
    except DCPCommError as error:
        if os.environ.get("DCPCOMM_LOG", "").lower() == "debug":
            raise
        print(f"dcpcomm: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
