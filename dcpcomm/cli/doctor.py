"""`dcpcomm doctor`: everything that somebody who looks into a bug asks for, in one text."""

from __future__ import annotations

import io
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcpcomm.cli.terminal import check_file

if TYPE_CHECKING:
    from dcpcomm.probe import Probed

__all__ = ["doctor", "report"]

_WIDTH = 110


def doctor(
    config: Annotated[Path | None, typer.Option(help="Configuration file; default DCPCOMM_CONFIG, else auto.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write it to this file; default: standard output.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """One report to paste into a bug: the machine, the configuration, the environment, the last decision.

    Of the environment only variables that matter to merges are shown; what sounds like a secret is left out, there and
    wherever else it stands. The host's name isn't told. Read it before you send it.
    """
    from dcpcomm.privacy import scrubbed

    check_file("--output", output)
    facts, probed = _gathered(config)
    if as_json:
        text = json.dumps(_each_text(facts), indent=2) + "\n"
    else:
        text = scrubbed(report(facts, probed), os.environ)
    if output is None:
        print(text, end="")
    else:
        output.write_text(text, encoding="utf-8")
        print(f"written to {output}", file=sys.stderr)


def _each_text(value: Any) -> Any:
    """Scrubbed text by text: JSON writes some characters otherwise, and a secret that has one would not be found."""
    from dcpcomm.privacy import scrubbed

    if isinstance(value, dict):
        return {key: _each_text(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_each_text(one) for one in value]
    return scrubbed(value, os.environ) if isinstance(value, str) else value


def _gathered(config: Path | None) -> tuple[dict[str, Any], Probed]:
    """The report as plain data, without secrets under their names, and what was probed."""
    from dcpcomm.config import load_config
    from dcpcomm.errors import ConfigError
    from dcpcomm.explain import last_decision
    from dcpcomm.privacy import settings, without_secrets
    from dcpcomm.probe import probe

    wrong, given = "", None
    try:
        given = load_config(config)
    except ConfigError as error:  # this may be the bug
        wrong = str(error)
    try:
        probed = probe(config=given)
    except ConfigError as error:  # of a cost table, or two plug-ins that claim one name
        wrong = wrong or str(error)
        try:
            probed = probe()
        except ConfigError:
            probed = probe(transports=False)
    shown = {} if given is None else without_secrets(given.model_dump(mode="json", exclude_unset=True))
    machine = probed.as_dict()
    machine["machine"].pop("host")  # which host it is, is nobody's business
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        **machine,
        "config": shown,
        "config_error": wrong,
        "environment": settings(os.environ),
        "last_decision": last_decision(),
    }, probed


def report(facts: dict[str, Any], probed: Probed) -> str:
    """The text, as wide as it needs to be for pasting, without colours."""
    from rich.console import Console

    from dcpcomm.cli.probe import print_probed

    out = io.StringIO()
    out.write(f"dcpcomm doctor, {facts['when']}, {facts['system']}\n\n")
    print_probed(probed, Console(file=out, width=_WIDTH, no_color=True, highlight=False, force_terminal=False))
    out.write("\nconfiguration (what differs from auto)\n")
    if facts["config_error"]:
        out.write(_indented(f"WRONG: {facts['config_error']}"))
    import yaml

    out.write(_indented(yaml.safe_dump(facts["config"], sort_keys=False) if facts["config"] else "nothing is set"))
    out.write("\nenvironment (what matters to merges)\n")
    said = "\n".join(f"{name}={value}" for name, value in facts["environment"].items())
    out.write(_indented(said or "nothing is set"))
    out.write("\nlast decision of this user on this machine\n")
    out.write(_indented(facts["last_decision"] or "none is kept"))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.rstrip().splitlines())
