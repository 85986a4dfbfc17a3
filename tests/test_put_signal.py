"""Put with signal, over a pretended NVSHMEM whose puts arrive late, in pieces and in any order, by the kernels' own
source on the CPU: rows arrive whole, replays included; a slot isn't overwritten; who doesn't come is named.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpcomm.combine.put_signal import put_bytes, put_places
from dcpcomm.errors import TransportTimeout
from dcpcomm.transport import MergeShape
from tests import put_rig
from tests.emulated import COMPILER, EmulatedKernels
from tests.pretend_gpu import pretend
from tests.pretend_nvshmem import Job
from tests.put_rig import SHAPE, PutRank, assert_all_right, counts_of, ranks_of, together

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernels for the CPU with")

Make = Callable[..., list[PutRank]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture
def make(folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Make]:
    """N ranks, ready."""
    pretend(monkeypatch, folder)
    jobs, made = list[Job](), list[PutRank]()

    def ranks(n: int, shape: MergeShape = SHAPE) -> list[PutRank]:
        kernels = EmulatedKernels(torch.bfloat16, n, folder, files=(), planted=getattr(request, "param", None))
        jobs.append(Job(n))
        made.extend(ranks_of(jobs[-1], kernels, shape))
        return made[-n:]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield ranks
    torch.set_num_threads(threads)
    for one in made:
        one.release()
    for job in jobs:
        job.end()
        assert not job.said


def check_back_to_back(make: Make, n: int, calls: int = 60) -> None:
    """Ranks that run ahead of each other as far as credits allow, B changing."""
    ranks = make(n)

    def body(one: PutRank) -> None:
        dice = random.Random()
        for number in range(calls):
            if dice.random() < 0.1:
                time.sleep(dice.random() * 0.002)
            one.call(1 + number % SHAPE.max_tokens)

    together(ranks, body)
    assert_all_right(ranks, calls)
    assert all(counts_of(one) == [calls, calls, 0] for one in ranks)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_call_after_call(make: Make, n: int) -> None:
    check_back_to_back(make, n)


def test_channels_don_t_meet(make: Make) -> None:
    shape = MergeShape(max_tokens=4, num_heads=12, head_dim=40, dtype=torch.bfloat16, lse_base="e", channels=2)
    ranks = make(2, shape)

    def body(one: PutRank) -> None:
        for number in range(30):
            one.call(1 + number % 4, channel=number // 3 % 2)

    together(ranks, body)
    assert_all_right(ranks, 30)


def check_replays(make: Make, merges: int, replays: int, n: int = 2) -> None:
    """A graph of `merges` calls, replayed with fresh data and eager calls in between, one rank late now and then."""
    ranks = make(n)
    eager = 0

    def body(one: PutRank) -> int:
        dice, between = random.Random(one.rank), random.Random(7)
        one.call(2)
        one.tape.recording = True
        for merge in range(merges):
            one.call(1 + merge)
        one.tape.recording = False
        made = 1
        for _ in range(replays):
            if dice.random() < 0.01:
                time.sleep(dice.random() * 0.002)
            for step in one.tape.steps:
                step()
            for _ in range(between.choice((0, 0, 0, 1, 2))):
                one.call(between.randrange(1, 5))
                made += 1
        return made

    eager = together(ranks, body)[0]
    assert eager > replays // 4
    assert_all_right(ranks, merges * replays + eager)


@pytest.mark.parametrize("merges", [1, 2, 3])
def test_a_thousand_replays_among_eager_calls(make: Make, merges: int) -> None:
    check_replays(make, merges, 1000)


def test_replays_of_three_ranks(make: Make) -> None:
    check_replays(make, 2, 100, n=3)


def check_absence(make: Make, n: int = 3, missing: int = 2, patience: float = 0.5) -> list[PutRank]:
    """A rank stops coming: the others name it once, and no call after that waits or is answered."""
    ranks = make(n)
    together(ranks, lambda one: one.call(2))
    others = [one for one in ranks if one.rank != missing]
    for one in ranks:
        one.group.exchange_timeout_s = patience
    started = time.monotonic()
    together(others, lambda one: [one.call(3) for _ in range(5)])
    assert time.monotonic() - started < 4 * patience, "one deadline, not five"
    for one in others:
        with pytest.raises(TransportTimeout, match=f"rank {missing} did not arrive in time in exchange 2") as told:
            one.over.poll(0)
        assert told.value.ranks == (missing,)
        assert one.over.given_up
        assert all(came is None for call in one.got[1:] for came in call.values()), "a call was answered"
    return ranks


@pytest.mark.parametrize(("n", "missing"), [(2, 0), (2, 1), (3, 2)])
def test_who_does_not_come_is_named(make: Make, n: int, missing: int) -> None:
    check_absence(make, n, missing)


def check_late(make: Make) -> None:
    """Who comes after it was given up finds the rows of its call whole, or no call's header; then it is told."""
    ranks = check_absence(make, 3, 2)
    one = ranks[2]
    one.job.quiet()
    places = put_places(SHAPE, 3)
    one.own[places.status : places.counts] = 0  # as if no status had come yet: the headers say so too
    one.call(3)
    assert all(came in (True, None) for came in one.got[1].values()), "rows were overwritten under a good header"
    one.call(3)
    with pytest.raises(TransportTimeout, match="given this channel up"):
        one.over.poll(0)
    assert set(one.got[2].values()) == {None}


