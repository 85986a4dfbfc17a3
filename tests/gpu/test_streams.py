"""Rows 26 to 28 of the list of faults on one GPU: slots, channels and producers on streams of every kind."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.gpu.rig import (
    BF16,
    ON_GPU,
    ONE_GPU,
    Replay,
    by_call,
    device_sleep,
    fetched,
    finished,
    here,
    join,
    merger_for,
    mine,
    needs_gpu,
    on,
    poisoned,
    run,
    settle,
    side_streams,
    together,
)
from tests.oracle import NAN, Case, judge, make_case
from tests.world import in_threads, meet

pytestmark = ONE_GPU
RANKS = pytest.mark.parametrize("n", [2, 4])
RANKS_8 = pytest.mark.parametrize("n", [2, 4, 8])
TRIPLES = 30


def warm_up() -> None:
    """What a rank uses for the first time may wait for the device, and so for the others."""
    device_sleep(0.001)
    poisoned((2, 2), BF16).fill_(NAN)
    settle()


def back_to_back(group: Any, cases: list[Case], seed: int, delayed: bool) -> Any:
    """Three calls at a time; a rank's stream sleeps before them, its reader between, and inputs go bad at once."""
    rank, rng = group.rank, random.Random(f"{seed}/{group.rank}")
    data = mine(cases, rank)
    warm_up()
    with merger_for(group, {"num_heads": group.size, "head_dim": 128}) as merger:
        together()
        results = []
        for i, (partial, lse) in enumerate(data):
            if delayed and i % 3 == 0 and rng.random() < 0.5:
                device_sleep(rng.random() * 0.5)
            out, out_lse = merger.merge(partial, lse, return_lse=True, tag=i)
            partial.fill_(NAN)
            lse.fill_(NAN)
            if delayed and rank == group.size - 1 and i % 3 == 1:
                device_sleep(0.3)
            results.append((out.clone(), out_lse.clone()))
            out.fill_(NAN)
        return finished(merger, results)


@RANKS_8
@pytest.mark.parametrize("delayed", [False, True], ids=["at full speed", "delayed"])
def test_calls_back_to_back_keep_their_slots_apart(n: int, rng: torch.Generator, seed: int, delayed: bool) -> None:
    """Row 26, with a slow reader on the last rank."""
    cases = [make_case(rng, n, b=(32, 1, 20)[i % 3] if n < 8 else 5, h=n, d=128) for i in range(3 * TRIPLES)]
    for i, results in enumerate(by_call(run(n, back_to_back, cases, seed, delayed))):
        judge(results, cases[i], what=f"call {i}")


def slow_reader(group: Any, cases: list[Case]) -> Any:
    """Replays of one graph, whose result a slow stream reads before the next replay may write it."""
    rank = group.rank
    data = mine(cases, rank)
    (reader,) = side_streams(1)
    warm_up()
    with merger_for(group) as merger:
        replay = Replay(merger, cases[0], rank)
        kept = [poisoned(replay.out.shape, BF16) for _ in cases]
        together()
        for one, into in zip(data, kept, strict=True):
            replay(*one)
            join(here(), reader)
            with on(reader):
                if rank == 0:
                    device_sleep(0.2)
                into.copy_(replay.out)
            join(reader, here())
        return finished(merger, kept)


@RANKS
def test_a_slow_reader_gets_what_it_came_for(n: int, rng: torch.Generator) -> None:
    cases = [make_case(rng, n, b=6) for _ in range(20)]
    for i, results in enumerate(by_call(run(n, slow_reader, cases))):
        judge(results, cases[i], what=f"replay {i}")


def first_use(group: Any, case: Case) -> Any:
    """The other ranks launch a kernel for the first time while rank 0 waits for them on the GPU."""
    rank = group.rank
    (one,) = mine([case], rank)
    x = torch.linspace(0, 1, 64, device=one[1].device)
    with merger_for(group) as merger:
        together()
        results = [merger.merge(*one, return_lse=True)] if rank == 0 else []
        meet()
        if rank:
            torch.nextafter(x, -x)  # in torch's library: one that is compiled as it is needed is loaded then
            results = [merger.merge(*one, return_lse=True)]
        return finished(merger, results)


@needs_gpu
@RANKS
def test_a_kernel_may_be_launched_for_the_first_time_while_a_rank_waits(n: int, rng: torch.Generator) -> None:
    """Loaded then, it would wait on the device for the kernel that waits: the deadline came instead of the rows."""
    case = make_case(rng, n, b=6)
    (results,) = by_call(run(n, first_use, case))
    judge(results, case)


ROUNDS = 120


