"""Cases about what goes wrong and what ends: mismatched calls, wrong calls, absent ranks, and close."""

from __future__ import annotations

from typing import Any

from dcpcomm.config import load_config, options_for
from dcpcomm.group import Group
from dcpcomm.registry import load_transport
from dcpcomm.testing.conformance.case import (
    Case,
    calls_off,
    keeps_deadlines,
    ragged,
    sends_headers,
    spares_peers,
)
from dcpcomm.testing.conformance.judging import expect_raised, judge_merge
from dcpcomm.testing.conformance.partials import Partials
from dcpcomm.testing.conformance.rank import Rank, fetched
from dcpcomm.testing.conformance.scene import Scene

__all__ = ["LIFE"]

#: How long a merge may wait for a peer where a case is about that.
SHORT_S = 2.0
GRACE_S = 4.0
TAGS = (41, 77)
ROWS_OF = (11, 13)


def rows(scene: Scene, b: int = 13) -> Partials:
    return scene.partials(scene.generator(), b, scene.shape())


def cut(partials: Partials, b: int) -> Partials:
    return Partials(partials.outs[:, :b], partials.lses[:, :b], partials.base)


def merge(at: Rank, merger: Any, b: int, **keywords: Any) -> Any:
    """(out, lse) of the first `b` rows, on this machine's CPU."""
    merged = merger.merge(*at.mine(cut(rows(at.scene), b)), return_lse=True, **keywords)
    merged = fetched(*merged)
    merger.check()  # what a GPU has found out by now
    return merged


def judge_good(scene: Scene, got: list[Any], b: int, what: str) -> None:
    judge_merge(scene, cut(rows(scene), b), got, "heads", what)


def odd_tag(at: Rank) -> Any:
    """The last rank comes with another tag; then all reset and go on."""
    with at.merger(at.scene.shape()) as merger:
        before = merge(at, merger, 5, tag=3)
        met = at.attempt(merge, at, merger, 5, tag=TAGS[at.rank == at.size - 1])
        merger.reset()
        return before, met, merge(at, merger, 13, tag=3)


def judge_odd_tag(scene: Scene, got: list[Any]) -> None:
    judge_good(scene, [before for before, _, _ in got], 5, "the call before")
    for rank, (_, met, _) in enumerate(got):
        words = (*TAGS, f"rank {scene.n - 1}")
        expect_raised(met, ("CallMismatch",), words, scene.deadline_s / 2, f"rank {rank}, tags {TAGS} met")
    judge_good(scene, [after for _, _, after in got], 13, "the call after reset()")


def odd_rows(at: Rank) -> Any:
    """The last rank comes with another B, greater or smaller."""
    met = []
    with at.merger(at.scene.shape()) as merger:
        for mine, others in (ROWS_OF, ROWS_OF[::-1]):
            met.append(at.attempt(merge, at, merger, mine if at.rank == at.size - 1 else others))
            merger.reset()
        return met, merge(at, merger, 13)


def judge_odd_rows(scene: Scene, got: list[Any]) -> None:
    for rank, (met, _) in enumerate(got):
        for error in met:
            words = (*ROWS_OF, f"rank {scene.n - 1}")
            expect_raised(error, ("CallMismatch",), words, scene.deadline_s / 2, f"rank {rank}, B {ROWS_OF} met")
    judge_good(scene, [after for _, after in got], 13, "the call after reset()")


def wrong_on_one(at: Rank) -> Any:
    """Rank 0's argument is wrong, the others' are right; first they call while it raises, then it has raised."""
    tells = not calls_off(at.scene)
    met = []
    with at.merger(at.scene.shape(), None if tells else SHORT_S) as merger:
        good = merge(at, merger, 5)
        out, lse = at.mine(cut(rows(at.scene), 5))
        at.meet()
        for raised_first in (False, True):
            if at.rank == 0:
                met.append(at.attempt(merger.merge, out, lse.double()))
            if raised_first:
                at.meet()
            if at.rank != 0:
                met.append(at.attempt(merge, at, merger, 5))
            if not tells:  # they were left to their deadline, and the channel is spent
                at.meet()
                merger.reset()
        return good, met, merge(at, merger, 13)


