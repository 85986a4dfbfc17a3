"""A plug-in that pip really installed: found, judged, listed, configured, and carrying a merge.

Each in a process of its own, as a user would see it. tests/test_registry.py covers the registry from within.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.nursery import Nursery
from tests.plugin import BROKEN, OLD, RING, TWIN, build_and_install


@dataclass
class Done:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Machine:
    """A machine with some distributions installed; the environment's own settings are left out of it."""

    def __init__(self, nursery: Nursery, *sites: Path) -> None:
        self.nursery = nursery
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("DCPCOMM_")}
        self.environment["PYTHONPATH"] = os.pathsep.join(map(str, sites))

    def run(self, *command: str, **variables: str) -> Done:
        done = self.nursery.python(*command, environment={**self.environment, **variables}).wait()
        return Done(done.returncode, done.stdout, done.stderr)

    def dcpcomm(self, *arguments: str, **variables: str) -> Done:
        return self.run("-m", "dcpcomm", *arguments, **variables)

    def listed(self, **variables: str) -> dict[str, Any]:
        """`dcpcomm list --json`, by name."""
        done = self.dcpcomm("list", "--json", **variables)
        assert done.status == 0, done.err
        return {row["name"]: row for row in done.json}


Machines = Callable[..., Machine]


@pytest.fixture
def machine(nursery: Nursery) -> Machines:
    return partial(Machine, nursery)


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`acme-transports`: one transport that works, one of another API, one that fails to import."""
    return build_and_install(
        tmp_path_factory.mktemp("acme"),
        "acme-transports",
        "1.2",
        {"ring": "acme_ring:Ring", "old": "acme_old:Old", "broken": "acme_broken:Broken"},
        {"acme_ring": RING, "acme_old": OLD, "acme_broken": BROKEN},
    )


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`acme-twin`: another distribution that claims the name `ring`."""
    work = tmp_path_factory.mktemp("twin")
    return build_and_install(work, "acme-twin", "3.1", {"ring": "acme_twin:Twin"}, {"acme_twin": TWIN})


def test_list_says_what_works_and_what_to_change(machine: Machines, acme: Path) -> None:
    rows = machine(acme).listed()
    assert {"gloo_a2a", "loopback", "ring", "old", "broken"} <= rows.keys()
    assert all(rows[name]["installed"] for name in ("gloo_a2a", "loopback", "ring"))
    assert all(rows[name]["from"] == "acme-transports 1.2" for name in ("ring", "old", "broken"))
    old, broken = rows["old"], rows["broken"]
    assert not old["installed"]
    assert "acme_old:Old has api_version 99; this dcpcomm expects 1" in old["reason"]
    assert "install a release of acme-transports" in old["remedy"]
    assert "port it" in old["remedy"]
    assert not broken["installed"]
    assert "acme_driver" in broken["reason"]
    assert "acme-transports" in broken["remedy"]


def test_the_allow_list_keeps_a_plug_in_from_being_imported(machine: Machines, acme: Path) -> None:
    allowed = "acme, gloo_a2a"
    done = machine(acme).dcpcomm("list", "--json", DCPCOMM_PLUGINS=allowed, ACME_TRACE="1")
    rows = {row["name"]: row for row in done.json}
    assert done.status == 0
    assert "acme_ring is imported" not in done.err
    assert rows["ring"]["blocked"]
    assert not rows["ring"]["installed"]
    assert f"DCPCOMM_PLUGINS={allowed!r}" in rows["ring"]["reason"]
    assert rows["gloo_a2a"]["installed"]


@pytest.mark.parametrize("allowed", ["Acme_Transports, x", "ring"])
def test_the_allow_list_allows_by_distribution_or_transport(machine: Machines, acme: Path, allowed: str) -> None:
    done = machine(acme).dcpcomm("list", "--json", DCPCOMM_PLUGINS=allowed, ACME_TRACE="1")
    assert "acme_ring is imported" in done.err
    rows = {row["name"]: row for row in done.json}
    assert rows["ring"]["installed"]
    assert rows["old"]["blocked"] == (allowed == "ring")


def test_two_plug_ins_of_one_name_are_both_named(machine: Machines, acme: Path, twin: Path) -> None:
    both = machine(acme, twin)
    done = both.dcpcomm("list", "--json")
    assert done.status == 2
    assert done.out == ""
    for expected in ("'ring'", "acme-transports 1.2", "acme-twin 3.1", "uninstall one of them", "DCPCOMM_PLUGINS"):
        assert expected in done.err
    assert "Traceback" not in done.err
    assert both.listed(DCPCOMM_PLUGINS="acme-twin")["ring"]["from"] == "acme-twin 3.1"
    report = both.dcpcomm("doctor")  # whoever has this bug wants to report it
    assert report.status == 0
    for expected in ("WRONG", "acme-transports 1.2", "acme-twin 3.1", "torch"):
        assert expected in report.out


