"""The NCCL transports as far as they go without a GPU: the conformance suite over Gloo, and what their checks say."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcpcomm.backends import nccl_groups
from dcpcomm.backends.nccl_a2a import NcclA2A
from dcpcomm.backends.nccl_ag_rs import NcclAgRs
from dcpcomm.errors import TransportUnavailable
from dcpcomm.testing import run_conformance
from dcpcomm.topology import Facts
from tests.gloo_as_nccl import A2AOverGloo, AgRsOverGloo


@pytest.mark.parametrize("cls", [A2AOverGloo, AgRsOverGloo], ids=lambda cls: cls.name)
def test_conformance_over_gloo(cls: type) -> None:
    report = run_conformance(cls, ranks=(3,))
    failed = {result.case: result.detail for result in report.results if result.outcome == "failed"}
    assert not failed
    unclaimed = {result.case: result.detail for result in report.results if result.outcome == "not claimed"}
    assert {case: why for case, why in unclaimed.items() if "interruptible" in why} == {
        "absent-rank-named": "interruptible=False",
        "wrong-call-on-one-rank": "interruptible=False",
    }


def facts(place: str) -> Facts:
    return Facts(0, 2, "host", "cuda", place, torch.__version__)


@pytest.mark.parametrize("cls", [NcclA2A, NcclAgRs])
def test_a_build_without_nccl_is_told(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    verdict = cls.check(facts("sm_90"))
    assert not verdict.ok
    assert "no NCCL" in verdict.reason
    assert "CUDA build" in verdict.remedy


@pytest.mark.parametrize("cls", [NcclA2A, NcclAgRs])
def test_threads_of_one_process_are_told(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert cls.check(facts("sm_90")).ok
    assert "loopback_peer" in cls.check(facts("loopback")).remedy


def test_two_ranks_on_one_gpu_are_named_before_nccl_hangs() -> None:
    card = [json.dumps({"gpu": gpu, "nccl": [2, 28, 9]}).encode() for gpu in ("a", "b", "a")]
    with pytest.raises(TransportUnavailable, match=r"ranks 0 and 2 are both on GPU a.*CUDA_VISIBLE_DEVICES"):
        nccl_groups.nccl_groups(None, 1, card)  # type: ignore[arg-type]


def test_different_nccl_versions_are_named() -> None:
    card = [json.dumps({"gpu": str(i), "nccl": [2, 28, 9 - i]}).encode() for i in range(2)]
    with pytest.raises(TransportUnavailable, match=r"rank 0 has NCCL \[2, 28, 9\] and rank 1 has \[2, 28, 8\]"):
        nccl_groups.nccl_groups(None, 1, card)  # type: ignore[arg-type]
