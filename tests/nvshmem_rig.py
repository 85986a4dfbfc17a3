"""`nvshmem_put` between threads: each rank finds a pretended NVSHMEM, as a process finds its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from dcpcomm.backends import nvshmem_library, nvshmem_put
from dcpcomm.backends.nvshmem_put import NvshmemOptions, NvshmemPut
from dcpcomm.errors import DCPCommError
from dcpcomm.topology import Facts
from dcpcomm.transport import Capabilities, MergeShape, Verdict
from tests.pretend_gpu import pretend
from tests.pretend_nvshmem import Job, tensor_at

SHAPE = MergeShape(max_tokens=8, num_heads=4, head_dim=32, dtype=torch.float32, lse_base="e")
Jobs = Callable[..., Job]
here = threading.local()


class BetweenThreads(NvshmemPut):
    name: ClassVar[str] = "nvshmem_between_threads"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cpu",), multi_host=True, graph_capturable=True, ragged=True
    )

    @classmethod
    def check(cls, facts: Facts) -> Verdict:
        return Verdict(True)

    @classmethod
    def load(cls, facts: Facts) -> Verdict:
        return Verdict(True)

    def prepare(self) -> bytes:
        here.rank = self.group.rank
        return super().prepare()


class ByPeer(BetweenThreads):
    name: ClassVar[str] = "nvshmem_by_peer"


class ByPut(BetweenThreads):
    name: ClassVar[str] = "nvshmem_by_put"


@contextlib.contextmanager
def processes(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Jobs]:
    """What makes processes to pretend: the last ones made are those whose library a rank finds."""
    made: list[Job] = []

    def make(n: int, reaches: Callable[[int, int], bool] = lambda a, b: True) -> Job:
        made.append(Job(n))
        made[-1].reaches = reaches
        return made[-1]

    pretend(monkeypatch, folder)
    monkeypatch.setattr(nvshmem_library, "library", lambda: made[-1].libraries[here.rank])
    monkeypatch.setattr(nvshmem_put, "tensor_at", tensor_at)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    yield make
    for job in made:
        job.end()


class Meeting:
    """What ranks that are threads have of a group's control channel and store."""

    def __init__(self, n: int) -> None:
        self.n, self.store, self.came = n, dist.HashStore(), dict[int, bytes]()
        self.failed = ""
        self.barrier = threading.Barrier(n, timeout=10)


def group_of(meeting: Meeting, rank: int) -> Any:
    def exchange(payload: bytes, *_: Any) -> list[bytes]:
        meeting.came[rank] = payload
        meeting.barrier.wait()
        if meeting.failed:
            raise DCPCommError(meeting.failed)
        return [meeting.came[one] for one in range(meeting.n)]

    def fail(reason: str) -> None:
        meeting.failed = reason
        meeting.barrier.wait()

    control = SimpleNamespace(exchange=exchange, fail=fail)
    peers = [one for one in range(meeting.n) if one != rank]
    return SimpleNamespace(
        rank=rank, size=meeting.n, peers=peers, device=torch.device("cpu"), control=control, generation=1,
        store=lambda purpose: dist.PrefixStore(purpose, meeting.store), timeout_s=5.0, hosts=["a"] * meeting.n,
    )  # fmt: skip


def connected(n: int, ranks: Any = None, **options: Any) -> list[Any]:
    """By rank the transport, or what connecting raised. `ranks`: whose library each takes."""
    meeting, cards, results = Meeting(n), dict[int, bytes](), dict[int, Any]()

    def one(rank: int) -> None:
        here.rank = rank if ranks is None else ranks[rank]
        transport = NvshmemPut(group_of(meeting, rank), SHAPE, NvshmemOptions(**options))
        cards[rank] = transport.prepare()
        meeting.barrier.wait()
        try:
            transport.connect([cards[other] for other in range(n)])
            results[rank] = transport
        except Exception as error:
            transport.close()
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [results[rank] for rank in range(n)]


def closed(transports: list[Any]) -> None:
    threads = [threading.Thread(target=one.close) for one in transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