def test_options_are_checked_by_the_plug_in_and_placed_in_the_file(
    machine: Machines, acme: Path, tmp_path: Path
) -> None:
    file = tmp_path / "ring.yaml"
    file.write_text("transport: ring\noptions:\n  ring:\n    pause_s: -1\n    bloks: 2\n")
    done = machine(acme).dcpcomm("config", "check", str(file))
    assert done.status == 1
    below, misspelt = sorted(done.err.splitlines())
    assert below.startswith(f"{file}:4: options.ring.pause_s")
    assert "greater than or equal to 0" in below
    assert misspelt.startswith(f"{file}:5: ")
    assert "options.ring.bloks" in misspelt
    assert "'blocks'" in misspelt

    file.write_text("transport: ring\noptions: {ring: {blocks: 2}, broken: {any: 1}}\n")
    done = machine(acme).dcpcomm("config", "check", str(file), "--json")
    assert done.status == 0
    assert done.json["config"]["options"]["ring"] == {"blocks": 2}
    assert any("options.broken" in note and "acme_driver" in note for note in done.json["notes"])


def test_options_are_in_the_schema(machine: Machines, acme: Path) -> None:
    schema = machine(acme).dcpcomm("config", "schema").json["properties"]
    options = schema["options"]["properties"]
    assert options["ring"]["properties"]["pause_s"]["default"] == 0.0005
    assert options["ring"]["properties"]["pause_s"]["description"] == "between two looks into the store"
    assert options["ring"]["additionalProperties"] is False
    assert "acme_driver" in options["broken"]["description"]
    assert {"auto", "ring", "old", "broken", "gloo_a2a"} <= set(schema["transport"]["enum"])


_MERGE = """
import json, sys

import torch
import torch.distributed as dist

import dcpcomm
from dcpcomm.launch import run_on_ranks

N, B, H, D = 2, 7, 4, 32


def rank(config):
    generator = torch.Generator().manual_seed(11)
    outs, lses = torch.randn(N, B, H, D, generator=generator), torch.randn(N, B, H, generator=generator)
    shape = dcpcomm.MergeShape(max_tokens=8, num_heads=H, head_dim=D, dtype=torch.float32, lse_base="e")
    want = dcpcomm.reference.merge_partials(outs, lses, lse_base="e")[0][dist.get_rank()]
    with dcpcomm.DCPMerger(None, shape, config) as merger:
        worst = max(
            (merger.merge(outs[dist.get_rank()], lses[dist.get_rank()]).double() - want).abs().max().item()
            for _ in range(3)
        )
        return worst, merger.explain()


if __name__ == "__main__":
    print(json.dumps(run_on_ranks(rank, N, json.loads(sys.argv[1]))))
"""


def merged(machine: Machine, tmp_path: Path, config: dict[str, Any]) -> list[str]:
    """Merge among two processes; what `explain` said on each."""
    script = tmp_path / "merge.py"
    script.write_text(_MERGE)
    config = {"verify": {"level": "quick", "deadline_s": 20}, "watchdog": {"timeout_s": 20}, **config}
    done = machine.run(str(script), json.dumps(config))
    assert done.status == 0, done.err
    assert all(worst < 1e-5 for worst, _ in done.json)
    return [explained for _, explained in done.json]


def test_the_plug_in_carries_a_merge_and_its_faulty_neighbours_are_reasons(
    machine: Machines, acme: Path, tmp_path: Path
) -> None:
    explained = merged(machine(acme), tmp_path, {"prefer": ["ring"], "options": {"ring": {"blocks": 3}}})
    for text in explained:
        lines = text.splitlines()
        (used,) = (line for line in lines if "in use" in line)
        assert "ring" in used
        (old,) = (line for line in lines if line.strip().startswith("old"))
        assert "import" in old
        assert "api_version 99" in old
        (broken,) = (line for line in lines if line.strip().startswith("broken"))
        assert "import" in broken
        assert "acme_driver" in broken


def test_a_plug_in_that_fails_to_import_falls_back_when_asked_to(machine: Machines, acme: Path, tmp_path: Path) -> None:
    config = {"transport": "broken", "on_unavailable": "fallback", "prefer": ["gloo_a2a"]}
    for text in merged(machine(acme), tmp_path, config):
        assert "acme_driver" in text
        (used,) = (line for line in text.splitlines() if "in use" in line)
        assert "gloo_a2a" in used