def judge_wrong_on_one(scene: Scene, got: list[Any]) -> None:
    tells = not calls_off(scene)
    judge_good(scene, [good for good, _, _ in got], 5, "the call before")
    for rank, (_, met, _) in enumerate(got):
        for error in met:
            where = f"rank {rank}, rank 0's LSE being float64"
            if rank == 0:
                expect_raised(error, ("ShapeError",), ("float64",), scene.deadline_s / 2, where)
            elif tells:
                words = ("float64", "rank 0")
                expect_raised(error, ("CallMismatch",), words, scene.deadline_s / 2, where)
            else:
                kinds = ("TransportTimeout", "CallMismatch")
                expect_raised(error, kinds, ("rank 0",), SHORT_S + GRACE_S, where)
    judge_good(scene, [after for _, _, after in got], 13, "the call after")


def absent(at: Rank) -> Any:
    """The last rank makes no call until the others have given it up."""
    met = None
    with at.merger(at.scene.shape(), SHORT_S) as merger:
        before = merge(at, merger, 5)
        if at.rank != at.size - 1:
            met = at.attempt(merge, at, merger, 5)
        at.meet()
        merger.reset()
        return before, met, merge(at, merger, 13)


def judge_absent(scene: Scene, got: list[Any]) -> None:
    judge_good(scene, [before for before, _, _ in got], 5, "the call before")
    for rank, (_, met, _) in enumerate(got[:-1]):
        where = f"rank {rank}, rank {scene.n - 1} being absent, with a deadline of {SHORT_S:g} s"
        expect_raised(met, ("TransportTimeout",), (f"rank {scene.n - 1}",), SHORT_S + GRACE_S, where)
    judge_good(scene, [after for _, _, after in got], 13, "the call after reset()")


def close_and_again(at: Rank) -> Any:
    """Close twice, one merger unused; then build again on the same group."""
    unused = at.merger(at.scene.shape())
    unused.close()
    unused.close()
    merger = at.merger(at.scene.shape())
    first = merge(at, merger, 5)
    merger.close()
    merger.close()
    refused = at.attempt(merge, at, merger, 5)
    with at.merger(at.scene.shape()) as again:
        return first, refused, merge(at, again, 13)


def judge_close_and_again(scene: Scene, got: list[Any]) -> None:
    judge_good(scene, [first for first, _, _ in got], 5, "the first merger")
    for rank, (_, refused, _) in enumerate(got):
        expect_raised(refused, ("DCPCommError",), ("closed",), 1.0, f"rank {rank}: a merge after close()")
    judge_good(scene, [again for _, _, again in got], 13, "the merger after it")


def half_done(at: Rank) -> None:
    """The transport alone, closed at every stage that is local, twice each time."""
    cls, group = load_transport(at.scene.transport), Group.of(at.group)
    group.device = at.device
    options = options_for(load_config({**at.scene.config}), cls)
    for prepared in (False, True):
        transport = cls(group, at.scene.shape(), options)
        if prepared:
            transport.prepare()
        for _ in range(2):
            transport.close()


def judge_half_done(scene: Scene, got: list[Any]) -> None:
    """That nothing was raised is all there is to it."""


LIFE: tuple[Case, ...] = (
    Case(
        name="tag-mismatch-named",
        proves="ranks that meet with different tags raise CallMismatch naming both, and never merge",
        rank_function=odd_tag,
        judge=judge_odd_tag,
        claim=sends_headers,
    ),
    Case(
        name="rows-mismatch-named",
        proves="ranks that meet with different B raise CallMismatch naming both, and never merge",
        rank_function=odd_rows,
        judge=judge_odd_rows,
        claim=ragged,
    ),
    Case(
        name="wrong-call-on-one-rank",
        proves="a rank whose call raises doesn't leave the others waiting, and the next call is right",
        rank_function=wrong_on_one,
        judge=judge_wrong_on_one,
        claim=spares_peers,
    ),
    Case(
        name="absent-rank-named",
        proves="a rank that doesn't call is named at the deadline, and reset() makes the merger whole",
        rank_function=absent,
        judge=judge_absent,
        claim=keeps_deadlines,
    ),
    Case(
        name="close-and-construct-again",
        proves="close() is safe twice and before any merge; the group serves again after it",
        rank_function=close_and_again,
        judge=judge_close_and_again,
    ),
    Case(
        name="close-half-done",
        proves="the transport's close() is safe twice, and before and after prepare()",
        rank_function=half_done,
        judge=judge_half_done,
    ),
)
