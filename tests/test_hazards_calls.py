"""Rows 25 to 28, 40c and 40d of the list of faults, on CPU: when calls come, from where, of what size."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcpcomm
from tests.oracle import INF, Case, judge, make_case, same_bits
from tests.steps import Step, contiguous, merge_steps, step_results
from tests.world import (
    World,
    config_for,
    dawdle,
    in_threads,
    meet,
    merger_for,
    outcome,
    rank_of,
    shape_of,
    size_of,
)

F32 = torch.float32


def one_rank_late(group: Any, case: Case, late: int, seed: int) -> Any:
    rank, rng = rank_of(group), random.Random(seed)
    if rank == late:
        dawdle(rng, 0.4)
    with merger_for(group) as merger:
        results = []
        for _ in range(2):
            if rank == late:
                dawdle(rng, 0.4)
            results.append(merger.merge(case.outs[rank], case.lses[rank]))
        return results


def test_a_late_rank_is_waited_for(some: World, rng: torch.Generator, seed: int) -> None:
    """Row 25: before construction, the first call and the next one."""
    case = make_case(rng, some.n, b=5)
    for late in (0, some.n - 1):
        for results in step_results(some.run(one_rank_late, case, late, seed)):
            judge(results, case)


def test_slots_are_not_reused_while_a_slow_rank_still_reads(peers: World, rng: torch.Generator, seed: int) -> None:
    """Row 26: calls back to back, ranks delayed at random, fresh data each; results kept to the end."""
    cases = [make_case(rng, peers.n, b=1 + i % 5, h=peers.n, d=16) for i in range(30)]
    shape = {"num_heads": peers.n, "head_dim": 16}
    by_step = step_results(peers.run(merge_steps, shape, [Step(c, {"return_lse": True}) for c in cases], None, seed))
    for i, results in enumerate(by_step):
        judge(results, cases[i], what=f"call {i}")


def two_channels(group: Any, rounds: list[list[Case]], seed: int) -> Any:
    """Each channel has a thread; they start on the ranks in opposite order, and sleep at random."""
    rank = rank_of(group)
    shape = {"channels": 2, "dtype": F32, "num_heads": size_of(group), "head_dim": 8}
    with merger_for(group, shape) as merger:
        gate = threading.Event()

        def channel(k: int) -> list[torch.Tensor]:
            rng = random.Random(f"{seed}/{rank}/{k}")
            if (rank + k) % 2:
                assert gate.wait(10)  # the other channel has been in its first merge, or is in it and stuck without us
            results = []
            for i, case in enumerate(rounds[k]):
                dawdle(rng, 0.001)
                if not (rank + k) % 2:
                    gate.set()
                results.append(merger.merge(case.outs[rank], case.lses[rank], channel=k, tag=i))
            return results

        return in_threads(lambda: channel(0), lambda: channel(1))


def test_two_channels_in_opposite_order_never_mix_or_wait_for_each_other(
    peers: World, rng: torch.Generator, seed: int
) -> None:
    """Rows 27 and 40b: different B on each channel, from two threads."""
    n = peers.n
    rounds = [
        [make_case(rng, n, b=b, h=n, d=8, dtype=F32) for b in torch.randint(1, 9, (40,), generator=rng).tolist()]
        for _ in range(2)
    ]
    by_rank = peers.run(two_channels, rounds, seed)
    for k in range(2):
        for i, results in enumerate(step_results([r[k] for r in by_rank])):
            judge(results, rounds[k][i], what=f"channel {k} round {i}")


def channels_in_turn(group: Any, cases: list[Case], order: list[int]) -> Any:
    rank = rank_of(group)
    with merger_for(group, {"channels": 3}) as merger:
        return [merger.merge(c.outs[rank], c.lses[rank], channel=k) for c, k in zip(cases, order, strict=True)]


def test_channels_taken_in_any_order_from_one_thread(peers: World, rng: torch.Generator) -> None:
    order = [2, 0, 0, 1, 2, 1, 0]
    cases = [make_case(rng, peers.n, b=3 + i) for i in range(len(order))]
    for i, results in enumerate(step_results(peers.run(channels_in_turn, cases, order))):
        judge(results, cases[i], what=f"call {i}")


def from_another_thread(group: Any, cases: list[Case], seed: int) -> Any:
    """A producer thread fills one buffer again and again; the merge waits for it by an event."""
    rank = rank_of(group)
    rng = random.Random(f"{seed}/{rank}")
    partial, lse = torch.empty_like(cases[0].outs[rank]), torch.empty_like(cases[0].lses[rank])
    full, free = threading.Semaphore(0), threading.Semaphore(1)

    def produce() -> None:
        for case in cases:
            assert free.acquire(timeout=10)
            dawdle(rng)
            partial.copy_(case.outs[rank])
            lse.copy_(case.lses[rank])
            full.release()

    with merger_for(group) as merger:  # made here, used on another thread

        def consume() -> list[Any]:
            results = []
            for _ in cases:
                assert full.acquire(timeout=10)
                results.append(merger.merge(partial, lse, return_lse=True))
                free.release()  # from here on the inputs are overwritten: nothing may still read them
            return results

        return in_threads(produce, consume)[1]


def test_inputs_may_be_overwritten_as_soon_as_a_merge_returns(peers: World, rng: torch.Generator, seed: int) -> None:
    """Rows 23 and 28 with threads for streams: the producer runs elsewhere, B=1 and more."""
    for b in (1, 9):
        cases = [make_case(rng, peers.n, b=b) for _ in range(12)]
        for i, results in enumerate(step_results(peers.run(from_another_thread, cases, seed))):
            judge(results, cases[i], what=f"round {i}")


@pytest.mark.parametrize("d", [80, 96, 192, 576])
def test_rows_of_every_width_with_b_changing_from_call_to_call(some: World, rng: torch.Generator, d: int) -> None:
    """Row 40c."""
    n = some.n
    cases = [make_case(rng, n, b=b, h=n, d=d) for b in (1, 32, 2, 7, 31, 1, 3)]
    steps = [Step(c, {"return_lse": True}) for c in cases]
    for i, results in enumerate(step_results(some.run(merge_steps, {"head_dim": d, "num_heads": n}, steps))):
        judge(results, cases[i], what=f"call {i}")


def test_a_weight_that_underflows_leaves_nothing_behind(peers: World, rng: torch.Generator) -> None:
    """Row 40d: LSE 200 below the others, then a normal call, ten times over."""
    n = peers.n
    cases = []
    for i in range(10):
        low = make_case(rng, n, b=4)
        low.lses[i % n] -= 200
        cases += [low, make_case(rng, n, b=4)]
    for i, results in enumerate(
        step_results(peers.run(merge_steps, {}, [Step(c, {"return_lse": True}) for c in cases]))
    ):
        judge(results, cases[i], what=f"call {i}")


def interleaved_mergers(group: Any, wide: list[Case], narrow: list[Case]) -> Any:
    rank = rank_of(group)
    results = []
    with merger_for(group, {"dtype": F32}) as a:
        results.append(a.merge(wide[0].outs[rank], wide[0].lses[rank]))
        with merger_for(group, {"lse_base": "2", "head_dim": 16, "scatter": "none", "max_tokens": 8}) as b:
            for x, y in zip(wide[1:], narrow, strict=True):
                results.append(b.merge(y.outs[rank], y.lses[rank]))
                results.append(a.merge(x.outs[rank], x.lses[rank]))
        results.append(a.merge(wide[0].outs[rank], wide[0].lses[rank]))  # b is closed: a is not
    return results


def test_two_mergers_of_one_group_interleaved(peers: World, rng: torch.Generator) -> None:
    """Section 5: mixed freely with other mergers; closing one leaves the other working."""
    n = peers.n
    wide = [make_case(rng, n, b=3 + i, dtype=F32) for i in range(6)]
    narrow = [make_case(rng, n, b=1 + i, d=16, base="2") for i in range(5)]
    first, *between, last = step_results(peers.run(interleaved_mergers, wide, narrow))
    judge(first, wide[0])
    judge(last, wide[0])
    for i in range(5):
        judge(between[2 * i], narrow[i], "none")
        judge(between[2 * i + 1], wide[i + 1])


def mergers_in_two_threads(group: Any, cases: list[list[Case]], seed: int) -> Any:
    """Two mergers, a thread each, entered in opposite order."""
    rank = rank_of(group)
    with merger_for(group) as a, merger_for(group, {"scatter": "none"}) as b:
        entered = threading.Event()

        def calls(k: int) -> list[torch.Tensor]:
            rng = random.Random(f"{seed}/{rank}/{k}")
            if (rank + k) % 2:
                assert entered.wait(10)
            results = []
            for case in cases[k]:
                entered.set()
                dawdle(rng, 0.001)
                results.append((a, b)[k].merge(case.outs[rank], case.lses[rank]))
            return results

        return in_threads(lambda: calls(0), lambda: calls(1))


def test_two_mergers_entered_in_opposite_order(some: World, rng: torch.Generator, seed: int) -> None:
    """Row 40b."""
    n = some.n
    cases = [[make_case(rng, n, b=1 + (i * (k + 2)) % 7) for i in range(15)] for k in range(2)]
    by_rank = some.run(mergers_in_two_threads, cases, seed)
    for k, scatter in enumerate(("heads", "none")):
        for i, results in enumerate(step_results([r[k] for r in by_rank])):
            judge(results, cases[k][i], scatter, f"merger {k} call {i}")


# ---------------------------------------------------------------- groups


def in_one_of_two_subgroups(group: Any, case: Case) -> Any:
    """Of [0, 2] and [1, 3] only the second builds a merger; the others go on to something else."""
    mine = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][dist.get_rank() % 2]
    if dist.get_rank() % 2 == 0:
        return None
    rank = dist.get_rank(mine)
    with merger_for(mine) as merger:
        return merger.merge(case.outs[rank], case.lses[rank])


def test_only_one_of_two_subgroups_builds_a_merger(pool: Any, rng: torch.Generator) -> None:
    """Section 6: never a world-wide collective; ranks outside the group take no part, and need not."""
    case = make_case(rng, 2)
    results = World("gloo_a2a", 4, pool).run(in_one_of_two_subgroups, case)
    judge(results[1::2], case)


def two_subgroups_at_once(group: Any, cases: list[Case], seed: int) -> Any:
    halves = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    which = dist.get_rank() % 2
    rank = dist.get_rank(halves[which])
    rng = random.Random(f"{seed}/{dist.get_rank()}")
    case = cases[which]
    with merger_for(group, {"num_heads": 8}) as all_four, merger_for(halves[which]) as half:
        results = []
        for _ in range(5):
            dawdle(rng)
            results.append(half.merge(case.outs[rank], case.lses[rank]))
        whole = all_four.merge(cases[2].outs[dist.get_rank()], cases[2].lses[dist.get_rank()])
    assert all(same_bits(r, results[0]) for r in results)
    return results[0], whole


def test_two_subgroups_and_the_whole_group_at_once(pool: Any, rng: torch.Generator, seed: int) -> None:
    cases = [make_case(rng, 2), make_case(rng, 2), make_case(rng, 4, h=8)]
    results = World("gloo_a2a", 4, pool).run(two_subgroups_at_once, cases, seed)
    judge([half for half, _ in results[0::2]], cases[0])
    judge([half for half, _ in results[1::2]], cases[1])
    judge([whole for _, whole in results], cases[2])


def in_group_order(group: Any, case: Case, order: list[int]) -> Any:
    mine = dist.new_group(order, sort_ranks=False)
    if dist.get_rank() not in order:
        return None
    rank = order.index(dist.get_rank())
    assert dist.get_group_rank(mine, dist.get_rank()) == rank, "torch sorted the ranks after all"
    with merger_for(mine) as merger:
        return merger.merge(case.outs[rank], case.lses[rank], return_lse=True)


@pytest.mark.parametrize("order", [[3, 1], [2, 0, 3], [3, 1, 0, 2]], ids=str)
def test_slices_follow_group_ranks_in_an_unordered_group(pool: Any, rng: torch.Generator, order: list[int]) -> None:
    """Section 2: slice r belongs to group rank r, also when the group's global ranks are not in order."""
    import inspect

    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        pytest.skip("this torch's new_group always sorts the ranks")
    case = make_case(rng, len(order))
    results = World("gloo_a2a", 4, pool).run(in_group_order, case, order)
    judge([results[global_rank] for global_rank in order], case)