def test_who_comes_late_is_told_and_gets_no_torn_rows(make: Make) -> None:
    check_late(make)


def check_told_early(make: Make) -> None:
    """One rank gives up: another, who would wait for long yet, ends at once and names the same rank."""
    ranks = make(3)
    together(ranks, lambda one: one.call(2))
    first, second, missing = ranks
    first.group.exchange_timeout_s, second.group.exchange_timeout_s = 0.5, 8.0
    started = time.monotonic()
    together([first, second], lambda one: one.call(3))
    assert time.monotonic() - started < 4.0, "each waited for itself"
    for one in (first, second):
        with pytest.raises(TransportTimeout, match="rank 2 did not arrive in time in exchange 2"):
            one.over.poll(0)
        assert set(one.got[1].values()) == {None}
    missing.job.quiet()  # the others' rows are all here as well
    missing.call(3)
    assert set(missing.got[1].values()) == {None}, "a rank that was given up was answered"
    with pytest.raises(TransportTimeout, match="a peer has given this channel up"):
        missing.over.poll(0)


def test_one_rank_s_deadline_ends_the_others_wait(make: Make) -> None:
    check_told_early(make)


def check_slow_reader(make: Make) -> None:
    """A rank is given up while it reads: what is put once more has the same bits, but for the header."""
    ranks = make(2)
    slow, quick = ranks
    together(ranks, lambda one: one.call(4))
    quick.group.exchange_timeout_s = 0.3
    take = slow.own[: put_places(SHAPE, 2).capacity * 2].view(2, -1)[1]
    # Its rows of call 1 come, and it never takes them: the peer goes on, gives up, and goes on.
    together([quick], lambda one: [one.call(4) for _ in range(4)])
    slow.job.quiet()
    n, (send, recv) = 2, slow.buffers[0]
    t, h = SHAPE.result_rows(4, n)
    like = put_rig.wire_views(send, recv, n, t, h, SHAPE.head_dim, SHAPE.dtype, True)[1].blocks
    want = put_rig.block_of(like, 1, 0, 1, 4).flatten()
    assert torch.equal(take[32 : want.numel()], want[32:]), "the rows of a call that was not taken were overwritten"
    assert bool((take[:32] == 0xFF).all()), "it isn't told"


def test_rows_that_were_not_taken_stay(make: Make) -> None:
    check_slow_reader(make)


