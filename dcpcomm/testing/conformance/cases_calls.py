"""Cases about calls that follow each other: slots, channels, slow readers, and results that stay."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from dcpcomm.graphs import captured
from dcpcomm.testing.conformance.case import Case, repeatable, works_in_graphs
from dcpcomm.testing.conformance.judging import JudgedBy, judge_merge, judge_script, same_bits
from dcpcomm.testing.conformance.partials import INF, NAN
from dcpcomm.testing.conformance.rank import Call, Played, Rank, Script, fetched, play, settle
from dcpcomm.testing.conformance.scene import Scene
from dcpcomm.testing.loopback import LoopbackWorld, provided_stream

__all__ = ["CALLS"]

REPEATS = 60
ROUNDS = 24
SLOW_CALLS = 48
JOIN_S = 30.0


def few(scene: Scene) -> Script:
    shape, rng = scene.shape(), scene.generator()
    return Script(shape, tuple(Call(scene.partials(rng, b, shape)) for b in (6, 6, 3, 6, 6, 1)))


def results_kept(at: Rank) -> list[Any]:
    """Each call's result as it came, and whether it was still the same after all later calls and the merger's end."""
    results, copies = [], []
    with at.merger(at.scene.shape()) as merger:
        for call in few(at.scene).calls:
            result = merger.merge(*at.mine(call.partials), return_lse=True)
            results.append(result)
            copies.append(fetched(*result))
    return [
        (copy, all(same_bits(t, c) for t, c in zip(fetched(*result), copy, strict=True)))
        for result, copy in zip(results, copies, strict=True)
    ]


def judge_results_kept(scene: Scene, got: list[Any]) -> None:
    for rank, results in enumerate(got):
        changed = [i for i, (_, kept) in enumerate(results) if not kept]
        assert not changed, f"rank {rank}: the results of calls {changed} were changed by later calls of the merger"
    judge_script(scene, few(scene), [[result for result, _ in results] for results in got])


def what_was_asked_for(at: Rank) -> Any:
    """Each call four times: with the LSE and without, into an `out` and not. What was returned, and (out, lse)."""
    results = []
    with at.merger(at.scene.shape()) as merger:
        for call in few(at.scene).calls:
            mine = at.mine(call.partials)
            whole, alone = merger.merge(*mine, return_lse=True), merger.merge(*mine)
            rooms = [torch.full_like(whole[0], NAN) for _ in range(2)]
            into, into_alone = merger.merge(*mine, out=rooms[0], return_lse=True), merger.merge(*mine, out=rooms[1])
            returned = [type(one).__name__ for one in (whole, alone, into, into_alone)]
            returned += [
                "its out" if one is room else "another" for one, room in zip((into[0], into_alone), rooms, strict=True)
            ]
            pairs = [(whole[0], whole[1]), (alone, whole[1]), (rooms[0], into[1]), (rooms[1], into[1])]
            results.append((returned, [fetched(*pair) for pair in pairs]))
        merger.check()
    return results


def judge_what_was_asked_for(scene: Scene, got: list[Any]) -> None:
    wanted = ["tuple", "Tensor", "tuple", "Tensor", "its out", "its out"]
    for rank, calls in enumerate(got):
        for i, (returned, _) in enumerate(calls):
            assert returned == wanted, (
                f"rank {rank}: call {i} with the LSE, without, into `out` with it, without, returned {returned}; "
                f"expected {wanted}"
            )
    for i, call in enumerate(few(scene).calls):
        for way in range(4):
            of_ranks = [calls[i][1][way] for calls in got]
            judge_merge(scene, call.partials, of_ranks, "heads", f"call {i}, way {way} of asking")


def inputs_kept(at: Rank) -> list[Any]:
    """Which inputs a call changed, and whether its result lies in one of them."""
    found = []
    with at.merger(at.scene.shape()) as merger:
        for call in few(at.scene).calls:
            out, lse = at.mine(call.partials)
            lse[0] = NAN  # a row to be cleaned, and not in place
            before = out.clone(), lse.clone()
            merged = merger.merge(out, lse, return_lse=True)
            storages = {t.untyped_storage().data_ptr() for t in (out, lse)}
            aliased = any(t.untyped_storage().data_ptr() in storages for t in merged)
            settle(at.device)
            found.append((same_bits(out, before[0]), same_bits(lse, before[1]), aliased))
    return found


def judge_inputs_kept(scene: Scene, got: list[Any]) -> None:
    for rank, calls in enumerate(got):
        for i, (out, lse, aliased) in enumerate(calls):
            assert out, f"rank {rank}: call {i} changed partial_out, which is the caller's"
            assert lse, f"rank {rank}: call {i} changed partial_lse, which is the caller's"
            assert not aliased, f"rank {rank}: the result of call {i} lies in the memory of an input"


def slow_reader(scene: Scene) -> Script:
    """Large calls back to back. Each row that rank 0 reads has an empty source, which takes it longer, and it reads the
    last rank's rows last: that one is in its next call by then, and its inputs are NaN.
    """
    shape, rng = scene.shape(max_tokens=192, head_dim=128), scene.generator()
    heads = shape.num_heads // scene.n
    calls = []
    for i in range(SLOW_CALLS):
        partials = scene.partials(rng, 192, shape)
        partials.lses[i % scene.n, :, :heads] = -INF
        calls.append(Call(partials, tag=i))
    return Script(shape, tuple(calls), overwrite=True)


def many_calls(scene: Scene) -> Script:
    """Long enough for any ring of slots to come round, and rows long enough for a line of 128 bytes to tear."""
    shape, rng = scene.shape(max_tokens=8, head_dim=64), scene.generator()
    sizes = torch.randint(1, 9, (96,), generator=rng).tolist()
    return Script(shape, tuple(Call(scene.partials(rng, b, shape)) for b in sizes), delay_s=0.0005)


def late(scene: Scene) -> Script:
    return Script(few(scene).shape, few(scene).calls, delay_s=0.05)


def channel_rounds(scene: Scene) -> tuple[Script, Script]:
    """Same B and tag on both channels, call by call: nothing but the channel tells their rows apart."""
    shape, rng = scene.shape(channels=2), scene.generator()
    calls = [[Call(scene.partials(rng, 3, shape), channel=k, tag=i) for i in range(ROUNDS)] for k in range(2)]
    return Script(shape, tuple(calls[0])), Script(shape, tuple(calls[1]))


def two_channels(at: Rank) -> list[Any]:
    scripts = channel_rounds(at.scene)
    with at.merger(scripts[0].shape) as merger:
        return opposed(at, scripts, (merger, merger))


def judge_two_channels(scene: Scene, got: list[Any]) -> None:
    judge_each(scene, channel_rounds(scene), got, "channel")


def merger_rounds(scene: Scene) -> tuple[Script, Script]:
    """Same B, tag and width for both mergers: nothing but the merger tells their rows apart."""
    shape, rng = scene.shape(), scene.generator()
    calls = [[Call(scene.partials(rng, 3, shape)) for _ in range(ROUNDS)] for _ in range(2)]
    return Script(shape, tuple(calls[0])), Script(shape, tuple(calls[1]))


def two_mergers(at: Rank) -> Any:
    """In opposite order; then one is closed, and the other goes on."""
    scripts = merger_rounds(at.scene)
    with at.merger(scripts[0].shape) as a:
        with at.merger(scripts[1].shape) as b:
            results = opposed(at, scripts, (a, b))
        last = scripts[0].calls[0]
        after = a.merge(*at.mine(last.partials), return_lse=True)
        return results, fetched(*after)


def judge_two_mergers(scene: Scene, got: list[Any]) -> None:
    scripts = merger_rounds(scene)
    judge_each(scene, scripts, [results for results, _ in got], "merger")
    last = scripts[0].calls[0].partials
    judge_merge(scene, last, [after for _, after in got], "heads", "after the other merger's close()")


def opposed(at: Rank, scripts: Sequence[Script], mergers: Sequence[Any]) -> list[Any]:
    """Play two scripts at once, a thread each; ranks begin them in opposite order, and sleep at random."""
    entered = threading.Event()
    results: list[list[Any]] = [[], []]
    errors: list[BaseException] = []

    streams = [provided_stream() for _ in range(2)] if at.device.type == "cuda" else []
    at.meet()

    def take(k: int) -> None:
        if streams:
            torch.cuda.set_device(at.device)
            torch.cuda.set_stream(streams[k])
        rng = random.Random(f"{at.scene.seed}/{at.rank}/{k}")
        try:
            if (at.rank + k) % 2:
                entered.wait(JOIN_S)
            for call in scripts[k].calls:
                time.sleep(rng.random() * 0.001)
                out, lse, keywords = call.arguments(at)
                entered.set()
                merged = mergers[k].merge(out, lse, return_lse=True, **keywords)
                results[k].append(fetched(*merged))
        except BaseException as error:
            errors.append(error)
            entered.set()

    threads = [threading.Thread(target=take, args=(k,), daemon=True) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"rank {at.rank}: stuck for {JOIN_S:g} s: the two streams of calls wait for each other")
    return results


def judge_each(scene: Scene, scripts: Sequence[Script], got: list[Any], what: str) -> None:
    for k, script in enumerate(scripts):
        try:
            judge_script(scene, script, [results[k] for results in got])
        except AssertionError as error:
            raise AssertionError(f"{what} {k}: {error}") from None


def cancelling(scene: Scene) -> Script:
    """Partials whose sum depends on its order in nearly every element, for N > 2."""
    shape, rng = scene.shape(), scene.generator()
    partials = scene.partials(rng, 8, shape)
    return Script(shape, (Call(partials),))


def repeat(at: Rank) -> Any:
    """The first result, and the first repeat that differs from it in any bit."""
    script, rng = cancelling(at.scene), at.random()
    out, lse = at.mine(script.calls[0].partials)
    first: tuple[torch.Tensor, ...] = ()
    different = None
    with at.merger(script.shape) as merger:
        for i in range(REPEATS):
            time.sleep(rng.random() * 0.002)
            merged = fetched(*merger.merge(out, lse, return_lse=True))
            first = first or merged
            if different is None and not all(same_bits(a, b) for a, b in zip(first, merged, strict=True)):
                different = i
    return first, different


def judge_repeat(scene: Scene, got: list[Any]) -> None:
    for rank, (_, different) in enumerate(got):
        assert different is None, (
            f"rank {rank}: repeat {different} of one and the same merge gave other bits than the first. Are sources "
            "placed by arrival instead of by rank? Else declare deterministic=False"
        )
    judge_merge(scene, cancelling(scene).calls[0].partials, [first for first, _ in got], "heads", "the first of all")


def as_loopback(scene: Scene) -> Script:
    shape, rng = scene.shape(), scene.generator()
    return Script(shape, tuple(Call(scene.partials(rng, b, shape)) for b in (1, 9, 24)))


def judge_as_loopback(scene: Scene, got: list[Any]) -> None:
    """Run the script over `loopback` here, and compare bits."""
    script = as_loopback(scene)
    over = scene.over("loopback_peer" if scene.device == "cuda" else "loopback")
    same = LoopbackWorld(scene.n, scene.device).run(
        lambda group: play(Rank(over, group, group.rank, lambda: None), script)
    )
    for rank, (mine, theirs) in enumerate(zip(got, same, strict=True)):
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            differ = int((a[0] != b[0]).sum()), int((a[1] != b[1]).sum())
            assert all(same_bits(x, y) for x, y in zip(a, b, strict=True)), (
                f"rank {rank}, call {i}: {differ[0]} of {a[0].numel()} values and {differ[1]} of {a[1].numel()} LSEs "
                "differ from those over loopback, which sums in rank order; match it, or declare deterministic=False"
            )


def replays(scene: Scene) -> Script:
    shape, rng = scene.shape(), scene.generator()
    return Script(shape, tuple(Call(scene.partials(rng, 6, shape)) for _ in range(10)))


def replay(at: Rank) -> list[Any]:
    """Odd calls replay one captured merge with new values in its inputs; even ones are eager."""
    script = replays(at.scene)
    out, lse = at.mine(script.calls[0].partials)
    results = []
    with at.merger(script.shape) as merger:
        merger.merge(out, lse, return_lse=True)
        kept: list[Any] = []
        graph = captured(lambda: kept.append(merger.merge(out, lse, return_lse=True)), at.device)
        at.meet()  # a capture gets memory from the driver, which may wait for the kernels of a rank that is ahead
        for i, call in enumerate(script.calls):
            new_out, new_lse = at.mine(call.partials)
            if i % 2:
                out.copy_(new_out)
                lse.copy_(new_lse)
                graph.replay()
                merged = kept[0]
            else:
                merged = merger.merge(new_out, new_lse, return_lse=True)
            results.append(fetched(*merged))
        merger.check()
    return results


def _scripted(name: str, proves: str, script: Any) -> Case:
    return Case(name=name, proves=proves, rank_function=Played(script), judge=JudgedBy(script))


CALLS: tuple[Case, ...] = (
    Case(
        name="results-kept",
        proves="a result belongs to the caller: no later call and no close changes it",
        rank_function=results_kept,
        judge=judge_results_kept,
    ),
    Case(
        name="inputs-kept",
        proves="a merge neither changes its inputs nor returns their memory",
        rank_function=inputs_kept,
        judge=judge_inputs_kept,
    ),
    Case(
        name="what-was-asked-for",
        proves="the LSE comes where it is asked for, and nowhere else; `out` is filled and returned",
        rank_function=what_was_asked_for,
        judge=judge_what_was_asked_for,
    ),
    _scripted(
        "slow-reader",
        "rows are safe from the next call, and from the producer, while a slow rank still reads them",
        slow_reader,
    ),
    _scripted("many-calls", "fresh data in each of many calls: no stale slot, no torn line, no word left", many_calls),
    _scripted("late-ranks", "whoever comes late, by up to 50 ms, is waited for", late),
    Case(
        name="channels",
        proves="two channels, entered in opposite order on the ranks, neither mix nor wait for each other",
        rank_function=two_channels,
        judge=judge_two_channels,
    ),
    Case(
        name="two-mergers",
        proves="two mergers of one group, entered in opposite order, keep their rows apart; either may be closed first",
        rank_function=two_mergers,
        judge=judge_two_mergers,
    ),
    Case(
        name="repeatable",
        proves=f"{REPEATS} repeats of one merge, ranks delayed at random, agree bit for bit",
        rank_function=repeat,
        judge=judge_repeat,
        claim=repeatable,
    ),
    Case(
        name="equals-loopback",
        proves="the result is bit for bit that of the loopback transport",
        rank_function=Played(as_loopback),
        judge=judge_as_loopback,
        claim=repeatable,
    ),
    Case(
        name="graph-replay",
        proves="a captured merge replays with new values, mixed with eager calls",
        rank_function=replay,
        judge=JudgedBy(replays),
        claim=works_in_graphs,
    ),
)
