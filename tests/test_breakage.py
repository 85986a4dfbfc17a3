"""Faults that a hostile tester found: each here as its kind."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import dcpcomm
from dcpcomm.launch import LocalRanks, RankFailed, emit
from dcpcomm.testing import LoopbackWorld
from tests.oracle import Case, judge, make_case
from tests.world import AT_ONCE_S, Raised, World, meet, merger_for, outcome, rank_of


def values(group: Any, step: int) -> torch.Tensor:
    return torch.full((2, 4 * group.size if hasattr(group, "world") else 4 * group.size(), 32), float(step)).bfloat16()


def wrong_channel(group: Any, channels: int) -> Any:
    """Rank 1 names a channel that isn't there, and goes on to its next step."""
    rank = rank_of(group)
    merger = merger_for(group, {"channels": channels}, watchdog={"timeout_s": 1.5})
    lse = torch.zeros(2, 4 * (group.size if hasattr(group, "world") else group.size()))
    first = outcome(merger.merge, values(group, 0), lse, channel=7 if rank == 1 else 0)
    second = outcome(merger.merge, values(group, 100), lse)
    meet()
    merger.reset()
    third = merger.merge(values(group, 5), lse)
    merger.close()
    return first, second, third


@pytest.mark.parametrize("channels", [1, 3])
def test_a_wrong_channel_never_meets_another_step(peers: World, channels: int) -> None:
    for rank, (first, second, third) in enumerate(peers.run(wrong_channel, channels, fresh=True)):
        assert isinstance(first, Raised), f"rank {rank} merged step 0 with something: {first}"
        assert "rank 1" in first.text
        if channels == 1:
            assert "channel is 7" in first.text, "with one channel the peers hear the reason at once"
            assert bool((second == 100).all()), "and all go on together"
        else:
            assert isinstance(second, Raised), f"rank {rank}: {second}"
        assert bool((third == 5).all())


def refreshes_in_another_order(group: Any) -> Any:
    n = group.size
    shape = {"head_dim": 8, "v_head_dim": 4, "dtype": torch.float32}
    merger = merger_for(group, shape, projection="before")
    layers = [merger.gather_w_uv(torch.randn(4, 8, 4)) for _ in range(2)]
    order = layers if group.rank == 0 else layers[::-1]
    mixed = outcome(order[0].refresh, torch.randn(4, 8, 4))
    meet()
    layers[0].refresh(torch.full((4, 8, 4), float(group.rank)))
    full = layers[0].full
    assert full is not None
    merger.close()
    return mixed, [float(full[4 * rank, 0, 0]) for rank in range(n)]


def test_weights_of_different_layers_are_not_mixed() -> None:
    for mixed, full in World("loopback", 2, None).run(refreshes_in_another_order):  # type: ignore[arg-type]
        assert "CallMismatch" in mixed.kinds, mixed.trace
        assert "W_UV number 0" in mixed.text
        assert "W_UV number 1" in mixed.text
        assert full == [0.0, 1.0], "and the next refresh is right again"


def gathers_while_the_other_resets(group: Any) -> Any:
    merger = merger_for(group, {"v_head_dim": 4}, projection="before")
    if group.rank == 0:
        said = outcome(merger.gather_w_uv, torch.randn(4, 32, 4).bfloat16())
    else:
        said = outcome(merger.reset)
    meet()
    merger.reset()
    merger.close()
    return said


def test_unlike_collectives_say_who_came_for_what() -> None:
    for said in World("loopback", 2, None).run(gathers_while_the_other_resets):  # type: ignore[arg-type]
        assert "CallMismatch" in said.kinds, said.trace
        assert "rank 0 came for gathering W_UV" in said.text
        assert "rank 1 came for resetting the merger" in said.text


def times_out_on_one_channel(group: Any) -> Any:
    """Rank 1 leaves channel 0 alone, and keeps to channel 1."""
    merger = merger_for(group, {"channels": 2}, watchdog={"timeout_s": 1.0})
    lse = torch.zeros(2, 8)
    late = outcome(merger.merge, values(group, 1), lse) if rank_of(group) == 0 else None
    meet()
    other = merger.merge(values(group, 2), lse, channel=1)
    late = late if rank_of(group) == 0 else outcome(merger.merge, values(group, 1), lse)
    meet()
    merger.close()
    return late, other


def test_a_timeout_on_one_channel_spares_the_other(pool: Any) -> None:
    for late, other in World("gloo_a2a", 2, pool).run(times_out_on_one_channel, fresh=True):
        assert "TransportTimeout" in late.kinds, late.trace
        assert bool((other == 2).all())


def out_of_inference_mode(group: Any) -> Any:
    merger = merger_for(group, {"max_tokens": 2})
    with torch.inference_mode():
        made_there = torch.empty(2, 4, 32, dtype=torch.bfloat16)
    given = {"out": made_there} if group.rank == 0 else {}
    said = outcome(merger.merge, values(group, 1), torch.zeros(2, 8), **given)
    again = merger.merge(values(group, 3), torch.zeros(2, 8))
    merger.close()
    return said, again


def test_an_out_that_cannot_be_written_is_found_before_anything_is_sent() -> None:
    for said, again in World("loopback", 2, None).run(out_of_inference_mode):  # type: ignore[arg-type]
        assert "inference_mode" in said.text, said.trace
        assert bool((again == 3).all())


def ask(word: str) -> str:
    emit(word)
    return word


def fail_on_event(rank: int, event: Any) -> None:
    raise KeyError(event)


def test_local_ranks_never_answer_with_the_call_before() -> None:
    with LocalRanks(2) as ranks:
        with pytest.raises(KeyError):
            ranks.run(ask, "first", on_event=fail_on_event)
        with pytest.raises(RankFailed, match="have ended"):
            ranks.run(ask, "second")


