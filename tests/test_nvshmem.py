"""`nvshmem_put` without a GPU: ranks are threads, a library of our own stands for NVSHMEM, kernels run on the CPU."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError

import dcpcomm
from dcpcomm.backends import nvshmem_library, nvshmem_put
from dcpcomm.backends.nvshmem_library import NvshmemLibrary
from dcpcomm.backends.nvshmem_put import NvshmemOptions, NvshmemPut
from dcpcomm.combine.fused import fused_bytes
from dcpcomm.combine.put_signal import put_bytes
from dcpcomm.errors import DCPCommError, TransportUnavailable
from dcpcomm.registry import register_transport, unregister_transport
from dcpcomm.testing import LoopbackWorld, run_conformance
from dcpcomm.testing.conformance import CASES
from dcpcomm.topology import Facts
from dcpcomm.transport import Capabilities, MergeShape, Verdict
from tests.emulated import COMPILER
from tests.oracle import judge, make_case
from tests.pretend_gpu import pretend
from tests.pretend_nvshmem import Cmp_type, Init_status, Job, Signal_op, _Process, tensor_at

SHAPE = MergeShape(max_tokens=8, num_heads=4, head_dim=32, dtype=torch.float32, lse_base="e")
emulated = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernels for the CPU with")


class BetweenThreads(NvshmemPut):
    name: ClassVar[str] = "nvshmem_between_threads"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cpu",), multi_host=True, graph_capturable=True, ragged=True
    )

    @classmethod
    def check(cls, facts: Facts) -> Verdict:
        return Verdict(True)

    def prepare(self) -> bytes:
        here.rank = self.group.rank
        return super().prepare()


class ByPeer(BetweenThreads):
    name: ClassVar[str] = "nvshmem_by_peer"


class ByPut(BetweenThreads):
    name: ClassVar[str] = "nvshmem_by_put"


here = threading.local()


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Job]]:
    """Processes to pretend: the last ones made are those whose library a rank finds."""
    made: list[Job] = []

    def make(n: int, reaches: Callable[[int, int], bool] = lambda a, b: True) -> Job:
        made.append(Job(n))
        made[-1].reaches = reaches
        return made[-1]

    pretend(monkeypatch, tmp_path_factory.getbasetemp())
    monkeypatch.setattr(nvshmem_library, "library", lambda: made[-1].libraries[here.rank])
    monkeypatch.setattr(nvshmem_put, "tensor_at", tensor_at)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    yield make
    for job in made:
        job.end()


TAKEN = {
    "constructs", "many-calls", "late-ranks", "channels", "two-mergers", "equals-loopback", "tag-mismatch-named",
    "absent-rank-named", "close-and-construct-again", "close-half-done", "what-was-asked-for",
}  # fmt: skip
#: Of the exchange, which is new, more than of the kernel, which other transports have too.
TAKEN_BY_PUTS = {
    *TAKEN, "rows-vary", "more-than-max-tokens", "width-80", "scatter-heads", "scatter-tokens", "scatter-none",
    "empty-rows", "slow-reader", "rows-mismatch-named", "results-kept", "slices-by-group-rank",
}  # fmt: skip


@emulated
@pytest.mark.parametrize(
    ("cls", "reaches"), [(ByPeer, lambda a, b: True), (ByPut, lambda a, b: False)], ids=["peer", "put_signal"]
)
def test_conformance_on_both_paths(jobs: Callable[..., Job], cls: Any, reaches: Any) -> None:
    job = jobs(2, reaches)
    taken = TAKEN_BY_PUTS if cls is ByPut else TAKEN
    cases = [case for case in CASES if case.name in taken]
    assert len(cases) == len(taken)
    report = run_conformance(cls, ranks=(2,), cases=cases, device="cpu", world="threads")
    failed = {result.case: result.detail[:600] for result in report.results if result.outcome == "failed"}
    assert not failed
    assert not job.said


def facts(place: str, device: str = "cuda") -> Facts:
    return Facts(0, 2, "host", device, place, torch.__version__)


def test_what_can_not_be_is_told_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem_library, "library", lambda: None)
    assert NvshmemPut.check(facts("sm_90")).ok
    assert "loopback_peer" in NvshmemPut.check(facts("loopback")).remedy
    assert "the merger is on cpu" in NvshmemPut.check(facts("cpu", "cpu")).reason

    def absent() -> Any:
        raise ImportError("No module named 'nvshmem'")

    monkeypatch.setattr(nvshmem_library, "library", absent)
    verdict = NvshmemPut.check(facts("sm_90"))
    assert not verdict.ok
    assert "No module named 'nvshmem'" in verdict.reason
    assert "dcpcomm[cu12]" in verdict.remedy
    assert "dcpcomm[cu13]" in verdict.remedy


def test_it_is_a_candidate_only_where_it_is_asked_for() -> None:
    assert NvshmemPut.capabilities.may_hang
    assert NvshmemPut.capabilities.multi_host
    assert not any(place.startswith(("sm_", "cpu")) for place in NvshmemPut.capabilities.proven_on)


def test_a_package_that_is_too_old_says_what_it_lacks() -> None:
    process = _Process(Job(1), 0)
    del process.bindings.signal_op_on_stream
    with pytest.raises(DCPCommError, match=r"nvshmem4py 0\.4\.1 has no signal_op_on_stream; expected 0\.1\.3 or later"):
        NvshmemLibrary(process.core, process.bindings)


def test_the_real_package_has_what_is_used() -> None:
    """Functions by the names of their arguments, as their compiled docstrings have them; constants by their values."""
    real = pytest.importorskip("nvshmem.bindings", reason="nvshmem4py is not installed: pip install 'dcpcomm[cu12]'")
    pretended = _Process(Job(1), 0).bindings
    for name in nvshmem_library._NEEDED[1:]:
        said = re.match(rf"{name}\((.*?)\)", getattr(real, name).__doc__)
        assert said is not None, name
        words = [one.split()[-1] for one in said[1].split(",") if one]
        assert words == list(inspect.signature(getattr(pretended, name)).parameters), name
    for kind in (Cmp_type, Init_status, Signal_op):
        there = {one.name: int(one) for one in getattr(real, kind.__name__)}
        assert {one.name: int(one) for one in kind}.items() <= there.items()
    assert real.uniqueid_dtype.itemsize == pretended.uniqueid_dtype.itemsize
    words = list(inspect.signature(importlib.import_module("nvshmem.core").init).parameters)
    assert words == list(inspect.signature(_Process(Job(1), 0).core.init).parameters)


def test_options_are_those_of_the_kernel_and_the_path() -> None:
    assert NvshmemOptions(threads=64).path == "auto"
    with pytest.raises(ValidationError, match="'auto', 'peer' or 'put_signal'"):
        NvshmemOptions(path="ipc")  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [2, 3, 8])
def test_bytes_are_those_of_the_path(n: int) -> None:
    shape = MergeShape(max_tokens=100, num_heads=8 * n, head_dim=128, dtype=torch.bfloat16, lse_base="e", channels=2)

    def planned(path: Any) -> int:
        return NvshmemPut.device_bytes(shape, n, NvshmemOptions(path=path))

    assert planned("peer") == fused_bytes(shape, n)
    assert planned("put_signal") == put_bytes(shape, n)
    assert planned("auto") == NvshmemPut.device_bytes(shape, n, None) == max(planned("peer"), planned("put_signal"))


# ---------------------------------------------------------------- connecting


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


def test_a_world_is_made_once_and_joined_again(jobs: Callable[..., Job]) -> None:
    job = jobs(2)
    first, second = connected(2), connected(2)
    assert [one.path for one in (*first, *second)] == ["peer"] * 4
    assert len(job.held) == 2
    assert all(not one.map_symmetric(0).own.any() for one in first), "peers find what malloc left there"
    for one, other in (first, first[::-1]):
        address = other.map_symmetric(0).own.data_ptr()
        assert one.map_symmetric(0).peers[other.group.rank].data_ptr() == address
    closed(second)
    closed(first)
    closed(first)
    assert not job.held
    third = connected(2, [1, 0])
    assert [one._pes for one in third] == [[1, 0], [1, 0]], "the group counts its ranks another way"
    closed(third)
    assert not job.held
    assert not job.said


def test_a_world_of_others_is_refused_on_all_ranks(jobs: Callable[..., Job]) -> None:
    job = jobs(3)
    closed(connected(3))
    for error in connected(2):
        assert isinstance(error, TransportUnavailable)
        assert "rank 0: PE 0 of 3, rank 1: PE 1 of 3" in str(error)
        assert "exactly this group" in str(error)
    assert not job.held


def test_a_world_on_some_ranks_is_refused_on_all(jobs: Callable[..., Job]) -> None:
    jobs(4)
    closed(connected(2))
    for error in connected(3):
        assert isinstance(error, TransportUnavailable)
        assert "not on rank 2" in str(error)


def test_two_worlds_are_not_taken_for_one(jobs: Callable[..., Job]) -> None:
    job = jobs(4)
    closed(connected(2, [0, 1]))
    closed(connected(2, [2, 3]))
    for error in connected(2, [0, 3]):
        assert isinstance(error, TransportUnavailable)
    assert not job.held


def test_an_engine_s_world_is_joined(jobs: Callable[..., Job]) -> None:
    job = jobs(2)
    uid = job.libraries[0].unique_id()
    makers = [threading.Thread(target=job.libraries[rank].initialise, args=(uid, rank, 2)) for rank in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    for library in job.libraries:
        library.name = ""  # somebody else made it
    ranks = connected(2)
    assert [one.path for one in ranks] == ["peer", "peer"]
    closed(ranks)
    assert not job.said


def test_other_versions_on_other_ranks_are_named(jobs: Callable[..., Job]) -> None:
    job = jobs(2)
    job.libraries[1].version = "3.3.0"
    for error in connected(2):
        assert "rank 0: 3.4.5, rank 1: 3.3.0" in str(error)


def test_a_group_of_which_two_are_cut_off_puts_with_signals(jobs: Callable[..., Job]) -> None:
    jobs(3, lambda a, b: {a, b} != {0, 2})
    ranks = connected(3)
    assert [one.path for one in ranks] == ["put_signal"] * 3
    assert all(one._by_network for one in ranks), "what comes by a network is settled, on every rank"
    closed(ranks)


def test_a_path_that_is_asked_for(jobs: Callable[..., Job]) -> None:
    jobs(2)
    ranks = connected(2, path="put_signal")
    assert [one.path for one in ranks] == ["put_signal"] * 2
    assert not any(one._by_network for one in ranks)
    closed(ranks)
    job = jobs(2, lambda a, b: a == 0)
    for error in connected(2, path="peer"):
        assert isinstance(error, TransportUnavailable)
        assert "rank 1 to rank 0" in str(error)
    assert not job.held, "nobody uses it, and it is there"


def test_no_memory_left_is_every_rank_s_reason(jobs: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs(2)
    monkeypatch.setattr(job.libraries[1]._bindings, "malloc", lambda size: 0)
    monkeypatch.setattr(job.libraries[0], "allocate", lambda size: id(size) and 4096)
    monkeypatch.setattr(
        nvshmem_put, "tensor_at", lambda address, nbytes, device: torch.zeros(nbytes, dtype=torch.uint8)
    )
    monkeypatch.setattr(nvshmem_put, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(job, "place", lambda *_: 4096)
    for error in connected(2):
        assert "NVSHMEM_SYMMETRIC_SIZE" in str(error)


# ---------------------------------------------------------------- closing


def test_memory_is_left_where_a_rank_does_not_close(
    jobs: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = jobs(2)
    monkeypatch.setattr(nvshmem_put, "_PATIENCE_S", 0.05)
    ranks = connected(2)
    closed(ranks[:1])
    assert "not all ranks close it" in caplog.text
    began = time.monotonic()
    closed(ranks[1:])
    assert time.monotonic() - began < 2, "the one that came later waited for what is over"
    assert len(job.held) == 1
    assert not job.said


def test_memory_is_left_where_a_rank_was_late(jobs: Callable[..., Job], caplog: pytest.LogCaptureFixture) -> None:
    job = jobs(2)
    ranks = connected(2)
    ranks[0]._engine = SimpleNamespace(given_up=True)
    closed(ranks)
    assert "did not come in time" in caplog.text
    assert "a rank of them waited in vain" in caplog.text
    assert len(job.held) == 1


# ---------------------------------------------------------------- merging


def merges(group: Any, case: Any, name: str) -> Any:
    shape = MergeShape(max_tokens=8, num_heads=8, head_dim=32, dtype=torch.float32, lse_base=case.base, channels=2)
    config = {"transport": name}
    with dcpcomm.DCPMerger(group, shape, config) as merger:
        results = [merger.merge(case.outs[group.rank], case.lses[group.rank], return_lse=True) for _ in range(3)]
        planned = dcpcomm.plan_bytes(shape, group.size, config, device="cuda")
        return results, merger.device_bytes, planned


@emulated
@pytest.mark.parametrize("reach", [True, False], ids=["peer", "put_signal"])
def test_merges_are_right_and_take_what_was_planned(
    jobs: Callable[..., Job], rng: torch.Generator, reach: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    job, cls = jobs(2, lambda a, b: reach), ByPeer if reach else ByPut
    register_transport(cls.name, cls)
    try:
        case = make_case(rng, 2, b=5, h=8, d=32, dtype=torch.float32)
        answers = LoopbackWorld(2).run(merges, case, cls.name)
    finally:
        unregister_transport(cls.name)
    for results in zip(*(results for results, _, _ in answers), strict=True):
        judge(list(results), case)
    assert all(held == planned for _, held, planned in answers)
    assert not job.held
    assert not job.said


def raises_once(group: Any, case: Any, name: str) -> Any:
    shape = MergeShape(max_tokens=8, num_heads=8, head_dim=32, dtype=torch.float32, lse_base=case.base)
    with dcpcomm.DCPMerger(group, shape, {"transport": name}) as merger:
        out, lse = case.outs[group.rank], case.lses[group.rank]
        merger.merge(out, lse)
        said = ""
        try:
            merger.merge(out, lse.double() if group.rank else lse)
            merger.check()
        except DCPCommError as error:
            said = str(error)
        return said, merger.merge(out, lse)


@emulated
@pytest.mark.parametrize("reach", [True, False], ids=["peer", "put_signal"])
def test_a_call_that_raised_on_one_rank_is_told_and_the_next_is_right(
    jobs: Callable[..., Job], rng: torch.Generator, reach: bool
) -> None:
    job, cls = jobs(2, lambda a, b: reach), ByPeer if reach else ByPut
    register_transport(cls.name, cls)
    try:
        case = make_case(rng, 2, b=5, h=8, d=32, dtype=torch.float32)
        answers = LoopbackWorld(2).run(raises_once, case, cls.name)
    finally:
        unregister_transport(cls.name)
    assert "rank 1 raised in call" in answers[0][0]
    assert "float64" in answers[0][0]
    assert "float64" in answers[1][0]
    judge([result for _, result in answers], case)
    assert not job.said


def test_cards_are_plain(jobs: Callable[..., Job]) -> None:
    jobs(2)
    here.rank = 0
    card = json.loads(NvshmemPut(group_of(Meeting(2), 0), SHAPE, None).prepare())
    assert set(card) == {"world", "name", "version", "gpu", "uid"}