class Coordinator:
    """What an engine hands over in place of a ProcessGroup."""

    def __init__(self, group: Any, with_cpu_group: bool) -> None:
        self.rank_in_group, self.world_size, self.device_group = group.rank(), group.size(), group
        if with_cpu_group:
            self.cpu_group = group


def by_every_kind_of_group(group: Any, case: Case) -> Any:
    rank, config, shape = rank_of(group), config_for(group), shape_of(4)
    results = []
    for given in (None, Coordinator(group, False), Coordinator(group, True)):
        with dcpcomm.DCPMerger(given, shape, config=config) as merger:
            results.append(merger.merge(case.outs[rank], case.lses[rank]))
    return results


def test_default_group_and_coordinators(pool: Any, rng: torch.Generator) -> None:
    """Section 5: None is the default group; a coordinator has device_group, and perhaps cpu_group."""
    case = make_case(rng, 4)
    for results in step_results(World("gloo_a2a", 4, pool).run(by_every_kind_of_group, case)):
        judge(results, case)


def group_after_the_merger(group: Any, case: Case) -> Any:
    rank = rank_of(group)
    with merger_for(group) as merger:
        got = contiguous(merger.merge(case.outs[rank], case.lses[rank]))
        mine = torch.tensor([float(rank)])
        dist.all_reduce(mine, group=group)  # the engine's own traffic, between two merges
        again = merger.merge(case.outs[rank], case.lses[rank])
    meet()
    dist.all_reduce(mine, group=group)
    assert same_bits(got, again)
    return got, mine.item()


