"""The checks of the fused kernel: what good calls answer, and what they leave."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from dcpcomm.combine.engine import Layout, Partials
from dcpcomm.combine.peer_options import PeerOptions
from dcpcomm.rows import RowCounts
from tests.fused_rig import Ranks, assert_right, canonical, header_of, one_call, shape_for
from tests.kernel_rig import DTYPES, POISON, Findings, Rig, any_lse, bits, layouts, lse_layouts
from tests.oracle import Case, judge


def check_calls(
    rig: Rig, dtype: torch.dtype, n: int, d: int, scatter: str = "heads", rounds: int = 6, *options: PeerOptions,
    generic: bool = False,
) -> None:  # fmt: skip
    """Call after call, B changing: layouts, LSE dtypes and forms of counts differ by rank, one rank is late, strided
    results. Each is right, bit-equal to combine.cu, and leaves everything ready for the next.
    """
    shape = shape_for(n, d, dtype, scatter=scatter, lse_base="2" if rig.randint(0, 2, (1,)) else "e")
    ranks = Ranks(rig, n, shape, *options, generic=generic)
    findings = Findings()
    names = list(layouts(torch.zeros(1, 1, 1), torch.device("cpu")))
    for number in range(rounds):
        b = int(rig.randint(1, shape.max_tokens // n + 1, (1,))) * (n if scatter == "tokens" else 1)
        outs, lses = rig.randn(n, b, shape.num_heads, d, dtype=dtype), any_lse(rig, n, b, shape.num_heads)
        outs[torch.isnan(lses) | (lses == -torch.inf)] = torch.nan  # garbage, which must not count
        counts = rig.randint(0, 3, (n, b)) if number % 3 else None
        held, cast = [], []
        for rank in range(n):
            cast.append(lses[rank].to(DTYPES[(rank + number) % 3]))
            out = layouts(outs[rank], rig.device)[names[(rank * 3 + number) % len(names)]]
            lse_views = lse_layouts(cast[rank], rig.device)
            lse = lse_views[list(lse_views)[(rank + number) % len(lse_views)]]
            held.append(Partials(out, lse, None if counts is None else RowCounts(counts[rank].to(rig.device))))
        results = [ranks.room(b, d) for _ in range(n)]
        if number % 2:  # into every other column
            results = [(torch.stack([out, out], -1)[..., 0], lse) for out, lse in results]
        wants = canonical(ranks, outs, cast, counts)
        header, late = header_of(b, d, tag=number - 2), int(rig.randint(0, n, (1,)))

        def call(rank: int, held: Any = held, results: Any = results, header: Any = header, late: int = late) -> None:
            if rank == late:
                time.sleep(random.random() * 0.005)
            out, lse = results[rank]
            ranks.merge(rank, held[rank], out, lse if header.tag % 2 else None, header)

        rig.sync()
        ranks.together(call)
        with findings.case(f"{dtype} N={n} D={d} {scatter} round {number}, B={b}"):
            ranks.assert_ready(number + 1)
            case = Case(torch.nan_to_num(outs), torch.stack([one.float() for one in cast]), shape.lse_base, counts)
            judge([out.cpu() for out, _ in results], case, scatter)
            for (out, lse), (want, want_lse) in zip(results, wants, strict=True):
                assert torch.equal(bits(out), bits(want)), "other bits than combine.cu's"
                if header.tag % 2:
                    assert torch.equal(bits(lse), bits(want_lse))
                else:
                    assert bool((lse.view(torch.uint8) == POISON).all()), "an LSE was written that nobody wanted"
    assert ranks.ordinals[:, 0].tolist() == [rounds] * n
    findings.report()


def check_back_to_back(rig: Rig, n: int, d: int, rounds: int = 12, *options: PeerOptions) -> None:
    """Ranks that run ahead of each other, as far as the calls allow: nobody waits between one call and the next."""
    shape = shape_for(n, d, torch.bfloat16)
    ranks = Ranks(rig, n, shape, *options)
    calls = [one_call(ranks, 1 + number % shape.max_tokens, d) for number in range(rounds)]
    headers = [header_of(1 + number % shape.max_tokens, d, tag=number) for number in range(rounds)]

    def call(rank: int) -> None:
        pauses = random.Random(rank + random.random())
        for (held, results, _), header in zip(calls, headers, strict=True):
            if pauses.random() < 0.3:
                time.sleep(pauses.random() * 0.002)
            ranks.merge(rank, held[rank], *results[rank], header)

    ranks.together(call)
    findings = Findings()
    for number, (_, results, wants) in enumerate(calls):
        with findings.case(f"N={n} round {number}"):
            assert_right(results, wants)
    findings.report()
    ranks.assert_ready(rounds)


def check_grids_differ(rig: Rig, n: int) -> None:
    """Blocks, threads and tiles are each rank's own affair."""
    choices = [PeerOptions(blocks=1, threads=64), PeerOptions(vectors_per_thread=3, threads=64), PeerOptions(blocks=2)]
    check_calls(rig, torch.bfloat16, n, 128, "heads", 4, *choices)


