"""Agreement among processes: installations that really differ between ranks, and a rank whose process really ends."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcpcomm
from dcpcomm.backends.gloo_a2a import GlooA2A
from dcpcomm.launch import LocalRanks, RankFailed
from dcpcomm.registry import unregister_transport
from dcpcomm.testing import Fault, faulty
from tests.agreement import merges_right
from tests.world import ProcessPool, Raised, World, outcome, rank_of, shape_of, size_of

DEADLINE_S = 1.0
SLACK_S = 5.0


class Installed(GlooA2A):
    """A transport of a third party, on the ranks where its import works."""

    name = "installed"


def _settings(**changes: Any) -> dict[str, Any]:
    return {"verify": {"level": "quick", "deadline_s": 10}, "watchdog": {"timeout_s": 10}, **changes}


def _construct(group: Any, config: dict[str, Any]) -> Any:
    shape = shape_of(dist.get_world_size() if group is None else size_of(group), dtype=torch.float32)
    with dcpcomm.DCPMerger(group, shape, config) as merger:
        return merger.transports, merges_right(merger), merger.explain()


def import_that_fails_on_one(group: Any, culprit: int, target: str) -> Any:
    here = rank_of(group) == culprit
    dcpcomm.register_transport("installed", target if here else f"{__name__}:Installed")
    try:
        prefer = _settings(prefer=["installed", "gloo_a2a"])
        return _construct(group, prefer), outcome(_construct, group, _settings(transport="installed"))
    finally:
        unregister_transport("installed")


@pytest.mark.parametrize(("culprit", "target"), [(0, "acme_gone:Gone"), (2, f"{__name__}:NotThere")])
def test_an_import_that_fails_on_one_rank(pool: ProcessPool, culprit: int, target: str) -> None:
    results = World("gloo_a2a", 3, pool).run(import_that_fails_on_one, culprit, target, fresh=True)
    for (transports, right, explained), named in results:
        assert transports == ["gloo_a2a"]
        assert right
        (line,) = (line for line in explained.splitlines() if line.strip().startswith("installed:"))
        assert f"fell at import on rank {culprit}" in line
        assert target.partition(":")[0 if culprit == 0 else 2] in line
        assert isinstance(named, Raised)
        assert "TransportUnavailable" in named.kinds
        assert named.names(f"rank {culprit}", "import")


def registered_on_one(group: Any, only: int) -> Any:
    if rank_of(group) == only:
        dcpcomm.register_transport("installed", Installed)
    try:
        return _construct(group, _settings()), outcome(_construct, group, _settings(prefer=["installed"]))
    finally:
        unregister_transport("installed")


def test_a_plug_in_that_only_one_rank_has(pool: ProcessPool) -> None:
    results = World("gloo_a2a", 3, pool).run(registered_on_one, 1, fresh=True)
    for rank, ((transports, right, explained), preferred) in enumerate(results):
        assert transports == ["gloo_a2a"]
        assert right
        (line,) = (line for line in explained.splitlines() if line.strip().startswith("installed:"))
        assert "fell at import on rank 0" in line
        # Preferring it is a wrong configuration on the ranks that don't know it.
        assert isinstance(preferred, Raised)
        assert ("ConfigError" if rank != 1 else "SelectionMismatch") in preferred.kinds
        assert "installed" in preferred.text


def different_environment(group: Any) -> Any:
    os.environ["DCPCOMM_PLUGINS"] = "acme" if rank_of(group) == 2 else ""
    try:
        return outcome(_construct, group, _settings())
    finally:
        del os.environ["DCPCOMM_PLUGINS"]


def test_an_environment_that_differs_is_named(pool: ProcessPool) -> None:
    for raised in World("gloo_a2a", 3, pool).run(different_environment, fresh=True):
        assert "SelectionMismatch" in raised.kinds, raised.trace
        (line,) = (line for line in raised.text.splitlines() if "DCPCOMM_PLUGINS" in line)
        assert "rank 2: acme" in line


# ---------------------------------------------------------------- a process that ends


def one_process_ends(culprit: int, stage: str, folder: str) -> None:
    _construct(None, _settings())  # imports come before the clock starts
    call = 1 if stage == "exchange" else None
    cls = faulty(GlooA2A, Fault("die", rank=culprit, stage=stage, call=call), name="deadly")  # type: ignore[arg-type]
    dcpcomm.register_transport("deadly", cls)
    config = {
        "transport": "deadly",
        "verify": {"level": "quick", "deadline_s": DEADLINE_S},
        "watchdog": {"timeout_s": DEADLINE_S},
    }
    dist.barrier()
    started = time.monotonic()
    try:
        _construct(None, config)
        said = {"kind": "none"}
    except dcpcomm.DCPCommError as error:
        said = {"kind": type(error).__name__, "text": str(error), "ranks": getattr(error, "ranks", ())}
    said["seconds"] = time.monotonic() - started
    # Not returned: the parent ends the others as soon as one process has ended.
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(said))


@pytest.mark.parametrize(("culprit", "stage"), [(0, "connect"), (2, "exchange")])
def test_a_process_that_ends_is_named_by_the_others_in_time(tmp_path: Path, culprit: int, stage: str) -> None:
    with LocalRanks(3) as ranks, pytest.raises(RankFailed, match=rf"rank {culprit} ended with status 1"):
        ranks.run(one_process_ends, culprit, stage, str(tmp_path))
    for rank in range(3):
        file = tmp_path / f"{rank}.json"
        if rank == culprit:
            assert not file.exists()
            continue
        said = json.loads(file.read_text())
        assert said["kind"] == "TransportTimeout", said
        assert said["ranks"] == [culprit], said
        assert f"rank {culprit}" in said["text"].partition(": ")[2]
        assert said["seconds"] < DEADLINE_S + SLACK_S, said
