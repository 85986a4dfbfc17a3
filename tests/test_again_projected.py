"""Merges with W_UV whose layout is known: the same bits as by the long way, the same errors, on either side of the
exchange."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dcpcomm
from dcpcomm.again_projected import AgainProjected
from dcpcomm.errors import CallMismatch, ShapeError
from dcpcomm.testing import LoopbackWorld
from tests.emulated import COMPILER
from tests.oracle import NAN, same_bits
from tests.pretend_gpu import pretend

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernels for the CPU with")
N, H, L, V, MOST, FORMS, CALLS = 2, 4, 32, 16, 6, 8, 80


@pytest.fixture(params=["fused", "packed", "cpu"])
def over(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> str:
    if request.param != "cpu":
        pretend(monkeypatch, tmp_path_factory.getbasetemp())
    return "loopback_peer" if request.param == "fused" else "loopback"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Of each attempt: whether the short way was taken, and whether the layout was known at a glance."""
    made: list[tuple[bool, bool]] = []
    real = AgainProjected.merge

    def noting(self: AgainProjected, *args: Any) -> Any:
        result = real(self, *args)
        made.append((result is not None, args[-1]))
        return result

    monkeypatch.setattr(AgainProjected, "merge", noting)
    return made


def run(over: str, order: str, fn: Callable[[dcpcomm.DCPMerger, int], Any], scatter: str = "heads") -> list[Any]:
    """`fn(merger, rank)` on each rank."""
    shape = dcpcomm.MergeShape(
        max_tokens=MOST, num_heads=H, head_dim=L, v_head_dim=V, dtype=torch.bfloat16, lse_base="e", channels=2,
        scatter=scatter,  # type: ignore[arg-type]
    )  # fmt: skip
    config = {"transport": over, "verify": {"level": "off"}, "projection": order, "watchdog": {"timeout_s": 20}}

    def on_rank(group: Any) -> Any:
        with dcpcomm.DCPMerger(group, shape, config, "cpu") as merger:
            return fn(merger, group.rank)

    return LoopbackWorld(N, "cpu").run(on_rank)


