"""Rows 21 to 25 of the list of faults: captured merges on one GPU, every rank a stream, mixed with eager calls."""

from __future__ import annotations

import gc
import random
import time
from typing import Any

import pytest
import torch

from dcpcomm.graphs import captured
from tests.gpu.rig import (
    DEVICE,
    F16,
    F32,
    ONE_GPU,
    Replay,
    blank_empty_rows,
    by_call,
    capture,
    fetched,
    finished,
    merger_for,
    mine,
    needs_gpu,
    on_device,
    poison_heap,
    poisoned,
    room_for,
    row_counts,
    run,
    settle,
    together,
)
from tests.oracle import NAN, Case, judge, make_case
from tests.test_projection_promises import L, V, judge_projected, latent_case

pytestmark = ONE_GPU
RANKS = pytest.mark.parametrize("n", [2, 4])
RANKS_8 = pytest.mark.parametrize("n", [2, 4, 8])


def larger_after_capture(group: Any, cases: list[Case], most: int) -> Any:
    rank = group.rank
    data = mine(cases, rank)
    with merger_for(group, {"max_tokens": most, "num_heads": 2 * group.size}) as merger:
        replay = Replay(merger, cases[0], rank)
        results = [replay(*data[0])]
        for one in data[1:-1]:  # up to max_tokens, and past it
            poison_heap(one[0])
            results.append(merger.merge(*one, return_lse=True))
        results.append(replay(*data[-1]))
        return finished(merger, results)


@RANKS_8
def test_a_graph_survives_a_far_larger_eager_call(n: int, rng: torch.Generator) -> None:
    """Row 21: nothing captured is freed or moved."""
    most = 200
    cases = [make_case(rng, n, b=b, h=2 * n) for b in (8, most, 3, 2 * most + 1, 8)]
    for i, results in enumerate(by_call(run(n, larger_after_capture, cases, most))):
        judge(results, cases[i], what=f"call {i}, B={cases[i].outs.shape[1]}")