def test_the_engines_own_traffic_on_the_group_goes_on(pool: Any, rng: torch.Generator) -> None:
    case = make_case(rng, 3)
    results = World("gloo_a2a", 3, pool).run(group_after_the_merger, case)
    judge([got for got, _ in results], case)
    assert [total for _, total in results] == [9.0] * 3


def closed(group: Any, case: Case) -> Any:
    rank = rank_of(group)
    merger = merger_for(group)
    got = merger.merge(case.outs[rank], case.lses[rank])
    text, printed = merger.explain(), str(merger.explain())
    merger.close()
    merger.close()
    refused = outcome(merger.merge, case.outs[rank], case.lses[rank])
    with merger_for(group) as again:
        assert same_bits(again.merge(case.outs[rank], case.lses[rank]), got)
    return got, refused, f"{text} {printed}"


def test_close_twice_then_a_clear_refusal_then_a_new_merger(world: World, rng: torch.Generator) -> None:
    case = make_case(rng, world.n, b=3)
    results = world.run(closed, case)
    judge([got for got, _, _ in results], case)
    for _, refused, text in results:
        assert "DCPCommError" in refused.kinds, refused
        assert "close" in refused.text
        assert world.n == 1 or world.backend in text


def test_an_underflowing_weight_gives_the_lse_of_the_others(peers: World, rng: torch.Generator) -> None:
    """Row 40d at its edge: everything but one rank's weight is 0; its payload comes out as it is."""
    n = peers.n
    case = make_case(rng, n, b=4)
    case.lses -= 500
    case.lses[n - 1] += 500
    (results,) = step_results(peers.run(merge_steps, {}, [Step(case, {"return_lse": True})]))
    own = case.outs[n - 1].chunk(n, dim=1)
    assert all(same_bits(out, want) for (out, _), want in zip(results, own, strict=True))
    assert all((lse > -INF).all() for _, lse in results)
    judge(results, case)