def test_a_rank_without_a_deadline_waits(make: Make) -> None:
    ranks = make(2)
    for one in ranks:
        one.group.exchange_timeout_s = None

    def body(one: PutRank) -> None:
        put_rig.late(one, 0.5)
        one.call(1)

    together(ranks, body)
    assert_all_right(ranks, 1)


def test_ranks_with_other_numbers_of_rows_find_it_in_the_header(make: Make) -> None:
    ranks = make(2)
    together(ranks, lambda one: one.call(2 + one.rank))
    assert [one.got[0][1 - one.rank] for one in ranks] == [None, None]
    together(ranks, lambda one: one.call(3))
    assert [one.got[1][1 - one.rank] for one in ranks] == [True, True]


@pytest.mark.parametrize("n", [2, 3, 7, 64])
def test_places_don_t_overlap_and_are_aligned(n: int) -> None:
    shape = MergeShape(max_tokens=9, num_heads=8 * n, head_dim=96, dtype=torch.float16, lse_base="2", channels=3)
    places = put_places(shape, n)
    begins = [0, places.staging, places.rows, places.credits, places.status, places.counts, places.total]
    needs = [n * places.capacity, n * places.capacity, 8 * n, 8 * n, 8 * n, 24]
    assert all(begin % 128 == 0 for begin in begins)
    assert all(b - a >= need for a, b, need in zip(begins[:-1], begins[1:], needs, strict=True))
    assert put_bytes(shape, n) == 3 * places.total


#: A text of the kernels, what is planted in its place, and the check that must find it.
PLANTED: dict[str, tuple[str, str, Callable[[Make], Any]]] = {
    "no wait for credits": (
        "target = count + p.first;", "target = p.first ? count + 1 : 0;", lambda make: check_back_to_back(make, 2),
    ),
    "a fixed target": ("target = count + p.first;", "target = p.first;", lambda make: check_back_to_back(make, 2)),
    "the count not advanced": (
        "store_relaxed(p.count, count + 1);", "store_relaxed(p.count, count + !count);",
        lambda make: check_back_to_back(make, 2),
    ),
    "no deadline": ("if (!p.deadline ||", "if (p.deadline ||", lambda make: check_absence(make, 2, 1)),
    "another deadline each time": (
        "n < p.ranks && !given_up && !told;", "n < p.ranks && !told;", lambda make: check_absence(make, 2, 1, 1.0),
    ),
    "a status not looked for in waiting": ("told = told_by_peers(p);", ";", check_told_early),
    "a status not looked at where all came": (
        "const u32 names = told_by_peers(p);", "const u32 names = lacking ? told_by_peers(p) : 0;",
        check_told_early,
    ),
    "a status told to nobody": (
        "store_relaxed(p.status + (u64)p.rank * 8, (u64)(u32)call << 32 | missing | WHOLE);", "", check_told_early,
    ),
    "rows moved after it was given up": (
        "    if (__syncthreads_or(load_relaxed(p.state) != RECORD_CLEAR)) {", "    if (0) {", check_slow_reader,
    ),
    "the header left as it was": ("*(u64 *)(to + 8 * i) = GIVEN_UP;", ";", check_slow_reader),
    "a header that says so not looked at": (
        "if (!told) return;", "return;", check_late,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "check"),
    [((there, instead), check) for there, instead, check in PLANTED.values()],
    indirect=["make"],
    ids=list(PLANTED),
)
def test_a_planted_mistake_is_found(make: Make, check: Callable[[Make], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    make(2)  # it compiles, however long that takes: what is found is what it does
    monkeypatch.setattr(put_rig, "DEADLINE_S", 2.0)
    monkeypatch.setattr("tests.world.RUN_TIMEOUT_S", 9.0)

    def often() -> None:
        for _ in range(10):  # as it may take luck
            check(make)

    with pytest.raises((AssertionError, TransportTimeout, pytest.fail.Exception)):
        often()
