"""`dcpcomm list`, `dcpcomm config`: what they print, where, and with which exit status."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dcpcomm.cli
from dcpcomm.errors import TransportUnavailable
from tests.third_party import TRANSPORT, install


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("DCPCOMM_CONFIG", "DCPCOMM_TRANSPORT", "DCPCOMM_PLUGINS", "DCPCOMM_LOG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def dcpcomm_(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`dcpcomm_("list", "--json")` -> (exit status, standard output, standard error), in this process."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dcpcomm", *arguments])
        with pytest.raises(SystemExit) as ended:
            dcpcomm.cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_list_shows_where_each_came_from_and_why_not(
    dcpcomm_: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path,
        "acme-good",
        {"acme_good": "acme_good:Ring"},
        {"acme_good": TRANSPORT.format(name="acme_good")},
    )
    install(tmp_path, "acme-bad", {"acme_bad": "acme_bad:Ring"}, {"acme_bad": "import acme_driver  # [bold]"})
    monkeypatch.syspath_prepend(tmp_path)
    status, out, _ = dcpcomm_("list", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert status == 0
    assert rows["gloo_a2a"]["installed"]
    assert rows["acme_good"] == {
        "name": "acme_good",
        "target": "acme_good:Ring",
        "from": "acme-good 1.2",
        "installed": True,
        "blocked": False,
        "reason": "",
        "remedy": "",
    }
    assert "acme_driver" in rows["acme_bad"]["reason"]
    assert "install" in rows["acme_bad"]["remedy"]
    status, out, _ = dcpcomm_("list")
    assert status == 0
    for word in ("gloo_a2a", "loopback", "acme-bad 1.2", "acme_driver"):
        assert word in out
    monkeypatch.setenv("DCPCOMM_PLUGINS", "acme-bad")
    _, out, _ = dcpcomm_("list", "--json")
    blocked = {row["name"]: row for row in json.loads(out)}["acme_good"]
    assert blocked["blocked"]
    assert "DCPCOMM_PLUGINS" in blocked["reason"]


def test_config_check(dcpcomm_: Any, tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text("max_live: 1\n")
    status, out, err = dcpcomm_("config", "check", str(path))
    assert (status, out, err) == (0, f"{path}: nothing wrong\n", "")
    path.write_text("prefered: []\nmax_live: 0\n")
    status, out, err = dcpcomm_("config", "check", str(path))
    assert (status, out) == (1, "")
    assert [line.split(": ")[0] for line in err.splitlines()] == [f"{path}:1", f"{path}:2"]


def test_config_check_json(dcpcomm_: Any, tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text("verify: {levle: off}\n")
    status, out, _ = dcpcomm_("config", "check", str(path), "--json")
    report = json.loads(out)
    assert status == 1
    assert (report["ok"], report["config"]) == (False, None)
    assert (report["problems"][0]["line"], report["problems"][0]["key"]) == (1, "verify.levle")
    status, out, _ = dcpcomm_("config", "check", "auto", "--json")
    assert (status, json.loads(out)["config"]["transport"]) == (0, "auto")


def test_config_check_leaves_the_environment_out(
    dcpcomm_: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "node.yaml"
    path.write_text("transport: nope\n")
    monkeypatch.setenv("DCPCOMM_TRANSPORT", "gloo_a2a")
    assert dcpcomm_("config", "check", str(path))[0] == 1


def test_config_schema_is_json(dcpcomm_: Any) -> None:
    status, out, _ = dcpcomm_("config", "schema")
    assert status == 0
    assert "gloo_a2a" in json.loads(out)["properties"]["transport"]["enum"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["lst"], "no such command"),
        (["config", "chek"], "no such command"),
        (["config", "check"], "file"),
        (["list", "--jsn"], "--json"),
        (["config", "check", "nodes.yaml"], "did you mean 'node'"),
    ],
)
def test_wrong_usage_is_status_2(dcpcomm_: Any, arguments: list[str], expected: str) -> None:
    status, out, err = dcpcomm_(*arguments)
    assert (status, out) == (2, "")
    assert expected.lower() in err.lower()
    assert "Traceback" not in err


def test_our_errors_are_one_line_unless_debugging(dcpcomm_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise TransportUnavailable("no transport; install one")

    monkeypatch.setattr(importlib.import_module("dcpcomm.cli.list"), "list_transports", fail)
    assert dcpcomm_("list") == (1, "", "dcpcomm: no transport; install one\n")
    monkeypatch.setenv("DCPCOMM_LOG", "debug")
    monkeypatch.setattr(sys, "argv", ["dcpcomm", "list"])
    with pytest.raises(TransportUnavailable):
        dcpcomm.cli.main()


@pytest.mark.parametrize("arguments", [[], ["--help"], ["list", "--help"], ["config", "--help"]])
def test_help_waits_for_neither_torch_nor_another_command(arguments: list[str]) -> None:
    script = (
        "import sys, dcpcomm.cli\n"
        f"sys.argv = ['dcpcomm', *{arguments!r}]\n"
        "try: dcpcomm.cli.main()\n"
        "except SystemExit: pass\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'dcpcomm.cli.demo')))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


def test_module_and_installed_command_are_one() -> None:
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "dcpcomm", "config", "check", "cpu"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("cpu.yaml: nothing wrong\n")


@pytest.mark.parametrize("command", dcpcomm.cli.COMMANDS)
def test_every_command_can_be_imported_and_has_help(dcpcomm_: Any, command: str) -> None:
    module, _, attribute = dcpcomm.cli.COMMANDS[command][0].partition(":")
    assert getattr(importlib.import_module(module), attribute)
    status, out, _ = dcpcomm_(command, "--help")
    assert status == 0
    assert f"dcpcomm {command}" in out