def weights(merger: dcpcomm.DCPMerger, layer: int) -> Any:
    made = torch.Generator().manual_seed(100 * layer + merger.group.rank)
    return merger.gather_w_uv(torch.randn(H // N, L, V, generator=made).bfloat16())


def partials(rank: int, call: int, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randn(b, H, L, generator=made).bfloat16(), torch.randn(b, H, generator=made)


class Form:
    """What many calls have in common."""

    def __init__(self, dice: random.Random, scatter: str) -> None:
        self.b = dice.choice([2, 4, 4, 6, 8] if scatter == "tokens" else [1, 4, 4, 5, 6, 9])
        self.channel, self.want_lse, self.into = dice.randrange(2), dice.random() < 0.3, dice.random() < 0.5
        self.counts, self.strided = dice.choice(["", "", "counts", "lengths"]), dice.random() < 0.3

    def __call__(self, merger: dcpcomm.DCPMerger, rank: int, call: int, w_uv: Any) -> tuple[torch.Tensor, ...]:
        latent, lse = partials(rank, call, self.b)
        if self.strided:
            latent = torch.cat([latent, torch.full_like(latent, NAN)], -1)[..., :L]
        keywords: dict[str, Any] = {}
        if self.counts:
            counts = torch.randint(0, 3, (self.b,), generator=torch.Generator().manual_seed(7 * call + rank))
            latent[counts == 0] = NAN
            keywords = {"valid_counts": counts}
            if self.counts == "lengths":
                keywords = {"seq_lens": counts, "query_start_loc": torch.arange(self.b + 1)}
        if self.into:
            t, h = merger.shape.result_rows(self.b, N)
            keywords["out"] = torch.full((t, h, V), NAN, dtype=torch.bfloat16)
        got: Any = merger.merge_and_project(
            latent, lse, w_uv, tag=call % 5, channel=self.channel, return_lse=self.want_lse, **keywords
        )  # type: ignore[call-overload]
        assert not self.into or (got[0] if self.want_lse else got) is keywords["out"]
        latent.zero_()  # as its memory's next user would
        return got if self.want_lse else (got,)


@pytest.mark.parametrize("scatter", ["heads", "tokens", "none"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_the_same_bits_as_by_the_long_way(
    over: str, order: str, scatter: str, seed: int, taken: list[tuple[bool, bool]]
) -> None:
    dice = random.Random(seed)
    forms = [Form(dice, scatter) for _ in range(FORMS)]
    calls: list[tuple[Form, int]] = []
    for _ in range(CALLS):  # often as before
        calls.append((calls[-1][0] if calls and dice.random() < 0.5 else dice.choice(forms), dice.randrange(3)))

    def short(merger: dcpcomm.DCPMerger, rank: int) -> Any:
        layers = [weights(merger, layer) for layer in range(3)]
        got = []
        for number, (form, layer) in enumerate(calls):
            with torch.inference_mode(number % 7 < 4):
                got.append(form(merger, rank, number, layers[layer]))
            if number == CALLS // 2:
                layers[0].refresh(layers[1].local)  # in place: the next calls take them
        merger.check()
        return got

    def long(merger: dcpcomm.DCPMerger, rank: int) -> Any:
        layers = [weights(merger, layer) for layer in range(3)]
        got = []
        for number, (form, layer) in enumerate(calls):
            merger._known_projected.clear()
            got.append(form(merger, rank, number, layers[layer]))
            if number == CALLS // 2:
                layers[0].refresh(layers[1].local)
        return got

    found = run(over, order, short, scatter)
    tried = len(taken)
    want = run(over, order, long, scatter)
    assert len(taken) == tried, "the long way was not the long way"
    for rank in range(N):
        for number, (one, other) in enumerate(zip(found[rank], want[rank], strict=True)):
            for mine, right in zip(one, other, strict=True):
                assert same_bits(mine, right), f"rank {rank}, call {number}"
    assert sum(short for short, _ in taken) > N * CALLS // 8
    assert sum(short and glance for short, glance in taken) >= N


def good(merger: dcpcomm.DCPMerger, rank: int, call: int, w_uv: Any, **keywords: Any) -> Any:
    return merger.merge_and_project(*partials(rank, call, 4), w_uv, **keywords)


def told_by_a_call_or_later(merger: dcpcomm.DCPMerger, w_uv: Any) -> None:
    """On a GPU the call returns NaN, and the error comes by `check`."""
    merged = good(merger, 0, 9, w_uv)
    assert bool(merged.isnan().all())
    merger.check()


def inside(latent: torch.Tensor) -> torch.Tensor:
    """A result that lies in it."""
    return latent.view(-1)[: 4 * H // N * V].view(4, H // N, V)


WRONG: dict[str, Callable[[Any, Any, torch.Tensor, torch.Tensor, Any], Any]] = {
    "out in the latent": lambda m, r, a, b, w: m.merge_and_project(a, b, w, out=inside(a)),
    "out in the weights": lambda m, r, a, b, w: m.merge_and_project(a, b, w, out=inside(w.local)),
    "a gradient": lambda m, r, a, b, w: m.merge_and_project(a.requires_grad_(), b, w),
    "a tag": lambda m, r, a, b, w: m.merge_and_project(a, b, w, tag=2**40),
    "no weights": lambda m, r, a, b, w: m.merge_and_project(a, b, None),
    "bare weights": lambda m, r, a, b, w: m.merge_and_project(a, b, w.local),
    "other weights put in": lambda m, r, a, b, w: (
        setattr(w, "local", w.local[:, :-1]), m.merge_and_project(a, b, w)
    ),
    "another dtype": lambda m, r, a, b, w: m.merge_and_project(a.float(), b, w),
    "the width of a result": lambda m, r, a, b, w: m.merge_and_project(a[..., :V], b, w),
    "both counts": lambda m, r, a, b, w: m.merge_and_project(
        a, b, w, valid_counts=torch.ones(4, dtype=torch.int32), seq_lens=torch.ones(4, dtype=torch.int32),
        query_start_loc=torch.arange(5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_told_here_and_to_the_peers(what: str, over: str, order: str) -> None:
    def calls(merger: dcpcomm.DCPMerger, rank: int) -> Any:
        w_uv, other = weights(merger, 0), weights(merger, 1)
        room = torch.zeros(4, H // N, V, dtype=torch.bfloat16)
        for call in range(3):
            good(merger, rank, call, w_uv, out=room)
        for call in range(3):
            good(merger, rank, call, w_uv)
        if rank == 1:
            with pytest.raises(ShapeError, match="rank 1"):
                WRONG[what](merger, rank, *partials(rank, 9, 4), w_uv)
        else:
            with pytest.raises(CallMismatch, match=r"rank 1 raised in call .* ShapeError"):
                told_by_a_call_or_later(merger, w_uv)
        return good(merger, rank, 5, other), good(merger, rank, 5, other)

    for one, again in run(over, order, calls):
        assert same_bits(one, again)
        assert bool(one.isfinite().all())


def test_weights_that_another_merger_gathered_are_looked_at_first(over: str, taken: list[tuple[bool, bool]]) -> None:
    """Once by the long way, which checks them; then they are as good as one's own."""

    def calls(merger: dcpcomm.DCPMerger, rank: int) -> Any:
        mine, theirs = weights(merger, 0), weights(merger, 0)
        for call in range(3):
            good(merger, rank, call, mine)
        before = len(taken) if rank == 0 else 0
        theirs.pass_for(None)  # type: ignore[arg-type]
        results = [good(merger, rank, 4, theirs), good(merger, rank, 4, theirs), good(merger, rank, 4, mine)]
        return before, results

    for _, results in run(over, "before", calls):
        assert all(same_bits(results[0], one) for one in results[1:])
    assert len(taken) == N * 4  # the 2nd and 3rd call, and the last two
    assert all(short for short, _ in taken)