def check_sentinels_travel(rig: Rig, n: int) -> None:
    """A payload all of whose bits are set is a NaN, and arrives as one."""
    for dtype in DTYPES:
        shape = shape_for(n, 64, dtype)
        ranks = Ranks(rig, n, shape)
        out = torch.full((3, shape.num_heads, 64), 0xFF, dtype=torch.uint8).repeat(1, 1, dtype.itemsize).view(dtype)
        assert bool(torch.isnan(out).all())
        lse = torch.zeros(3, shape.num_heads)
        results = [ranks.room(3, 64) for _ in range(n)]
        mine = Partials(out.to(rig.device), lse.to(rig.device), None)
        rig.sync()

        def call(rank: int, ranks: Ranks = ranks, mine: Partials = mine, results: Any = results) -> None:
            ranks.merge(rank, mine, *results[rank], header_of(3, 64))

        ranks.together(call)
        assert all(bool(torch.isnan(out).all()) for out, _ in results)
        ranks.assert_ready(1)


def check_chunks(rig: Rig, n: int) -> None:
    """Rows from a later one on, with the whole call's counts in both forms; many chunks by one call object."""
    d, most = 64, 2
    shape = shape_for(n, d, torch.bfloat16, max_tokens=most)
    ranks = Ranks(rig, n, shape)
    b = 4 * most
    outs, lses = rig.randn(n, b, shape.num_heads, d, dtype=shape.dtype), rig.randn(n, b, shape.num_heads)
    counts = rig.randint(0, 2, (n, b))
    starts = torch.arange(b + 1, dtype=torch.int32, device=rig.device)
    given = [
        RowCounts(counts[rank].to(rig.device)) if rank % 2
        else RowCounts(None, counts[rank].to(rig.device), starts)
        for rank in range(n)
    ]  # fmt: skip
    held = [Partials(outs[rank].to(rig.device), lses[rank].to(rig.device), given[rank]) for rank in range(n)]
    results = [(rig.poisoned((b, 2, d), shape.dtype), rig.poisoned((b, 2), torch.float32)) for _ in range(n)]
    wants = canonical(ranks, outs, list(lses), counts)

    def call(rank: int) -> None:
        layout = Layout(b, most, d, held[rank].out.stride(), held[rank].lse.stride(), torch.float32)
        one = ranks.peers[rank].call(ranks.engines[rank], 0, layout)
        for chunk in range(b // most):
            part = slice(chunk * most, chunk * most + most)
            header = header_of(b, d, chunk=chunk)
            one.merge(held[rank], part.start, header, results[rank][0][part], results[rank][1][part])

    rig.sync()
    ranks.together(call)
    assert_right(results, wants)
    ranks.assert_ready(b // most)
