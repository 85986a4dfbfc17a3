"""Whole steps: sharded attention, merged as an engine would, is attention. MLA's sizes have tests of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dcpcomm import adapters, sharding
from dcpcomm.adapters import vllm
from tests.engines import adapted
from tests.oracle import NAN, shares
from tests.world import World, rank_of, size_of

B, D = 12, 48
STARTS = torch.tensor([0, 3, 4, 5, 9])  # rows 9, 10 and 11 are padding
REQUEST = torch.tensor([0, 0, 0, 1, 2, 3, 3, 3, 3, 0, 0, 0])
FORMS = {
    "heads": vllm.dcp_a2a_lse_reduce,
    "tokens": vllm.dcp_a2a_lse_reduce_token_sharded,
    "none": vllm.cp_lse_ag_out_ar,
}


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, H, D] over the first `counts` of k and v [B, S, Hkv, D]; the LSE in base 2, as FlashInfer's."""
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[2], dim=2) for one in (k, v))
    scores = torch.einsum("bhd,bshd->bhs", q, k) / q.shape[2] ** 0.5
    scores = scores.masked_fill((torch.arange(k.shape[1]) >= counts.unsqueeze(1)).unsqueeze(1), -torch.inf)
    return torch.einsum("bhs,bshd->bhd", scores.softmax(2), v), scores.logsumexp(2) / torch.log(torch.tensor(2.0))


def a_step(group: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor, interleave: int) -> Any:
    rank, n = rank_of(group), size_of(group)
    counts = sharding.local_row_counts(lens, STARTS, n, rank, interleave, num_rows=B)
    here = [entry for entry in range(k.shape[1]) if entry // interleave % n == rank]
    out, lse = attention(q, k[:, here], v[:, here], counts)
    out[counts == 0], lse[counts == 0] = NAN, 9.0
    with adapted(group) as coordinator:
        results = {
            form: function(out, lse, coordinator, None, True, False, valid_counts=counts, tag=7)
            for form, function in FORMS.items()
        }
        adapters.check_all()
    return results


@pytest.mark.parametrize("kv_heads", [1, 2, None], ids=["MQA", "GQA", "MHA"])
@pytest.mark.parametrize("interleave", [1, 4])
def test_speculative_rows_are_merged_in_every_form(
    some: World, rng: torch.Generator, kv_heads: int | None, interleave: int
) -> None:
    """Each request's rows see one entry more than the row before, so that on a rank some rows of a request are empty
    and others are not: of those, only the counts by row tell. What is in an empty row looks alive.
    """
    n, heads = some.n, 2 * some.n
    lens = torch.tensor([{1: 3, 4: 5}[interleave], 40, 1, 17])  # the first three rows see 1, 2, 3 or 3, 4, 5 entries
    q = torch.randn(B, heads, D, generator=rng)
    k, v = torch.randn(2, len(lens), int(lens.max()), kv_heads or heads, D, generator=rng)[:, REQUEST]
    seen = sharding.local_row_counts(lens, STARTS, 1, 0, num_rows=B)
    assert any(0 < (sharding.local_row_counts(lens, STARTS, n, r, interleave)[:3] == 0).sum() < 3 for r in range(n)), (
        "no request has rows that are empty and rows that are not"
    )
    want, want_lse = attention(q.double(), k.double(), v.double(), seen)
    want = want.nan_to_num(0.0)
    by_rank = some.run(a_step, q, k, v, lens, interleave)
    for form in FORMS:
        for rank, results in enumerate(by_rank):
            out, lse = results[form]
            torch.testing.assert_close(out.double(), shares(want, n, form)[rank], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(lse.double(), shares(want_lse, n, form)[rank], rtol=1e-5, atol=1e-5)
