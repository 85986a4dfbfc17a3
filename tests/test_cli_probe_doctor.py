"""`dcpcomm probe` and `dcpcomm doctor` as a user runs them, and that no secret gets into a report."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from rich.console import Console

from dcpcomm import privacy, registry, rights
from dcpcomm.backends import cupy_ipc
from dcpcomm.cli.probe import print_probed
from dcpcomm.config import MergeConfig
from dcpcomm.libraries import Library
from dcpcomm.machine import Machine
from dcpcomm.probe import Probed, facts_of, verdicts_on
from dcpcomm.rights import Right
from tests.machines import MACHINES
from tests.nursery import Nursery

Command = Callable[..., str]


@pytest.fixture
def dcpcomm(nursery: Nursery, tmp_path: Path) -> Command:
    def run(*words: str, status: int = 0, columns: int = 80, **more: str) -> str:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DCPCOMM_")}
        environment = {
            **kept,
            "COLUMNS": str(columns),
            "DCPCOMM_CACHE_DIR": str(tmp_path),
            "HOME": "/home/someone",
            **more,
        }
        done = nursery.python("-m", "dcpcomm", *words, environment=environment).wait()
        assert done.returncode == status, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr if status else done.stdout

    return run


def test_probe_says_what_is_here_without_a_gpu(dcpcomm: Command) -> None:
    found = json.loads(dcpcomm("probe", "--device", "cpu", "--json"))
    verdicts = {one["name"]: one for one in found["transports"]}
    assert set(verdicts) == set(registry.registered_transports())
    assert verdicts["gloo_a2a"]["verdict"] == "yes"
    for name in ("nccl_a2a", "cupy_ipc"):
        assert (verdicts[name]["verdict"], verdicts[name]["stage"]) == ("no", "declared")
    assert "works on cuda" in verdicts["nccl_a2a"]["reason"]
    assert verdicts["loopback"]["remedy"], "a reason comes with what to do"
    assert {"torch", "NCCL", "dcpcomm"} <= {one["name"] for one in found["libraries"]}
    assert {"shared memory", "descriptors over a socket"} <= {one["name"] for one in found["rights"]}
    assert Machine.from_dict(found["machine"]).device.startswith("cpu ")
    assert "--device is 'gpu'" in dcpcomm("probe", "--device", "gpu", status=2)


@pytest.mark.parametrize("columns", [80, 120])
def test_probe_fits_its_terminal(dcpcomm: Command, columns: int) -> None:
    said = dcpcomm("probe", "--device", "cpu", columns=columns)
    assert max(map(len, said.splitlines())) <= columns
    assert re.search(r"gloo_a2a +yes", said)
    assert "dcpcomm tune" in said


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_can_be_shown_and_read_at_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(cupy_ipc, "runtime", lambda: None)
    machine = MACHINES[name]
    gpus = tuple(gpu.uuid for gpu in machine.gpus)
    size, device = max(2, len(gpus)), "cuda" if gpus else "cpu"
    verdicts = tuple(verdicts_on(facts_of(machine, gpus, size, device), MergeConfig()))
    found = Probed(
        machine, gpus[::-1], size, device, (Library("torch", "2"),), (Right("x", None, "[seen]"),), verdicts, ()
    )
    out = io.StringIO()
    print_probed(found, Console(file=out, width=80, highlight=False))
    said = out.getvalue()
    assert max(map(len, said.splitlines())) <= 80
    for gpu in machine.gpus:
        assert gpu.name in said
        assert gpu.uuid in said
    assert said.count("no peer access:") == sum(pair.access is False for pair in machine.pairs)
    if name == "4xPCIe":
        assert "PHB!" in said
        assert "GPU 2 and GPU 3: no peer access: the chipset doesn't support it" in said
    if name == "4xGB200":
        assert "completed" in said
    assert "[seen]" in said, "what rich would take for markup"


def test_what_only_lacks_proof_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_ipc, "runtime", lambda: None)
    cls = cupy_ipc.CupyIpc
    machine = MACHINES["2xH200"]
    facts = facts_of(machine, [gpu.uuid for gpu in machine.gpus], 2, "cuda")
    for places, verdict in ((("sm_90",), "yes"), (("sm_100",), "if named")):
        monkeypatch.setattr(cls, "capabilities", replace(cls.capabilities, proven_on=places))
        (one,) = (one for one in verdicts_on(facts, MergeConfig()) if one.name == "cupy_ipc")
        assert one.verdict == verdict
    cut = facts_of(MACHINES["4xPCIe"], [gpu.uuid for gpu in MACHINES["4xPCIe"].gpus], 4, "cuda")
    (one,) = (one for one in verdicts_on(cut, MergeConfig()) if one.name == "cupy_ipc")
    assert one.verdict == "no", "naming it would not help"


# ---------------------------------------------------------------- doctor

SECRETS = {
    "VLLM_API_KEY": 'correct-"horse"-battery',
    "NCCL_AUTH_TOKEN": "staple1234",
    "HF_TOKEN": "hf_" + "a1B2" * 6,
    "AWS_SECRET_ACCESS_KEY": "deadbeefdeadbeef",
}


def test_doctor_has_machine_config_environment_and_the_last_decision(dcpcomm: Command, tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("prefer: [gloo_a2a]\nwatchdog: {timeout_s: 77}\n")
    dcpcomm("explain", "--device", "cpu", "--max-tokens", "2", "--num-heads", "2", "--head-dim", "16")
    said = dcpcomm("doctor", "--config", str(config), NCCL_DEBUG="INFO", UNRELATED="not this")
    for part in (
        "timeout_s: 77",
        "NCCL_DEBUG=INFO",
        "transport: gloo_a2a   (decided by rank 0",
        "shared memory",
        "torch",
    ):
        assert part in said
    assert "UNRELATED" not in said
    assert max(map(len, said.split("configuration (")[0].splitlines())) <= 110
    found = json.loads(dcpcomm("doctor", "--json"))
    assert "gloo_a2a" in found["last_decision"]
    assert found["config"] == {}
    file = tmp_path / "report.txt"
    dcpcomm("doctor", "--output", str(file))
    assert "last decision" in file.read_text()


def test_no_secret_gets_into_a_report(dcpcomm: Command, tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("transport: gloo_a2a\n")
    (tmp_path / "last_decision.txt").write_text(
        f"a plug-in said {SECRETS['AWS_SECRET_ACCESS_KEY']} {SECRETS['VLLM_API_KEY']}\n"
    )
    more = {**SECRETS, "NCCL_NET": "https://me:pass-w0rd@proxy/x", "VLLM_CACHE_ROOT": "/home/someone/cache"}
    for words in (("doctor",), ("doctor", "--json")):
        said = dcpcomm(*words, "--config", str(config), **more)
        for name, secret in SECRETS.items():
            assert secret not in said, name
            assert json.dumps(secret)[1:-1] not in said, name
        assert "pass-w0rd" not in said
        assert "VLLM_API_KEY" in said, "that it is set may matter"
        assert "HF_TOKEN" not in said
        assert "/home/someone" not in said
        assert "~/cache" in said
        assert os.uname().nodename not in said.replace("localhost", "") or len(os.uname().nodename) < 4


def test_a_wrong_configuration_is_reported_and_stops_no_report(dcpcomm: Command, tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("prefr: [gloo_a2a]\n")
    said = dcpcomm("doctor", "--config", str(config))
    assert "WRONG: " in said
    assert "'prefr' is not known; did you mean 'prefer'?" in said
    assert re.search(r"gloo_a2a +yes", said)
    table = tmp_path / "table.yaml"
    table.write_text("merges: 3\n")
    config.write_text("cost_table: table.yaml\n")
    assert "table.yaml:1" in dcpcomm("doctor", "--config", str(config))


def test_secrets_of_options_are_left_out_at_any_depth() -> None:
    values = {"options": {"x": {"api_key": "k", "deep": [{"Password": "p", "port": 1}]}}, "author": "a"}
    shown = privacy.without_secrets(values)
    assert shown["options"]["x"]["api_key"] == privacy.HIDDEN
    assert shown["options"]["x"]["deep"] == [{"Password": privacy.HIDDEN, "port": 1}]


@pytest.mark.parametrize(
    ("came", "shown"),
    [
        ("https://me:p@ss@host/x", "https://(left out)@host/x"),
        ("https://me:pa/ss@host/x", "https://(left out)@host/x"),
        ("redis://:word@host", "redis://(left out)@host"),
        ("https://host/x?token=abcdef&y=1", "https://host/x?token=(left out)&y=1"),
        ("https://host/x?y=1&X-Amz-Signature=abcdef#z", "https://host/x?y=1&X-Amz-Signature=(left out)#z"),
        ("https://host/x?sig=abcdef", "https://host/x?sig=(left out)"),
        ("https://host/x?y=1 mail me@home", "https://host/x?y=1 mail me@home"),
    ],
)
def test_no_secret_of_a_url_is_shown(came: str, shown: str) -> None:
    assert privacy.scrubbed(f"from {came} on", {}) == f"from {shown} on"


@pytest.mark.parametrize(
    ("came", "shown"),
    [
        ("Authorization: Bearer abc123", "Authorization: Bearer (left out)"),
        ("curl -H 'authorization: basic abc=='", "curl -H 'authorization: basic (left out)'"),
        ("run --password x --tokens 32", "run --password (left out) --tokens 32"),
        ("run --hf-token=x --ranks 2", "run --hf-token=(left out) --ranks 2"),
        ("{'api_key': 'x', 'rows': 3}", "{'api_key': '(left out)', 'rows': 3}"),
        ("token: x; db_passwd=y z", "token: (left out); db_passwd=(left out) z"),
        ("got bearer abc", "got bearer (left out)"),
        ("max_tokens: 64, 256 tokens, max_tokens=8", "max_tokens: 64, 256 tokens, max_tokens=8"),
        ("token: (left out)", "token: (left out)"),
    ],
)
def test_no_secret_that_a_word_announces_is_shown(came: str, shown: str) -> None:
    assert privacy.scrubbed(came, {}) == shown


def test_short_values_and_paths_are_no_secrets_that_would_be_cut_out_everywhere(tmp_path: Path) -> None:
    environ = {"X_TOKEN": "1", "SSH_AUTH_SOCK": str(tmp_path), "PWD": str(tmp_path), "HOME": "/"}
    assert privacy.scrubbed(f"rank 1 at {tmp_path}", environ) == f"rank 1 at {tmp_path}"


# ---------------------------------------------------------------- rights


def test_rights_that_are_refused_are_told_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rights, "_SHM", tmp_path / "nowhere")
    assert rights._shared_memory().ok is False
    monkeypatch.setattr(rights, "_SHM", tmp_path)
    monkeypatch.setattr(rights, "_LITTLE_SHM", 1 << 62)
    little = rights._shared_memory()
    assert little.ok is False
    assert "--shm-size" in little.remedy
    monkeypatch.setattr(rights, "_TAKE", rights._TAKE.replace("438", "-1"))  # no such call, as under seccomp
    traced = rights._tracing()
    assert traced.ok is False
    assert "refused to a sibling: " in traced.said
    assert "SYS_PTRACE" in traced.remedy
    monkeypatch.setattr(rights, "_TAKE", "raise OSError('no pidfd here')")
    unknown = rights._tracing()
    assert unknown.ok is None
    assert "no pidfd here" in unknown.said


def test_a_descriptor_is_really_passed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert rights._descriptors().ok
    assert len(os.listdir("/proc/self/fd")) == before, "none is left open"