def lengths_in_place(group: Any, cases: list[Case], lens: torch.Tensor, starts: torch.Tensor) -> Any:
    """`lens` [N, rounds, S], `starts` [rounds, S + 1]; dtypes differ between ranks."""
    rank = group.rank
    dtypes = [torch.int32, torch.int64]
    data = mine(cases, rank)
    all_lens, all_starts = on_device(lens[rank].to(dtypes[rank % 2])), on_device(starts.to(dtypes[rank // 2 % 2]))
    seq_lens, query_start_loc = all_lens[0].clone(), all_starts[0].clone()
    with merger_for(group) as merger:
        replay = Replay(merger, cases[0], rank, seq_lens=seq_lens, query_start_loc=query_start_loc)
        results = []
        for i, one in enumerate(data):
            seq_lens.copy_(all_lens[i])
            query_start_loc.copy_(all_starts[i])
            results.append(replay(*one))
        return finished(merger, results)


@RANKS
def test_a_replay_sees_new_seq_lens(n: int, rng: torch.Generator) -> None:
    """Row 22; some requests without rows, and padding of changing length."""
    rounds, b, requests = 12, 11, 4
    lens = torch.randint(0, 3, (n, rounds, requests), generator=rng)
    starts = torch.zeros(rounds, requests + 1, dtype=torch.int64)
    starts[:, 1:] = torch.randint(0, b + 1, (rounds, requests), generator=rng).sort(1).values
    cases = []
    for i in range(rounds):
        case = make_case(rng, n, b=b)
        case.counts = torch.stack([row_counts(lens[rank, i], starts[i], b) for rank in range(n)])
        cases.append(blank_empty_rows(case))
    for i, results in enumerate(by_call(run(n, lengths_in_place, cases, lens, starts))):
        judge(results, cases[i], what=f"replay {i}")


def counts_in_place(group: Any, cases: list[Case]) -> Any:
    rank = group.rank
    data = mine(cases, rank)
    every = [on_device(case.counts[rank].to([torch.int64, torch.int32][rank % 2])) for case in cases]
    counts = every[0].clone()
    with merger_for(group) as merger:
        replay = Replay(merger, cases[0], rank, valid_counts=counts)
        results = []
        for one, fresh in zip(data, every, strict=True):
            counts.copy_(fresh)
            results.append(replay(*one))
        return finished(merger, results)


@RANKS
def test_a_replay_sees_new_valid_counts(n: int, rng: torch.Generator) -> None:
    """Row 22; a row that is empty everywhere is among them."""
    cases = []
    for i in range(12):
        case = make_case(rng, n, b=9)
        case.counts = torch.randint(0, 3, (n, 9), generator=rng)
        case.counts[:, i % 9] = 0
        cases.append(blank_empty_rows(case))
    for i, results in enumerate(by_call(run(n, counts_in_place, cases))):
        judge(results, cases[i], what=f"replay {i}")


def produced_just_before(group: Any, outs: torch.Tensor, lses: torch.Tensor) -> Any:
    """In the graph: the next row is picked by an index in device memory, and merged. No wait between replays."""
    rank, rounds = group.rank, outs.shape[1]
    fresh, fresh_lse = on_device(outs[rank]), on_device(lses[rank])
    partial, lse = torch.empty_like(fresh[:1]), torch.empty_like(fresh_lse[:1])
    index = torch.zeros(1, dtype=torch.int64, device=fresh.device)
    with merger_for(group, {"max_tokens": 1, "num_heads": outs.shape[2], "head_dim": outs.shape[3]}) as merger:
        out, out_lse = room_for(merger, 1)
        kept, kept_lse = poisoned((rounds, *out.shape[1:]), out.dtype), poisoned((rounds, *out_lse.shape[1:]), F32)

        def produce() -> None:
            torch.index_select(fresh_lse, 0, index, out=lse)
            torch.index_select(fresh, 0, index, out=partial)

        def step() -> None:
            produce()
            out_lse.copy_(merger.merge(partial, lse, out=out, return_lse=True)[1])
            index.add_(1)

        produce()  # what is used for the first time may wait for the device
        index.add_(1)
        graph = capture(step)
        index.zero_()
        for i in range(rounds):
            graph.replay()
            kept[i : i + 1].copy_(out)
            kept_lse[i : i + 1].copy_(out_lse)
        return finished(merger, [(kept, kept_lse)])[0]


@RANKS
def test_rows_written_just_before_the_merge_are_merged(n: int, rng: torch.Generator) -> None:
    """Row 23: B=1, 1000 replays with fresh data."""
    case = make_case(rng, n, b=1000, h=n, d=128)
    judge(run(n, produced_just_before, case.outs, case.lses), case)


TURNS = ("replay", "replay", "replay", "eager", "replay", "channel 1", "replay", "replay", "channel 1", "eager")


def taken_in_turn(group: Any, cases: list[Case]) -> Any:
    rank = group.rank
    data = mine(cases, rank)
    with merger_for(group, {"channels": 2}) as merger:
        replay = Replay(merger, cases[0], rank)
        results = []
        for how, one in zip(TURNS, data, strict=True):
            if how == "replay":
                results.append(replay(*one))
            else:
                poison_heap(one[0])
                results.append(merger.merge(*one, return_lse=True, channel=int(how == "channel 1")))
        return finished(merger, results)


@RANKS_8
def test_replays_and_eager_calls_and_another_channel_in_turn(n: int, rng: torch.Generator) -> None:
    """Row 24, with no wait in between."""
    cases = [make_case(rng, n, b=6) for _ in TURNS]
    for i, results in enumerate(by_call(run(n, taken_in_turn, cases))):
        judge(results, cases[i], what=f"call {i}, {TURNS[i]}")


def some_replay(group: Any, cases: list[Case], seed: int) -> Any:
    """In every round each rank tosses a coin: a replay, or an eager call. The last rank has captured nothing."""
    rank, rng = group.rank, random.Random(f"{seed}/{group.rank}")
    data = mine(cases, rank)
    with merger_for(group) as merger:
        replay = Replay(merger, cases[0], rank, here=rank != group.size - 1, tag=5)
        results = []
        for one in data:
            if replay.graph is not None and (rank == 0 or rng.random() < 0.5):
                results.append(replay(*one))
            else:
                results.append(merger.merge(*one, return_lse=True, tag=5))
        return finished(merger, results)


@RANKS
def test_a_replay_here_meets_an_eager_call_there(n: int, rng: torch.Generator, seed: int) -> None:
    """Section 10: both sides agree on channel, tag, B, chunk and shape, and on nothing else."""
    cases = [make_case(rng, n, b=6) for _ in range(20)]
    for i, results in enumerate(by_call(run(n, some_replay, cases, seed))):
        judge(results, cases[i], what=f"round {i}")


def one_rank_sleeps(group: Any, cases: list[Case], late: int) -> Any:
    rank = group.rank
    data = mine(cases, rank)

    def doze() -> None:
        if rank == late:
            time.sleep(1.0)

    with merger_for(group) as merger:
        together()
        doze()
        results = [merger.merge(*data[0], return_lse=True)]
        together()
        doze()
        replay = Replay(merger, cases[1], rank)
        doze()
        results.append(replay(*data[1]))
        doze()
        results.append(merger.merge(*data[2], return_lse=True))
        return finished(merger, results)


@RANKS
def test_a_rank_that_sleeps_is_waited_for(n: int, rng: torch.Generator) -> None:
    """Row 25: before the first call, the capture, and the replay."""
    for late in (0, n - 1):
        cases = [make_case(rng, n, b=4) for _ in range(3)]
        for i, results in enumerate(by_call(run(n, one_rank_sleeps, cases, late))):
            judge(results, cases[i], what=f"rank {late} late, call {i}")


LAYERS = 12


def many_layers(group: Any, rounds: list[list[Case]]) -> Any:
    """Two graphs of many merges each, of another B and by channel in turn, replayed one after the other."""
    rank = group.rank
    results: list[list[Any]] = []
    with merger_for(group, {"channels": 2, "dtype": F16, "num_heads": group.size}) as merger:
        graphs = []
        for cases in rounds[:2]:
            data = mine(cases, rank)
            rooms = [room_for(merger, case.outs.shape[1]) for case in cases]

            def step(data: Any = data, rooms: Any = rooms) -> None:
                for i, ((partial, lse), (out, out_lse)) in enumerate(zip(data, rooms, strict=True)):
                    merged = merger.merge(partial, lse, out=out, return_lse=True, channel=i % 2, tag=i)
                    out_lse.copy_(merged[1])

            graphs.append((capture(step), data, rooms))
        every = [mine(cases, rank) for cases in rounds]
        together()
        for number, fresh in enumerate(every):
            graph, data, rooms = graphs[number % 2]
            for (partial, lse), (new, new_lse), (out, _) in zip(data, fresh, rooms, strict=True):
                partial.copy_(new)
                lse.copy_(new_lse)
                out.fill_(NAN)
            graph.replay()
            results.append([(out.clone(), lse.clone()) for out, lse in rooms])
        finished(merger, [])
    return [fetched(layers) for layers in results]


@RANKS
def test_graphs_of_many_merges_replayed_in_turn(n: int, rng: torch.Generator) -> None:
    rounds = [[make_case(rng, n, b=(3, 8)[i % 2], h=n, dtype=F16) for _ in range(LAYERS)] for i in range(6)]
    by_rank = run(n, many_layers, rounds)
    for i, cases in enumerate(rounds):
        for layer, case in enumerate(cases):
            judge([results[i][layer] for results in by_rank], case, what=f"round {i}, layer {layer}")


def chunks_in_a_graph(group: Any, cases: list[Case], scatter: str) -> Any:
    rank = group.rank
    data = mine(cases, rank)
    with (
        merger_for(group, {"max_tokens": 5, "scatter": scatter, "num_heads": group.size}) as merger,
        torch.inference_mode(),
    ):
        replay = Replay(merger, cases[0], rank)
        return finished(merger, [replay(*one) for one in data])


@RANKS
@pytest.mark.parametrize("scatter", ["heads", "tokens", "none"])
def test_more_rows_than_an_exchange_carries_in_a_graph(n: int, rng: torch.Generator, scatter: str) -> None:
    cases = [make_case(rng, n, b=4 * n if scatter == "tokens" else 17, h=n) for _ in range(3)]
    for i, results in enumerate(by_call(run(n, chunks_in_a_graph, cases, scatter))):
        judge(results, cases[i], scatter, f"replay {i}")


def projected(group: Any, order: str, cases: list[Any], dtype: torch.dtype) -> Any:
    """Two replays with new partials, then one with new weights, then an eager call."""
    from dcpcomm.projection import project

    rank = group.rank
    heads = slice(4 * rank, 4 * rank + 4)
    data = mine([case for case, _ in cases], rank)
    counts = [on_device(case.counts[rank].to(torch.int32)) for case, _ in cases]
    weights = [on_device(w[heads]) for _, w in cases]
    with merger_for(group, {"head_dim": L, "v_head_dim": V, "dtype": dtype}, projection=order) as merger:
        layer = merger.gather_w_uv(weights[0])
        partial, lse, count = data[0][0].clone(), data[0][1].clone(), counts[0].clone()
        out, out_lse = room_for(merger, len(partial), V)
        # cuBLAS takes memory when a thread first comes to it.
        project(partial, layer.whole) if order == "before" else project(partial[:, :4], layer.local, out)

        def step() -> None:
            _, merged = merger.merge_and_project(partial, lse, layer, valid_counts=count, out=out, return_lse=True)
            out_lse.copy_(merged)

        graph = capture(step)
        results = []
        for i, (new, new_lse) in enumerate(data[:3]):
            if i == 2:
                together()
                layer.refresh(weights[2])
                together()
            partial.copy_(new)
            lse.copy_(new_lse)
            count.copy_(counts[i])
            out.fill_(NAN)
            graph.replay()
            results.append((out.clone(), out_lse.clone()))
        results.append((merger.merge_and_project(*data[3], layer, valid_counts=counts[3]),))
        return finished(merger, results)


@RANKS
@pytest.mark.parametrize("order", ["before", "after"])
def test_merge_and_project_in_a_graph(n: int, rng: torch.Generator, order: str) -> None:
    """Weights refreshed in place are seen by the graph."""
    cases = [latent_case(rng, n, 5, F32) for _ in range(4)]
    used = [cases[0][1], cases[0][1], cases[2][1], cases[2][1]]
    for i, results in enumerate(by_call(run(n, projected, order, cases, F32))):
        got = [one if len(one) == 2 else one[0] for one in results]
        judge_projected(got, cases[i][0], used[i], what=f"call {i}, projection {order}")


@needs_gpu
def test_garbage_that_is_a_graph_ends_no_capture() -> None:
    """A graph that was part of a cycle is destroyed where garbage is collected: not while a thread captures."""
    x = torch.zeros(1, device=DEVICE)
    cycle: list[Any] = [captured(lambda: x.add_(1), DEVICE)]
    cycle.append(cycle)
    settle()

    def step() -> None:
        x.add_(1)
        junk = [[i] for i in range(5000)]
        x.add_(float(len(junk) > 0))

    before = gc.get_threshold()
    gc.set_threshold(1)
    del cycle
    try:
        graph = captured(step, DEVICE)
    finally:
        gc.set_threshold(*before)
    x.zero_()
    graph.replay()
    settle()
    assert float(x) == 2.0
