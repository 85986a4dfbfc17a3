"""What keeps `flashinfer_helix` from being used, each with a remedy; and how its ranks meet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcpcomm
from dcpcomm.backends import flashinfer_library
from dcpcomm.backends.flashinfer_library import StoreComm
from dcpcomm.errors import TransportTimeout, TransportUnavailable
from dcpcomm.launch import RankFailed
from dcpcomm.testing import LoopbackWorld
from dcpcomm.topology import Facts
from tests.helix_on_cpu import HelixOnCpu
from tests.helix_rig import in_threads, own_cache
from tests.world import Raised, outcome

__all__ = ["own_cache"]

pytestmark = pytest.mark.usefixtures("own_cache")


# ---------------------------------------------------------------- reasons and remedies


def facts(place: str, size: int = 2, device: str = "cuda") -> Facts:
    return Facts(0, size, "host", device, place, torch.__version__)


def test_what_can_not_be_is_told_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HelixOnCpu.check(facts("sm_90")).ok
    old = HelixOnCpu.check(facts("sm_80"))
    assert "needs sm_90" in old.reason
    assert "nccl_a2a" in old.remedy
    monkeypatch.setattr(HelixOnCpu, "package", "there.is.no.such")
    monkeypatch.setattr(flashinfer_library.importlib.util, "find_spec", lambda name: None)
    absent = HelixOnCpu.check(facts("sm_90"))
    assert (absent.ok, absent.reason) == (False, "FlashInfer isn't installed")
    assert "dcpcomm[cu12]" in absent.remedy


def test_virtual_ranks_that_would_wait_for_each_other_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "3 ranks may not fit on one GPU" in HelixOnCpu.check(facts("loopback", 3)).reason
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in HelixOnCpu.check(facts("loopback")).remedy
    assert HelixOnCpu.check(facts("loopback", 3, "cpu")).ok


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist", "CUDA_HOME"),
        ("[Errno 2] No such file or directory: 'ninja'", "pip install ninja"),
        ("JIT compilation is disabled via FLASHINFER_DISABLE_JIT environment variable", "unset FLASHINFER_DISABLE_JIT"),
        ("No supported CUDA architectures found for major versions [9, 10, 11, 12].", "sm_90 or later"),
        ("[Errno 13] Permission denied: '/home/me/.cache/flashinfer'", "FLASHINFER_WORKSPACE_BASE"),
        ("Ninja build failed. Ninja output: error: identifier is undefined", "DCPCOMM_LOG=info"),
    ],
)
def test_what_keeps_it_from_compiling_has_a_remedy(said: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELIX_STAND_IN_FAILS", said)
    verdict = HelixOnCpu.load(facts("sm_90"))
    assert not verdict.ok
    assert "FlashInfer 0.0.stand-in can't compile its exchange here: RuntimeError: " in verdict.reason
    assert remedy in verdict.remedy
    with pytest.raises(RankFailed, match=r"fell at import on rank 0: FlashInfer 0\.0\.stand-in can't compile"):
        in_threads(2, {})


def test_imports_that_fail_and_versions_that_are_too_old_have_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(package: str) -> Any:
        raise ModuleNotFoundError("No module named 'cuda'", name="cuda")

    def broken(package: str) -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file " + "x" * 1000)

    monkeypatch.setattr(flashinfer_library, "library", lacks)
    verdict = HelixOnCpu.load(facts("sm_90"))
    assert "No module named 'cuda'" in verdict.reason
    assert "provides 'cuda'" in verdict.remedy
    monkeypatch.setattr(flashinfer_library, "library", broken)
    verdict = HelixOnCpu.load(facts("sm_90"))
    assert "libcuda.so.1" in verdict.reason
    assert len(verdict.reason) < 400
    monkeypatch.setattr(flashinfer_library, "library", lambda package: SimpleNamespace())
    verdict = HelixOnCpu.load(facts("sm_90"))
    assert "0.0.stand-in has no decode_cp_a2a_workspace_size" in verdict.reason
    assert "0.7.4" in verdict.remedy


def test_options_that_exclude_each_other_are_told() -> None:
    for more in ({"allow_unverified": True}, {"heads_per_entry": 4}):
        config = {"transport": "flashinfer_helix", "options": {"flashinfer_helix": {"checked": True, **more}}}
        with pytest.raises(dcpcomm.ConfigError, match="checked proves all rows"):
            dcpcomm.load_config(config)


# ---------------------------------------------------------------- meeting over the store


def comms(n: int, deadline_s: float = 20.0) -> list[StoreComm]:
    store = dist.HashStore()
    groups = [SimpleNamespace(rank=rank, size=n, store=lambda purpose: store) for rank in range(n)]
    return [StoreComm(group, "helix", deadline_s) for group in groups]  # type: ignore[arg-type]


def test_what_flashinfer_gathers_comes_back_by_rank() -> None:
    met = comms(3)
    sent = ("host", None, b"\x00\xff", 7)

    def body(group: Any) -> Any:
        mine = met[group.rank].Split(0, group.rank)
        mine.barrier()
        gathered = mine.allgather((group.rank, *sent))
        return gathered, mine.bcast(f"from {group.rank}", 2), mine.Get_size(), mine.Get_rank()

    for rank, (gathered, cast, size, place) in enumerate(LoopbackWorld(3, device="cpu").run(body)):
        assert gathered == tuple((other, *sent) for other in range(3))
        assert (cast, size, place) == ("from 2", 3, rank)


def test_who_fails_or_does_not_come_is_named() -> None:
    first, second = comms(2)
    second.fail(OSError("no memory left"))
    with pytest.raises(TransportUnavailable, match="rank 1 could not set FlashInfer up: OSError: no memory left"):
        first.barrier()
    with pytest.raises(TransportTimeout, match=r"rank 1, 2 did not arrive within 0.05 s") as caught:
        comms(3, 0.05)[0].barrier()
    assert caught.value.ranks == (1, 2)


def test_a_group_that_is_split_otherwise_is_refused() -> None:
    met = comms(2)

    def body(group: Any) -> Any:
        return outcome(met[group.rank].Split, group.rank, 0)

    assert all(isinstance(one, Raised) for one in LoopbackWorld(2, device="cpu").run(body))


def test_ranks_whose_kernels_would_not_meet_are_told_before(monkeypatch: pytest.MonkeyPatch) -> None:
    card = flashinfer_library.gpu_card
    places = iter([{"processors": 132}, {"processors": 66}])
    monkeypatch.setattr(flashinfer_library, "gpu_card", lambda device: next(places, card(device)))
    with pytest.raises(RankFailed, match=r"multiprocessors is (132|66) on rank 0 and (132|66) on rank 1"):
        in_threads(2, {})
