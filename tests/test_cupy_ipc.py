"""`cupy_ipc` without a GPU: ranks are threads, a runtime of our own stands for CUDA's, kernels run on CPU."""

from __future__ import annotations

import ctypes
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from dcpcomm.backends import cupy_ipc
from dcpcomm.backends.cupy_ipc import CupyIpc
from dcpcomm.errors import TransportUnavailable
from dcpcomm.testing import run_conformance
from dcpcomm.testing.conformance import CASES
from dcpcomm.topology import Facts
from dcpcomm.transport import Capabilities, MergeShape, Verdict
from tests.emulated import COMPILER
from tests.pretend_gpu import pretend

SHAPE = MergeShape(max_tokens=8, num_heads=4, head_dim=32, dtype=torch.float32, lse_base="e")


class FakeCuda:
    """Memory of this process; a handle is an address. Complains of whatever would be undefined with CUDA."""

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.open: list[int] = []
        self.said: list[str] = []
        self.closed_to: str | None = None
        self._lock = threading.Lock()

    def setDevice(self, index: Any) -> None:
        pass

    def malloc(self, nbytes: int) -> int:
        assert nbytes % cupy_ipc._GRANULE == 0
        room = (ctypes.c_uint8 * (nbytes + 128))()
        address = -(-ctypes.addressof(room) // 128) * 128
        ctypes.memset(address, 0xA5, nbytes)
        with self._lock:
            self.memory[address] = room
        return address

    def ipcGetMemHandle(self, address: int) -> bytes:
        assert address in self.memory
        return address.to_bytes(64, "little")

    def ipcOpenMemHandle(self, handle: bytes, flags: int) -> int:
        if self.closed_to is not None:
            raise RuntimeError(self.closed_to)
        address = int.from_bytes(handle, "little")
        with self._lock:
            assert address in self.memory, "opened after it was freed"
            self.open.append(address)
        return address

    def ipcCloseMemHandle(self, address: int) -> None:
        with self._lock:
            self.open.remove(address)

    def free(self, address: int) -> None:
        with self._lock:
            if address in self.open:
                self.said.append("freed while a peer had it open")
            del self.memory[address]

    def tensor_at(self, address: int, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(cupy_ipc, "runtime", lambda: fake)
    monkeypatch.setattr(cupy_ipc, "tensor_at", fake.tensor_at)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(synchronize=lambda: None))
    return fake


class BetweenThreads(CupyIpc):
    name: ClassVar[str] = "ipc_between_threads"
    capabilities: ClassVar[Capabilities] = Capabilities(devices=("cpu",), graph_capturable=True, ragged=True)

    @classmethod
    def check(cls, facts: Facts) -> Verdict:
        return Verdict(True)


TAKEN = {
    "constructs", "many-calls", "late-ranks", "channels", "two-mergers", "equals-loopback", "tag-mismatch-named",
    "absent-rank-named", "close-and-construct-again", "close-half-done", "what-was-asked-for",
}  # fmt: skip


@pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernels for the CPU with")
def test_conformance_with_memory_of_its_own(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path)
    cases = [case for case in CASES if case.name in TAKEN]
    assert len(cases) == len(TAKEN)
    report = run_conformance(BetweenThreads, ranks=(2,), cases=cases, device="cpu", world="threads")
    failed = {result.case: result.detail[:600] for result in report.results if result.outcome == "failed"}
    assert not failed
    assert not cuda.open, "memory of a peer is still open"
    assert not cuda.said


def facts(place: str) -> Facts:
    return Facts(0, 2, "host", "cuda", place, torch.__version__)


def test_what_can_not_be_is_told_with_a_remedy(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    assert CupyIpc.check(facts("sm_90")).ok
    assert "loopback_peer" in CupyIpc.check(facts("loopback")).remedy

    def absent() -> Any:
        raise ImportError("No module named 'cupy_backends'")

    monkeypatch.setattr(cupy_ipc, "runtime", absent)
    verdict = CupyIpc.check(facts("sm_90"))
    assert not verdict.ok
    assert "No module named 'cupy_backends'" in verdict.reason
    assert "dcpcomm[cu12]" in verdict.remedy


@pytest.mark.parametrize("n", [2, 3, 8])
def test_it_takes_whole_granules(n: int) -> None:
    shape = MergeShape(max_tokens=100, num_heads=8 * n, head_dim=128, dtype=torch.bfloat16, lse_base="e", channels=2)
    planned = CupyIpc.device_bytes(shape, n, None)
    assert planned % (2 << 20) == 0
    assert 0 <= planned - super(CupyIpc, CupyIpc).device_bytes(shape, n, None) < 2 << 20


class Notes:
    """A control channel's notes, of a peer that says nothing until it is told to."""

    def __init__(self) -> None:
        self.mine: dict[str, str] = {}
        self.theirs = ""

    def note(self, key: str, value: str) -> None:
        self.mine[key] = value

    def read_note(self, rank: int, key: str) -> str:
        return self.theirs


def connected(cuda: FakeCuda) -> tuple[CupyIpc, Notes, int]:
    """Rank 0 of two, its control channel, and the address of its memory."""
    notes = Notes()
    group = SimpleNamespace(rank=0, size=2, peers=[1], device=torch.device("cpu"), control=notes, generation=1)
    transport = CupyIpc(group, SHAPE, None)  # type: ignore[arg-type]
    card = transport.prepare()
    other = cuda.malloc(transport.peer_bytes)
    peer = {**json.loads(card), "handle": cuda.ipcGetMemHandle(other).hex(), "gpu": "GPU-2"}
    transport.connect([card, json.dumps(peer).encode()])
    own = transport.map_symmetric(transport.peer_bytes).own
    assert not own.any(), "peers find what malloc left there"
    return transport, notes, own.data_ptr()


def test_memory_is_freed_when_the_peers_have_closed_it(cuda: FakeCuda) -> None:
    transport, notes, own = connected(cuda)
    notes.theirs = "closed"
    for _ in range(2):
        transport.close()
    assert not cuda.open
    assert own not in cuda.memory
    assert list(notes.mine.values()) == ["closed"]


def test_memory_that_a_peer_has_open_is_left(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cupy_ipc, "_PATIENCE_S", 0.05)
    transport, _, own = connected(cuda)
    transport.close()
    assert own in cuda.memory
    assert not cuda.open, "what this rank had open"
    assert "rank 1 has it open" in caplog.text


def test_memory_that_a_late_peer_may_still_write_to_is_left(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    transport, notes, own = connected(cuda)
    notes.theirs = "closed"
    transport._engine = SimpleNamespace(given_up=True)
    transport.close()
    assert own in cuda.memory
    assert "did not come in time" in caplog.text


def test_a_peer_that_can_not_be_opened_is_named_with_its_gpu(cuda: FakeCuda) -> None:
    cuda.closed_to = "cudaErrorPeerAccessUnsupported: no"
    with pytest.raises(TransportUnavailable, match=r"rank 0 on GPU GPU-1 .* rank 1 on GPU GPU-2: .*Unsupported.*topo"):
        connected(cuda)


def test_memory_of_a_merger_made_in_inference_mode_can_be_written_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (ctypes.c_uint8 * 64)()
    monkeypatch.setattr(torch, "as_tensor", lambda region, device: torch.frombuffer(words, dtype=torch.uint8))
    with torch.inference_mode():
        made = cupy_ipc.tensor_at(ctypes.addressof(words), 64, torch.device("cpu"))
    made.fill_(3)
    assert bytes(words) == b"\3" * 64


def test_memory_that_torch_would_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What peers store there nobody would see."""
    own = torch.zeros(64, dtype=torch.uint8)
    copied = torch.zeros(64, dtype=torch.uint8)
    monkeypatch.setattr(torch, "as_tensor", lambda region, device: own)
    assert cupy_ipc.tensor_at(own.data_ptr(), 64, torch.device("cpu")) is own
    monkeypatch.setattr(torch, "as_tensor", lambda region, device: copied)
    with pytest.raises(TransportUnavailable, match="copies the memory"):
        cupy_ipc.tensor_at(own.data_ptr(), 64, torch.device("cpu"))
