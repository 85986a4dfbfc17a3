"""The NCCL transports as far as they go without a GPU: the conformance suite over Gloo, and what their checks say."""

from __future__ import annotations

import ctypes
import functools
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcpcomm import topology
from dcpcomm.backends import nccl_groups, nccl_library
from dcpcomm.backends.nccl_a2a import NcclA2A
from dcpcomm.backends.nccl_ag_rs import NcclAgRs
from dcpcomm.combine import native
from dcpcomm.errors import DCPCommError, TransportTimeout, TransportUnavailable
from dcpcomm.testing import run_conformance
from dcpcomm.topology import Facts
from tests.gloo_as_nccl import A2AOverGloo, AgRsOverGloo


@pytest.mark.parametrize("cls", [A2AOverGloo, AgRsOverGloo], ids=lambda cls: cls.name)
def test_conformance_over_gloo(cls: type) -> None:
    report = run_conformance(cls, ranks=(2,))
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


class FakeNccl:
    """Functions in the place of NCCL's that write down what they were called with, and fail where they are told to."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.failing: str | None = None
        self.aborted = threading.Event()
        group = ctypes.CFUNCTYPE(ctypes.c_int)
        arguments = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p
        transfer = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)
        for name in ("ncclGroupStart", "ncclGroupEnd"):
            setattr(self, name, group(functools.partial(self.note, name)))
        for name in ("ncclSend", "ncclRecv"):
            setattr(self, name, transfer(functools.partial(self.note, name)))
        self.ncclCommAbort = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self.abort)

    def note(self, *call: Any) -> int:
        self.calls.append(call)
        return 5 if call[0] == self.failing else 0

    def abort(self, comm: int) -> int:
        self.calls.append(("ncclCommAbort", comm, threading.get_ident()))
        self.aborted.set()
        return 0

    def ncclGetErrorString(self, status: int) -> bytes:
        return f"error {status}".encode()

    def ncclGetLastError(self, comm: int) -> bytes:
        return b"a cable was pulled"


COMM, STREAM = 0x7000_0000_1000, 0x7000_0000_2000


@pytest.fixture(params=[True, False], ids=["compiled", "by ctypes"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    made = FakeNccl()
    if not request.param:
        monkeypatch.setattr(native, "library", None)
    elif native.library is None:
        pytest.skip("nothing was compiled here")
    monkeypatch.setattr(nccl_library, "library", lambda: (made, made))
    monkeypatch.setattr(topology, "current_stream", lambda device: STREAM)
    return made


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (2, 5)])
def test_every_peer_gets_its_block_and_nobody_the_own(fake: FakeNccl, rank: int, size: int) -> None:
    send, recv = (torch.empty(size, 9, 48, dtype=torch.uint8)[:, :7] for _ in range(2))  # with a gap between blocks
    exchange = nccl_library.PeerExchange(COMM, rank, torch.device("cpu"), send, recv)
    for _ in range(2):
        fake.calls.clear()
        exchange()
        assert fake.calls[0] == ("ncclGroupStart",)
        assert fake.calls[-1] == ("ncclGroupEnd",)
        moved = set(fake.calls[1:-1])
        assert len(moved) == len(fake.calls) - 2 == 2 * (size - 1)
        for peer in set(range(size)) - {rank}:
            assert ("ncclSend", send[peer].data_ptr(), 7 * 48, 1, peer, COMM, STREAM) in moved
            assert ("ncclRecv", recv[peer].data_ptr(), 7 * 48, 1, peer, COMM, STREAM) in moved


@pytest.mark.parametrize("failing", ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"])
def test_what_nccl_refuses_is_an_error_with_its_words(fake: FakeNccl, failing: str) -> None:
    buffers = torch.empty(2, 3, 48, dtype=torch.uint8)
    exchange = nccl_library.PeerExchange(COMM, 0, torch.device("cpu"), buffers, buffers.clone())
    fake.failing = failing
    with pytest.raises(DCPCommError, match=r"could not exchange rows: error 5: a cable was pulled"):
        exchange()
    begun = [call for call in fake.calls if call[0] == "ncclGroupStart"]
    ended = [call for call in fake.calls if call[0] == "ncclGroupEnd"]
    assert len(ended) == len(begun) - (failing == "ncclGroupStart"), "a group was left open, or closed without one"


def test_an_abort_waits_for_nobody(fake: FakeNccl) -> None:
    nccl_library.abort(COMM)
    assert fake.aborted.wait(10)
    ((_, comm, thread),) = fake.calls
    assert comm == COMM
    assert thread != threading.get_ident()


def test_without_nccl_there_is_no_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_library, "library", lambda: None)
    assert nccl_library.communicator(SimpleNamespace(_comm_ptr=lambda: COMM)) is None
    monkeypatch.setattr(nccl_library, "library", lambda: ("it", "it"))
    assert nccl_library.communicator(SimpleNamespace(_comm_ptr=lambda: COMM)) == COMM
    assert nccl_library.communicator(SimpleNamespace()) is None


def test_an_interrupted_channel_says_why_and_the_others_go_on(fake: FakeNccl) -> None:
    transport = NcclA2A(SimpleNamespace(rank=0, device=torch.device("cpu")), None, None)  # type: ignore[arg-type]
    transport._groups, transport._comms = ("a", "b", "c"), (COMM, COMM + 64, None)
    error = TransportTimeout("rank 1 did not arrive", (1,))
    for _ in range(2):
        transport.interrupt(1, error)
    assert fake.aborted.wait(10)
    assert [call[1] for call in fake.calls] == [COMM + 64], "once, and only that one"
    with pytest.raises(TransportTimeout, match="rank 1 did not arrive"):
        transport.poll(1)
    transport.poll(0)
    transport.interrupt(2, error)  # of a torch that doesn't tell the communicator: said, and that is all
    transport.poll(2)
