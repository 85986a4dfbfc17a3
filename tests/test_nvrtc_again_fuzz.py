"""Random sequences of merges, by short ways and long ones: each result is right, and stays as it was."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import dcpcomm
from dcpcomm.again import Again
from dcpcomm.testing import LoopbackWorld
from tests.emulated import COMPILER
from tests.oracle import NAN, judge, make_case, same_bits
from tests.pretend_gpu import pretend
from tests.world import shape_of

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernels for the CPU with")
N, D, MOST, FORMS, CALLS = 2, 16, 6, 12, 150
BS = [0, 1, 2, 4, 4, 4, 6, 6, 13]  # often the same, now and then past max_tokens


def laid_out(x: torch.Tensor, how: int) -> torch.Tensor:
    """The same values: contiguous, padded, by another order of axes, at an odd address, or every second column."""
    if how == 1:
        return torch.cat([x, torch.full_like(x, NAN)], -1)[..., : x.shape[-1]]
    if how == 2:
        return x.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)
    if how == 3:
        return torch.full((x.numel() + 1,), NAN, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    if how == 4:
        return torch.stack([x, torch.full_like(x, NAN)], -1)[..., 0]
    return x.clone()


class Form:
    """What many calls have in common: B, layouts, dtypes, what is asked for."""

    def __init__(self, dice: random.Random, scatter: str, channels: int) -> None:
        b = dice.choice(BS)
        self.b = b - b % N if scatter == "tokens" else b
        self.channel, self.want_lse, self.into = dice.randrange(channels), dice.random() < 0.3, dice.random() < 0.4
        self.lse_dtype = dice.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
        self.layouts = [[dice.randrange(5) for _ in range(3)] for _ in range(N)]
        self.counts = dice.choice([None, None, "int32", "int64", "lengths"]) if self.b else None

    def __str__(self) -> str:
        return f"B={self.b}, counts {self.counts}, layouts {self.layouts}, LSE {self.lse_dtype}, out {self.into}"


class Call:
    """One merge of a form, the same on all ranks but for layouts."""

    def __init__(self, form: Form, rng: torch.Generator, dice: random.Random) -> None:
        self.form, self.tag, self.grad = form, dice.randrange(-3, 4), dice.choice([None, False, True])
        self.case = make_case(rng, N, b=form.b, d=D, lse_dtype=form.lse_dtype)
        self.keywords: list[dict[str, torch.Tensor]] = [{} for _ in range(N)]
        if form.counts is not None:
            counts = torch.randint(0, 3, (N, form.b), generator=rng)
            if form.counts == "lengths":
                starts = torch.arange(form.b + 1)
                self.keywords = [{"seq_lens": one, "query_start_loc": starts} for one in counts]
            else:
                self.keywords = [{"valid_counts": one.to(getattr(torch, form.counts))} for one in counts]
            self.case.counts = counts
            self.case.outs[counts == 0] = NAN

    def make(self, merger: dcpcomm.DCPMerger, rank: int) -> Any:
        how, how_lse, how_out = self.form.layouts[rank]
        b, scatter = self.form.b, merger.shape.scatter
        out = None
        if self.form.into:
            t, h = (0, 0) if b == 0 else merger.shape.result_rows(b, N)
            if b == 0:
                t, h = 0, self.case.outs.shape[2] // (N if scatter == "heads" else 1)
            out = laid_out(torch.full((t, h, D), 7.0, dtype=self.case.outs.dtype), how_out)
        given = laid_out(self.case.outs[rank], how), laid_out(self.case.lses[rank], how_lse)
        keywords = {name: one.clone() for name, one in self.keywords[rank].items()}
        mode = torch.inference_mode() if self.grad is None else torch.set_grad_enabled(self.grad)
        if self.grad is None and out is not None:
            out = out.clone(memory_format=torch.preserve_format)
        with mode:
            got = merger.merge(
                *given, out=out, tag=self.tag, channel=self.form.channel, return_lse=self.form.want_lse, **keywords
            )  # type: ignore[call-overload]
        for one in (*given, *keywords.values()):
            one.zero_()  # as their memory's next user would
        return got


@pytest.mark.parametrize("scatter", ["heads", "tokens", "none"])
@pytest.mark.parametrize("over", ["fused", "packed", "cpu", "peer on cpu"])
def test_each_result_is_right_and_stays(
    over: str,
    scatter: str,
    rng: torch.Generator,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if over in ("fused", "packed"):
        pretend(monkeypatch, tmp_path_factory.getbasetemp())
    dice = random.Random(seed)
    forms = [Form(dice, scatter, 2) for _ in range(FORMS)]
    calls: list[Call] = []
    for _ in range(CALLS):  # often as before
        form = calls[-1].form if calls and dice.random() < 0.5 else dice.choice(forms)
        calls.append(Call(form, rng, dice))
    taken: list[bool] = []
    known: list[bool] = []
    real = Again.merge

    def noting(self: Again, *args: Any) -> Any:
        result = real(self, *args)
        taken.append(result is not None)
        known.append(args[-1] is True and result is not None)
        return result

    monkeypatch.setattr(Again, "merge", noting)

    def on_rank(group: Any) -> Any:
        name = "loopback_peer" if over in ("fused", "peer on cpu") else "loopback"
        config = {"transport": name, "verify": {"level": "off"}, "watchdog": {"timeout_s": 20}}
        shape = shape_of(N, head_dim=D, max_tokens=MOST, channels=2, scatter=scatter)
        kept: list[Any] = []
        with dcpcomm.DCPMerger(group, shape, config, "cpu") as merger:
            for number, call in enumerate(calls):
                got = call.make(merger, group.rank)
                result = got if isinstance(got, tuple) else (got,)
                kept.append((result, [one.clone() for one in result]))
                if number % 17 == 0:
                    merger.check()
                if number == CALLS // 2:
                    merger.reset()
        return kept

    by_rank = LoopbackWorld(N, "cpu").run(on_rank)
    for number, call in enumerate(calls):
        what = f"call {number}: {call.form}, grad {call.grad}"
        for kept in by_rank:
            for now, then in zip(*kept[number], strict=True):
                assert same_bits(now, then), f"{what}: a later call changed it"
        results = [kept[number][1] for kept in by_rank]
        if call.form.b:
            judge([tuple(one) if call.form.want_lse else one[0] for one in results], call.case, scatter, what=what)
    # Of no rows, or in chunks, calls go the long way; so do, on CPU, those with counts.
    short = [
        call for call in calls if 0 < call.form.b <= MOST and (over in ("fused", "packed") or not call.form.counts)
    ]
    assert sum(taken) >= N * (len(short) - 4 * FORMS), "the short way was hardly taken"
    assert sum(known) >= N, "no layout was known at a glance"
