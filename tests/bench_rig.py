"""Small sweeps, cells and answers, for tests of the benchmark."""

from __future__ import annotations

from typing import Any

import torch

from dcpcomm.bench.limits import Limits
from dcpcomm.bench.measure import Answer, Case
from dcpcomm.bench.sweep import Cell, Sweep
from dcpcomm.bench.table import Row
from dcpcomm.bench.timing import Summary, Times

LIMITS = Limits(1.3, 2.4, 1.0, 1.8, {1 << 26: 400.0})
CPU = torch.device("cpu")
SMALL = {"heads": (8,), "dim": (32,), "rows": (1, 3), "transport": ("loopback_peer",)}
CELL = Cell(2, 8, 32, "bfloat16", "none", None, 3)


def sweep(**changes: Any) -> Sweep:
    return Sweep(**{**SMALL, **changes})


def row(times: Summary | None, wrong: int = 0) -> Row:
    return Row(1 << 20, 64, 128, 128, "bfloat16", 4, "some", times, wrong, 5.0)


def answers(wrong: int = 0) -> list[Answer]:
    def case(us: float) -> Case:
        return Case("loopback_peer", CELL, Times((us, us)), wrong, Times((us / 2,)))

    return [Answer("GPU A", LIMITS, [case(8.0)]), Answer("GPU B", LIMITS, [case(10.0)])]
