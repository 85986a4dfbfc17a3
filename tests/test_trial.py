"""Transports that may hang are connected and verified in child processes first; hazards.md rows 32 and 34."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcpcomm
from dcpcomm import trial
from dcpcomm.registry import unregister_transport
from tests.hanging import Hanging
from tests.world import Raised, World, meet, outcome, rank_of

DEADLINE_S = 2.0  # where it passes; where it must not, `PATIENCE_S`: the machine may be busy
PATIENCE_S = 20.0
MARK = "DCPCOMM_TEST_TRIAL_OF"


def constructs(group: Any, rank: int, fault: str, fallback: bool) -> Any:
    """What constructing led to, how long it took, and the children that it left."""
    os.environ[MARK] = str(os.getpid())  # children inherit it
    dcpcomm.register_transport("hanging", "tests.hanging:Hanging")
    config = {
        "transport": "hanging",
        "on_unavailable": "fallback" if fallback else "error",
        "verify": {"level": "quick", "deadline_s": DEADLINE_S if rank >= 0 and fault == "hang" else PATIENCE_S},
        "options": {"hanging": {"rank": rank, "fault": fault}},
    }
    shape = dcpcomm.MergeShape(max_tokens=4, num_heads=4, head_dim=32, dtype=torch.float32, lse_base="e")
    started = time.monotonic()
    made = outcome(dcpcomm.DCPMerger, group, shape, config)
    spent = time.monotonic() - started
    merged = explained = None
    if isinstance(made, dcpcomm.DCPMerger):
        generator = torch.Generator().manual_seed(7)
        outs = torch.randn(dist.get_world_size(group), 3, 4, 32, generator=generator)
        lses = torch.randn(dist.get_world_size(group), 3, 4, generator=generator)
        merged = made.merge(outs[rank_of(group)], lses[rank_of(group)])
        want = dcpcomm.reference.merge_partials(outs, lses, lse_base="e")[0][rank_of(group)]
        merged = float((merged - want).abs().max())
        explained = made.explain()
    meet()
    unregister_transport("hanging")
    if isinstance(made, dcpcomm.DCPMerger):
        made.close()
        made = made.transports
    return made, spent, merged, explained, _trial_processes()


def _trial_processes() -> list[str]:
    """Of this rank: other tests, here or elsewhere on this machine, have trials too."""
    left, mine = [], f"{MARK}={os.getpid()}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            inherited = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"dcpcomm.trial" in words and mine in inherited:
            left.append(folder.name)
    return left


@pytest.fixture
def pair(pool: Any) -> World:
    return World("gloo_a2a", 2, pool)


def test_a_sound_transport_passes_its_trial_and_is_used(pair: World) -> None:
    for made, _, error, explained, left in pair.run(constructs, -1, "hang", False, fresh=True):
        assert made == ["hanging"]
        assert error < 1e-5
        assert "hanging: in use" in explained
        assert not left


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("hang", "at connect on rank 1: the child process of rank 1 hung, and was killed after 4 s"),
        ("die", "at connect on rank 1: the child process of rank 1 ended with status 7"),
        ("raise", "at connect on rank 1: in a child process: OSError: no such device"),
        ("corrupt", "at verify on rank 1: in a child process: wrong bits: rank 1 got 1 wrong words"),
    ],
)
def test_what_goes_wrong_in_a_child_is_a_reason_in_the_parents(pair: World, fault: str, said: str) -> None:
    """All ranks take the same fallback, know rank and reason, and no child is left behind."""
    for made, _, error, explained, left in pair.run(constructs, 1, fault, True, fresh=True):
        assert made == ["gloo_a2a"]
        assert error < 1e-5
        assert f"hanging: fell {said}" in explained, explained
        assert not left


def test_a_hang_costs_its_deadline_and_says_so_on_every_rank(pair: World) -> None:
    for made, spent, _, _, left in pair.run(constructs, 0, "hang", False, fresh=True):
        assert isinstance(made, Raised)
        assert "TransportUnavailable" in made.kinds
        assert "VerificationFailed" not in made.kinds, "could not verify is not the same as wrong"
        assert made.names(0)
        assert spent < DEADLINE_S + 60, "the start of two children, and one deadline"
        assert not left


def test_wrong_bits_are_told_from_could_not_verify(pair: World) -> None:
    for made, *_ in pair.run(constructs, 1, "corrupt", False, fresh=True):
        assert isinstance(made, Raised)
        assert "VerificationFailed" in made.kinds, made.trace


def constructs_often(group: Any, soak_bytes: int) -> list[int]:
    """How many trials there had been after each construction: one, the same, rank 1 has forgotten, another option."""
    dcpcomm.register_transport("hanging", "tests.hanging:Hanging")
    shape = dcpcomm.MergeShape(max_tokens=4, num_heads=4, head_dim=32, dtype=torch.float32, lse_base="e")
    begun: list[str] = []
    counted: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "_went_well", set())
        patch.setattr(Hanging, "capabilities", replace(Hanging.capabilities, soak_bytes=soak_bytes))
        patch.setattr(trial, "_run_child", lambda task, limit_s: begun.append(task.name) or trial._Ending())
        for again in range(4):
            if again == 2 and rank_of(group) == 1:
                trial._went_well.clear()
            option = {"rank": -1, "fault": "die" if again == 3 else "hang"}
            config = {"transport": "hanging", "verify": {"level": "quick", "deadline_s": PATIENCE_S}}
            dcpcomm.DCPMerger(group, shape, {**config, "options": {"hanging": option}}).close()
            counted.append(len(begun))
    meet()
    unregister_transport("hanging")
    return counted


@pytest.mark.parametrize(("soak_bytes", "trials"), [(0, [1, 1, 2, 3]), (1000, [1, 2, 3, 4])])
def test_what_went_well_is_not_tried_again_for_the_next_merger(
    pair: World, soak_bytes: int, trials: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All ranks hold the same trials, also where one has forgotten; what can tear a message is tried each time."""
    monkeypatch.setenv("DCPCOMM_CACHE_DIR", str(tmp_path))
    assert pair.run(constructs_often, soak_bytes, fresh=True) == [trials, trials]