def test_errors_survive_pickling() -> None:
    for error in (RankFailed("text", (1, 2)), dcpcomm.TransportTimeout("text", (3,)), dcpcomm.ShapeError("text")):
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == "text"
        assert getattr(again, "ranks", ()) == getattr(error, "ranks", ())


def raises_on_rank_1(group: Any) -> None:
    merger = merger_for(group, watchdog={"timeout_s": 0.5})
    if group.rank == 1:
        raise LookupError("a bug of the user's own")
    merger.merge(values(group, 1), torch.zeros(2, 8))


def test_the_users_own_error_is_shown_before_those_of_who_waited_for_it() -> None:
    with pytest.raises(RankFailed, match="a bug of the user's own") as failure:
        LoopbackWorld(2).run(raises_on_rank_1)
    assert isinstance(failure.value.cause, LookupError)


@pytest.mark.parametrize("device", ["gpu", 1.5, "cuda", "meta"])
def test_a_device_that_is_not_there_is_told_in_our_words(device: Any) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RankFailed) as failure:
        LoopbackWorld(1).run(lambda group: merger_on(group, device))
    assert isinstance(failure.value.cause, dcpcomm.ShapeError)
    assert "device is" in str(failure.value.cause)


def merger_on(group: Any, device: Any) -> Any:
    shape = dcpcomm.MergeShape(max_tokens=2, num_heads=4, head_dim=32, dtype=torch.bfloat16, lse_base="e")
    merger = dcpcomm.DCPMerger(group, shape, device=device)
    return merger.merge(torch.ones(2, 4, 32).bfloat16(), torch.zeros(2, 4))


def test_a_cpu_with_an_index_is_a_cpu() -> None:
    (merged,) = LoopbackWorld(1).run(lambda group: merger_on(group, "cpu:0"))
    assert bool((merged == 1).all())


@pytest.mark.parametrize("size", [0, -1, None, 1.5, True])
def test_a_group_size_that_is_none_is_refused(size: Any) -> None:
    shape = dcpcomm.MergeShape(max_tokens=2, num_heads=4, head_dim=32, dtype=torch.bfloat16, lse_base="e")
    with pytest.raises(dcpcomm.ShapeError, match="world_size"):
        dcpcomm.plan_bytes(shape, world_size=size)


# ---------------------------------------------------------------- what torch only says it has done


def negated(group: Any, case: Case) -> Any:
    """Inputs that torch negates when it reads them: in memory they have the other sign."""
    out, lse = torch._neg_view(-case.outs[group.rank]), torch._neg_view(-case.lses[group.rank])
    assert out.is_neg()
    assert lse.is_neg()
    shape = dcpcomm.MergeShape(max_tokens=8, num_heads=8, head_dim=32, dtype=torch.float32, lse_base="e")
    with dcpcomm.DCPMerger(group, shape, {"transport": "loopback"}, device="cpu") as merger:
        merged = merger.merge(out, lse, return_lse=True)
        into = torch._neg_view(torch.zeros_like(merged[0]))
        return merged, outcome(merger.merge, out, lse, out=into)


def test_a_lazily_negated_tensor_is_what_it_says(rng: torch.Generator) -> None:
    case = make_case(rng, 2, b=5, h=8, dtype=torch.float32)
    answers = LoopbackWorld(2, "cpu").run(negated, case)
    judge([merged for merged, _ in answers], case)
    for _, error in answers:
        assert "ShapeError" in error.kinds
        assert "negates" in error.text


# ---------------------------------------------------------------- errors that must reach the others


def brings_no_rows(group: Any, case: Case) -> Any:
    """Rank 1's partial has no rows, its LSE has: an error there, and the peers' at once, not at their deadline."""
    shape = dcpcomm.MergeShape(max_tokens=8, num_heads=8, head_dim=32, dtype=torch.float32, lse_base="e")
    config = {"transport": "loopback", "watchdog": {"timeout_s": 20}}
    with dcpcomm.DCPMerger(group, shape, config, device="cpu") as merger:
        out, lse = case.outs[group.rank], case.lses[group.rank]
        error = outcome(merger.merge, out[:0] if group.rank == 1 else out, lse)
        return error, merger.merge(out, lse, return_lse=True)


def test_a_partial_without_rows_is_told_to_the_peers(rng: torch.Generator) -> None:
    case = make_case(rng, 2, b=5, h=8, dtype=torch.float32)
    answers = LoopbackWorld(2, "cpu").run(brings_no_rows, case)
    judge([merged for _, merged in answers], case)
    assert "ShapeError" in answers[1][0].kinds
    assert "CallMismatch" in answers[0][0].kinds
    assert "rank 1" in answers[0][0].text
    assert answers[0][0].seconds < AT_ONCE_S


def resets_alone(group: Any, case: Case) -> Any:
    shape = dcpcomm.MergeShape(max_tokens=8, num_heads=8, head_dim=32, dtype=torch.float32, lse_base="e")
    merger = dcpcomm.DCPMerger(group, shape, {"transport": "loopback", "watchdog": {"timeout_s": 0.7}}, device="cpu")
    if group.rank == 1:
        return None
    failed = outcome(merger.reset)
    return failed, outcome(merger.merge, case.outs[group.rank], case.lses[group.rank])


def test_after_a_reset_that_failed_no_call_is_made(rng: torch.Generator) -> None:
    """It could meet a call that a peer made before."""
    case = make_case(rng, 2, b=5, h=8, dtype=torch.float32)
    failed, merged = LoopbackWorld(2, "cpu").run(resets_alone, case)[0]
    assert "TransportTimeout" in failed.kinds
    assert failed.ranks == (1,)
    assert "carries no call until reset()" in merged.text, "it waited for a peer"
