"""Which NVSHMEM a merger joins, makes or refuses, the path it takes then, and what becomes of its memory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dcpcomm.backends import nvshmem_put
from dcpcomm.backends.nvshmem_put import NvshmemPut
from dcpcomm.errors import TransportUnavailable
from tests.nvshmem_rig import SHAPE, Jobs, Meeting, closed, connected, group_of, here, processes


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with processes(monkeypatch, tmp_path_factory.getbasetemp()) as make:
        yield make


def test_a_world_is_made_once_and_joined_again(jobs: Jobs) -> None:
    job = jobs(2)
    first, second = connected(2), connected(2)
    assert [one.path for one in (*first, *second)] == ["peer"] * 4
    assert len(job.held) == 2
    assert all(not one.map_symmetric(0).own.any() for one in first), "peers find what malloc left there"
    for one, other in (first, first[::-1]):
        address = other.map_symmetric(0).own.data_ptr()
        assert one.map_symmetric(0).addresses[other.group.rank] == address
    closed(second)
    closed(first)
    closed(first)
    assert not job.held
    third = connected(2, [1, 0])
    assert [one._pes for one in third] == [[1, 0], [1, 0]], "the group counts its ranks another way"
    closed(third)
    assert not job.held
    assert not job.said


def test_a_world_of_others_is_refused_on_all_ranks(jobs: Jobs) -> None:
    job = jobs(3)
    closed(connected(3))
    for error in connected(2):
        assert isinstance(error, TransportUnavailable)
        assert "rank 0: PE 0 of 3, rank 1: PE 1 of 3" in str(error)
        assert "exactly this group" in str(error)
    assert not job.held


def test_a_world_on_some_ranks_is_refused_on_all(jobs: Jobs) -> None:
    jobs(4)
    closed(connected(2))
    for error in connected(3):
        assert isinstance(error, TransportUnavailable)
        assert "not on rank 2" in str(error)


def test_two_worlds_are_not_taken_for_one(jobs: Jobs) -> None:
    job = jobs(4)
    closed(connected(2, [0, 1]))
    closed(connected(2, [2, 3]))
    for error in connected(2, [0, 3]):
        assert isinstance(error, TransportUnavailable)
    assert not job.held


def test_an_engine_s_world_is_joined_where_it_must_be_the_groups(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs(2)
    uid = job.libraries[0].unique_id()
    makers = [threading.Thread(target=job.libraries[rank].initialise, args=(uid, rank, 2)) for rank in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    for library in job.libraries:
        library.name = ""  # somebody else made it
    for error in connected(2):
        assert "in a world of 0 ranks of torch" in str(error), "nothing says that its PEs are this group"
        assert "trust_pes: true" in str(error)
    ranks = connected(2, trust_pes=True)
    assert [one.path for one in ranks] == ["peer", "peer"]
    closed(ranks)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    closed(connected(2))
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    assert all("in a world of 4 ranks of torch" in str(error) for error in connected(2))
    assert not job.held
    assert not job.said


def test_ranks_that_share_a_gpu_without_mps_are_not_put_to_by_a_network(jobs: Jobs) -> None:
    """NVSHMEM would end the process in the wait that settles what has come."""
    job = jobs(2, lambda a, b: False)
    for process in job.processes:
        process.limited = True
    for error in connected(2):
        assert isinstance(error, TransportUnavailable)
        assert "without MPS" in str(error)
    assert not job.held
    job = jobs(2)
    for process in job.processes:
        process.limited = True
    closed(connected(2, path="put_signal"))
    assert not job.said


def test_other_versions_on_other_ranks_are_named(jobs: Jobs) -> None:
    job = jobs(2)
    job.libraries[1].version = "3.3.0"
    for error in connected(2):
        assert "rank 0: 3.4.5, rank 1: 3.3.0" in str(error)


def test_a_group_of_which_two_are_cut_off_puts_with_signals(jobs: Jobs) -> None:
    jobs(3, lambda a, b: {a, b} != {0, 2})
    ranks = connected(3)
    assert [one.path for one in ranks] == ["put_signal"] * 3
    assert all(one._by_network for one in ranks), "what comes by a network is settled, on every rank"
    closed(ranks)


def test_a_path_that_is_asked_for(jobs: Jobs) -> None:
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


def test_no_memory_left_is_every_rank_s_reason(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_memory_is_left_where_a_rank_does_not_close(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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


def test_memory_is_left_where_a_rank_was_late(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    job = jobs(2)
    ranks = connected(2)
    ranks[0]._engine = SimpleNamespace(given_up=True)
    closed(ranks)
    assert "did not come in time" in caplog.text
    assert "a rank of them waited in vain" in caplog.text
    assert len(job.held) == 1


def test_cards_are_plain(jobs: Jobs) -> None:
    jobs(2)
    here.rank = 0
    card = json.loads(NvshmemPut(group_of(Meeting(2), 0), SHAPE, None).prepare())
    assert set(card) == {"world", "name", "version", "gpu", "uid", "torch ranks"}
