"""Both halves of every line, twice: either may be old, and what is lost in both is told."""

from __future__ import annotations

import pytest
import torch

from dcpcomm.backends.helix_twins import Twins
from dcpcomm.errors import VerificationFailed
from tests.helix_rig import own_cache, shape_for

__all__ = ["own_cache"]

pytestmark = pytest.mark.usefixtures("own_cache")


def both() -> list[Twins]:
    """A sender's and a receiver's."""
    return [Twins(shape_for(2), 2, torch.device("cpu"), seed=5) for _ in range(2)]


@pytest.mark.parametrize("half", [0, 1])
def test_either_half_of_any_line_may_be_old(half: int) -> None:
    sender, receiver = both()
    out, lse = torch.randn(16, 2, 8, 64).bfloat16(), torch.randn(16, 2, 8)
    old = None
    for _ in range(3):
        sent = sender.sent(out, lse, 0)
        receiver._calls[0].copy_(sender._calls[0])
        rows = sent.rows.clone()
        halves = rows.view(torch.int64).view(-1, 2, 8)
        if old is not None:
            halves[:, half] = old.view(torch.int64).view(-1, 2, 8)[:, half]
        got, got_lse = receiver.arrived(sent._replace(rows=rows), (16, 2, 8, 64), 0)
        assert torch.equal(got, out)
        assert torch.equal(got_lse, lse)
        old = sent.rows
    receiver.poll(0)
    assert receiver.healed(0) == 2 * len(halves)


@pytest.mark.parametrize("word", [0, 6, 7])
def test_a_piece_lost_in_both_halves_makes_its_row_nan_and_is_told(word: int) -> None:
    sender, receiver = both()
    out, lse = torch.randn(4, 2, 8, 64).bfloat16(), torch.full((4, 2, 8), -torch.inf)
    sent = sender.sent(out, lse, 0)
    receiver._calls[0].copy_(sender._calls[0])
    sent.rows.view(torch.int64).view(-1, 2, 2, 8)[7, 1, :, word] ^= 1 << 40
    got, got_lse = receiver.arrived(sent, (4, 2, 8, 64), 0)
    broken = got.isnan().any(-1).any(-1)
    assert int(broken.sum()) == 1
    assert bool((got_lse[broken] > 1e38).all()), "under -inf the row would silently be left out"
    assert torch.equal(got[~broken], out[~broken])
    with pytest.raises(VerificationFailed, match="1 pieces of 56 bytes came wrong in both"):
        receiver.poll(0)


def test_rows_of_another_call_do_not_prove_right() -> None:
    """An earlier call's message, whole and well formed: a rank that skipped a merge, say."""
    sender, receiver = both()
    out, lse = torch.randn(4, 2, 8, 64).bfloat16(), torch.randn(4, 2, 8)
    early = sender.sent(out, lse, 0)
    early = early._replace(rows=early.rows.clone())
    sender.sent(out, lse, 0)
    receiver._calls[0].copy_(sender._calls[0])
    got, _ = receiver.arrived(early, (4, 2, 8, 64), 0)
    assert bool(got.isnan().all())
    with pytest.raises(VerificationFailed):
        receiver.poll(0)
