"""Rows 18 and 19 of the list of faults: where buffers lie, by arithmetic alone; nothing is allocated."""

from __future__ import annotations

import itertools

import pytest
import torch

import dcpcomm
from dcpcomm.workspace import plan

TOKENS = (1, 3, 7, 1000, 16384, 16385)
WIDTHS = (64, 72, 80, 96, 128, 192, 256, 512, 576)
SIZES = (2, 3, 4, 5, 6, 7, 8, 16)


def shape_of(n: int, tokens: int, width: int, **changes: object) -> dcpcomm.MergeShape:
    given = {
        "max_tokens": tokens,
        "num_heads": 4 * n,
        "head_dim": width,
        "dtype": torch.bfloat16,
        "lse_base": "e",
    }
    return dcpcomm.MergeShape(**{**given, **changes})


def payload_bytes(shape: dcpcomm.MergeShape, n: int) -> int:
    """What one channel receives at the least: every rank's rows of this rank's slice, LSE included."""
    if shape.scatter == "none":
        rows = shape.max_tokens * shape.num_heads
    elif shape.scatter == "heads":
        rows = shape.max_tokens * (shape.num_heads // n)
    else:
        rows = (shape.max_tokens // n) * shape.num_heads
    return n * rows * (shape.head_dim * shape.dtype.itemsize + 4)


def check_plan(shape: dcpcomm.MergeShape, n: int) -> None:
    made = plan(shape, n)
    what = f"{shape} on {n} ranks"
    assert made.regions, what
    assert len({r.name for r in made.regions}) == len(made.regions), f"two regions of one name: {what}"
    end = 0
    for region in sorted(made.regions, key=lambda r: r.offset):
        assert isinstance(region.offset, int), what
        assert region.offset % 128 == 0, f"{region} is not 128-byte aligned: {what}"
        assert region.offset >= end, f"{region} begins before {end}, the end of the one before: {what}"
        assert region.nbytes > 0, f"{region}: {what}"
        end = region.offset + region.nbytes
    assert end <= made.total, f"the last region ends at {end}, past the total {made.total}: {what}"
    assert made.total - end < 128, f"{made.total - end} bytes at the end belong to nothing: {what}"
    assert made.total == dcpcomm.plan_bytes(shape, world_size=n, config={"transport": "gloo_a2a"}), what
    assert made.total >= shape.channels * payload_bytes(shape, n), f"the rows do not fit: {what}"


@pytest.mark.parametrize("n", SIZES)
def test_every_region_is_aligned_and_apart(n: int) -> None:
    """Row 18."""
    for tokens, width in itertools.product(TOKENS, WIDTHS):
        check_plan(shape_of(n, tokens, width), n)


@pytest.mark.parametrize("n", [2, 3, 16])
@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float32},
        {"dtype": torch.float16, "channels": 3},
        {"scatter": "tokens", "channels": 2},
        {"scatter": "none"},
        {"v_head_dim": 33},
        {"v_head_dim": 1024, "channels": 2},
    ],
    ids=str,
)
def test_every_region_is_aligned_and_apart_for_every_kind_of_shape(n: int, changes: dict) -> None:
    for tokens, width in itertools.product((1, 7, 16385), (1, 33, 80, 576)):
        check_plan(shape_of(n, tokens, width, **changes), n)


def test_offsets_past_two_gigabytes_do_not_wrap() -> None:
    """Row 19: 64 ranks with 288 MiB each."""
    n, width, per_rank = 64, 576, 288 * 2**20
    tokens = per_rank // (4 * (width * 2 + 16)) + 1
    shape = shape_of(n, tokens, width)
    check_plan(shape, n)
    assert plan(shape, n).total >= n * per_rank
    assert max(r.offset + r.nbytes for r in plan(shape, n).regions) > 2**33


def test_a_workspace_just_past_two_gigabytes() -> None:
    """Row 19: sizes around 2^31 and 2^32, where 32-bit arithmetic turns negative or small."""
    totals = []
    for limit in (2**31, 2**32):
        row = 4 * (576 * 2 + 16) * 2
        for tokens in range(limit // row - 2, limit // row + 3):
            shape = shape_of(2, tokens, 576)
            check_plan(shape, 2)
            totals.append(plan(shape, 2).total)
    assert totals == sorted(totals)
    assert min(totals) > 0


def test_heads_that_do_not_divide_are_refused_before_anything_is_planned() -> None:
    shape = dcpcomm.MergeShape(max_tokens=8, num_heads=10, head_dim=64, dtype=torch.bfloat16, lse_base="e")
    with pytest.raises(dcpcomm.ShapeError, match=r"10.*4"):
        dcpcomm.plan_bytes(shape, world_size=4)
