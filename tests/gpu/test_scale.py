"""The kernel of AG+RS on a GPU: the checks of test_nvrtc_scale.py and more of them, in captures, and its times beside
those of what torch.compile makes of the same arithmetic. Times are printed, not judged.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dcpcomm.bench.rivals.compiled import Compiled
from dcpcomm.combine.kernels import Kernels
from dcpcomm.combine.scale import Scaler, scale_by_torch
from dcpcomm.transport import MergeShape
from tests import scale_checks as checks
from tests.gpu.test_kernels import microseconds
from tests.kernel_rig import DTYPES, Rig, any_lse
from tests.oracle import same_bits

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
    pytest.mark.timeout(300),
]
WIDTHS = (33, 40, 80, 128, 576)
_MADE: dict[Any, Any] = {}


@pytest.fixture
def rig(rng: torch.Generator) -> Rig:
    device = torch.device("cuda", torch.cuda.current_device())

    def make(dtype: torch.dtype, n: int, generic: bool) -> Kernels:
        kernels = Kernels(device, dtype, n, generic=generic)
        kernels.warm()
        return kernels

    return Rig(device, make, rng, _MADE)


@pytest.mark.parametrize("n", [2, 3, 8, 16, 17])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_is_the_oracle(rig: Rig, dtype: torch.dtype, n: int) -> None:
    checks.check_scale(rig, dtype, n, WIDTHS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_is_rounded_to_the_nearest_even(rig: Rig, dtype: torch.dtype) -> None:
    checks.check_scale_rounding(rig, dtype)


def test_extremes(rig: Rig) -> None:
    checks.check_scale_extremes(rig)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_loops_where_the_grid_is_smaller_than_the_work(rig: Rig, dtype: torch.dtype) -> None:
    checks.check_big_scale(rig, dtype, 2, 400, 128, 512)
    checks.check_big_scale(rig, dtype, 8, 400, 16, 65)


def test_float32_at_odd_addresses(rig: Rig) -> None:
    checks.check_scale_of_odd_float32(rig)


def shape_of(n: int, d: int, scatter: Any = "heads") -> MergeShape:
    return MergeShape(max_tokens=256, num_heads=16 * n, head_dim=d, dtype=torch.bfloat16, lse_base="e",
                      scatter=scatter, channels=2, v_head_dim=24)  # fmt: skip


@pytest.mark.parametrize("scatter", checks.SCATTERS)
def test_calls_share_what_was_bound(rig: Rig, scatter: str) -> None:
    for n in (2, 4):
        shape = shape_of(n, 128, scatter)
        checks.check_scaler(rig, Scaler(shape, n - 1, n, rig.device), shape, n - 1, n)


def test_replays_and_eager_calls_mix(rig: Rig) -> None:
    shape = shape_of(4, 128)
    scaler = Scaler(shape, 2, 4, rig.device)
    rows = torch.empty(6, 64, 128, dtype=torch.bfloat16, device=rig.device)
    lses = torch.empty(4, 6, 64, device=rig.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = scaler(rows, lses, 0)
    for number in range(20):
        rows.copy_(rig.randn(*rows.shape))
        lses.copy_(any_lse(rig, *lses.shape).nan_to_num(-torch.inf, -torch.inf, -torch.inf))
        eager = scaler(rows, lses, 0)
        if number % 3 == 2:
            scaler(rows[:2], lses[:, :2].contiguous(), 1)
        graph.replay()
        torch.cuda.synchronize()
        for one, other in zip(captured, eager, strict=True):
            assert same_bits(one.cpu(), other.cpu()), f"round {number}"
        checks.judge((rows.cpu(), lses.cpu()), 2, "heads", "e", eager[0].cpu(), eager[1].cpu())


@pytest.mark.filterwarnings("default")  # torch.compile has warnings of its own
@pytest.mark.parametrize(("n", "d"), [(2, 128), (8, 576)])
def test_times(rig: Rig, n: int, d: int, capsys: pytest.CaptureFixture[str]) -> None:
    def as_the_rival(out: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:  # of bench/rivals/ag_rs.py
        weight = torch.exp(lses - lses.amax(0))
        share = weight[0] / weight.sum(0)
        scaled: torch.Tensor = (out.float() * share.unsqueeze(-1)).to(out.dtype)
        by_rank: torch.Tensor = scaled.unflatten(1, (n, -1)).transpose(0, 1)
        return by_rank.contiguous()

    scaler, compiled, lines = Scaler(shape_of(n, d), 0, n, rig.device), Compiled(as_the_rival), []
    for b in (1, 64, 256):
        rows = torch.randn(b, 16 * n, d, dtype=torch.bfloat16, device=rig.device)
        lses = torch.randn(n, b, 16 * n, device=rig.device)
        compiled.begin()
        compiled(rows, lses)
        times = [
            microseconds(call)
            for call in (
                lambda stream: scaler(rows, lses, 0),  # noqa: B023
                lambda stream: compiled(rows, lses),  # noqa: B023
                lambda stream: scale_by_torch(rows, lses, 0, "heads", "e"),  # noqa: B023
            )
        ]
        lines.append(f"N={n} D={d} B={b}: kernel {times[0]:.2f} us, torch.compile {times[1]:.2f}, torch {times[2]:.2f}")
    with capsys.disabled():
        print("\n" + "\n".join(lines), end="")