def two_streams(group: Any, rounds: list[list[Case]], seed: int, threads: bool) -> Any:
    """Two channels, a stream each; even ranks begin with the one, odd ranks with the other."""
    rank, rng = group.rank, random.Random(f"{seed}/{group.rank}")
    streams = side_streams(2)
    data = [mine(cases, rank) for cases in rounds]
    warm_up()
    results: list[list[Any]] = [[], []]
    shape = {"channels": 2, "num_heads": group.size, "head_dim": 64}

    def take(merger: Any, k: int, i: int) -> None:
        with on(streams[k]):
            results[k].append(merger.merge(*data[k][i], return_lse=True, channel=k, tag=i))

    def channel(merger: Any, k: int) -> None:
        for i in range(ROUNDS):
            take(merger, k, i)

    with merger_for(group, shape) as merger:
        together()
        if threads:
            in_threads(lambda: channel(merger, 0), lambda: channel(merger, 1))
        else:
            for i in range(ROUNDS):
                for k in (rank % 2, 1 - rank % 2) if ON_GPU else (0, 1):
                    if rng.random() < 0.1:
                        with on(streams[k]):
                            device_sleep(rng.random() * 0.3)
                    take(merger, k, i)
        for k in range(2):
            with on(streams[k]):
                settle()
        merger.check()
        return [fetched(one) for one in results]


@RANKS
@pytest.mark.parametrize("threads", [False, True], ids=["one thread", "a thread each"])
def test_two_channels_on_two_streams(n: int, rng: torch.Generator, seed: int, threads: bool) -> None:
    """Rows 27 and 40b: another B on each, which changes from round to round."""
    sizes = [torch.randint(1, 8, (ROUNDS,), generator=rng).tolist() for _ in range(2)]
    rounds = [[make_case(rng, n, b=b, h=n, d=64) for b in sizes[k]] for k in range(2)]
    by_rank = run(n, two_streams, rounds, seed, threads)
    for k in range(2):
        for i, results in enumerate(by_call([one[k] for one in by_rank])):
            judge(results, rounds[k][i], what=f"channel {k} round {i}")


def with_a_producer(group: Any, cases: list[Case]) -> Any:
    """A side stream fills the inputs, another one calls, a third reads; events alone join them."""
    rank = group.rank
    data = mine(cases, rank)
    producer, caller, reader = side_streams(3)
    warm_up()
    with merger_for(group) as merger:
        partial, lse = poisoned(data[0][0].shape, BF16), poisoned(data[0][1].shape, torch.float32)
        kept = [(poisoned((6, 4, 32), BF16), poisoned((6, 4), torch.float32)) for _ in cases]
        together()
        for i, (fresh, fresh_lse) in enumerate(data):
            with on(producer):
                device_sleep(0.1 * ((rank + i) % 3))
                partial.copy_(fresh)
                lse.copy_(fresh_lse)
            join(producer, caller)
            with on(caller):
                out, out_lse = merger.merge(partial, lse, return_lse=True, tag=i)
                partial.fill_(NAN)
            join(caller, reader)
            with on(reader):
                kept[i][0].copy_(out)
                kept[i][1].copy_(out_lse)
            join(reader, caller)  # `out` is the caller's memory
            join(caller, producer)
        with on(caller):
            settle()
        return finished(merger, kept)


@RANKS
def test_a_producer_on_a_side_stream(n: int, rng: torch.Generator) -> None:
    """Row 28: a call from a stream that is not the default one, nor the one that the merger was made on."""
    cases = [make_case(rng, n, b=6) for _ in range(30)]
    for i, results in enumerate(by_call(run(n, with_a_producer, cases))):
        judge(results, cases[i], what=f"call {i}")


def one_channel_wanders(group: Any, cases: list[Case]) -> Any:
    """Calls of one channel from one stream and then another, in order by events; ranks change at other times."""
    rank = group.rank
    data = mine(cases, rank)
    streams = side_streams(2)
    with merger_for(group) as merger:
        together()
        results, before = [], here()
        for i, one in enumerate(data):
            stream = streams[(i // (1 + rank)) % 2]
            join(before, stream)
            with on(stream):
                results.append(merger.merge(*one, return_lse=True))
            before = stream
        join(before, here())
        return finished(merger, results)


@RANKS
def test_calls_of_one_channel_may_wander_between_streams(n: int, rng: torch.Generator) -> None:
    cases = [make_case(rng, n, b=1 + i % 6) for i in range(30)]
    for i, results in enumerate(by_call(run(n, one_channel_wanders, cases))):
        judge(results, cases[i], what=f"call {i}")
