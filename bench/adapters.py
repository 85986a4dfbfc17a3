"""What an adapter costs the host over the merge that it calls.

    python -m dcpcomm.bench.adapters

A merger that does nothing stands behind both, so that what is left is the adapter's own: finding the merger, the
micro-batch, and handing the arguments on. Medians of single calls, taken in turn; the difference is the cost. Where an
adapter makes the result itself, the merge is given one that is made as the merger would have.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from dcpcomm.adapters import sglang, vllm
from dcpcomm.adapters.mergers import MERGERS, Entry, Key

__all__ = ["cost_us"]

_B, _H, _D = 8, 128, 128


class _Nothing:
    """In the place of a merger: returns what it got."""

    def merge(
        self,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        *,
        valid_counts: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        query_start_loc: torch.Tensor | None = None,
        return_lse: bool = False,
        channel: int = 0,
        out: torch.Tensor | None = None,
        tag: int = 0,
    ) -> torch.Tensor:
        return partial_out


def cost_us(calls: int = 20_000) -> dict[str, float]:
    """Microseconds that each adapter adds to `merge`, by its name."""
    nothing: Any = _Nothing()
    group: Any = SimpleNamespace(rank_in_group=0, world_size=2)
    out, lse = torch.zeros(_B, _H, _D, dtype=torch.bfloat16), torch.zeros(_B, _H)
    lens, starts = torch.ones(_B, dtype=torch.int32), torch.arange(_B + 1, dtype=torch.int32)
    given: dict[str, Any] = {"seq_lens": lens, "query_start_loc": starts}
    cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "vllm.dcp_a2a_lse_reduce": (
            lambda: vllm.dcp_a2a_lse_reduce(out, lse, group, return_lse=True, is_lse_base_on_e=True),
            lambda: nothing.merge(out, lse, return_lse=True),
        ),
        "vllm.dcp_a2a_lse_reduce, with lengths": (
            lambda: vllm.dcp_a2a_lse_reduce(out, lse, group, is_lse_base_on_e=True, **given),
            lambda: nothing.merge(out, lse, **given),
        ),
        "sglang.dcp_a2a_lse_reduce": (
            lambda: sglang.dcp_a2a_lse_reduce(out, lse, group, is_lse_base_on_e=True),
            lambda: nothing.merge(out, lse),
        ),
        "sglang.cp_lse_ag_out_rs_mla": (
            lambda: sglang.cp_lse_ag_out_rs_mla(out, lse, group, is_lse_base_on_e=True),
            lambda: nothing.merge(out, lse, out=torch.empty((_B, _H // 2, _D), dtype=out.dtype, device=out.device)),
        ),
    }
    try:
        MERGERS.put(Key(id(group), _H, _D, out.dtype, out.device, True, "heads"), Entry(nothing, 1, group))
        return {name: _median(adapter, merge, calls) for name, (adapter, merge) in cases.items()}
    finally:
        MERGERS.forget(group)


def _median(adapter: Callable[[], object], merge: Callable[[], object], calls: int) -> float:
    ns: tuple[list[int], list[int]] = [], []
    clock = time.perf_counter_ns
    for turn in range(calls + calls // 10):
        for call, taken in zip((adapter, merge), ns, strict=True):
            began = clock()
            call()
            ended = clock()
            if turn >= calls // 10:  # the first ones warm
                taken.append(ended - began)
    return (statistics.median(ns[0]) - statistics.median(ns[1])) / 1e3


def main() -> None:
    print(f"us of host time that an adapter adds to a merge; Python {platform.python_version()}, {platform.machine()}")
    for name, us in cost_us().items():
        print(f"  {name:40} {us:.2f}")


if __name__ == "__main__":
    main()
