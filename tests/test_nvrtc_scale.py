"""The kernel of AG+RS: its own source, compiled for the CPU and run, and whole merges that use it.

tests/gpu/test_scale.py makes the same checks on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from dcpcomm import topology
from dcpcomm.combine import cuda_engine, scale
from dcpcomm.combine.scale import Scaler, scale_params
from dcpcomm.errors import ShapeError
from dcpcomm.testing import run_conformance
from dcpcomm.testing.conformance import CASES
from dcpcomm.topology import Facts
from dcpcomm.transport import MergeShape, Verdict
from tests import scale_checks as checks
from tests.emulated import COMPILER, EmulatedKernels
from tests.gloo_as_nccl import AgRsOverGloo
from tests.kernel_rig import Rig
from tests.oracle import same_bits
from tests.pretend_gpu import pretend

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernels for the CPU with")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture
def rig(folder: Path, rng: torch.Generator) -> Iterator[Rig]:
    def make(dtype: torch.dtype, n: int, generic: bool) -> Any:
        return EmulatedKernels(dtype, n, folder, generic=generic, files=("scale.cu",))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Rig(torch.device("cpu"), make, rng)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("dtype", "n", "widths"),
    [
        (torch.bfloat16, 2, (33, 80)),
        (torch.bfloat16, 3, (40,)),
        (torch.bfloat16, 8, (40,)),
        (torch.bfloat16, 17, (33,)),
        (torch.float16, 2, (80,)),
        (torch.float32, 3, (33, 40)),
    ],
)
def test_scale_is_the_oracle(rig: Rig, dtype: torch.dtype, n: int, widths: tuple[int, ...]) -> None:
    checks.check_scale(rig, dtype, n, widths)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_is_rounded_to_the_nearest_even(rig: Rig, dtype: torch.dtype) -> None:
    checks.check_scale_rounding(rig, dtype)


def test_extremes(rig: Rig) -> None:
    checks.check_scale_extremes(rig)


def test_scale_loops_where_the_grid_is_smaller_than_the_work(rig: Rig) -> None:
    checks.check_big_scale(rig, torch.bfloat16, 2, 80, 4, 72)
    checks.check_big_scale(rig, torch.bfloat16, 3, 15, 6, 33)


def test_float32_at_odd_addresses(rig: Rig) -> None:
    checks.check_scale_of_odd_float32(rig)


def test_more_rows_than_a_launch_can_count_are_refused() -> None:
    whole = torch.empty(1).expand(1 << 16, 1 << 15, 1)
    lses = torch.empty(1).expand(2, 1 << 16, 1 << 15)
    with pytest.raises(ShapeError, match="2147483648 rows"):
        scale_params(whole, lses, whole.unsqueeze(0), lses[0], 0, "none", "e")


def scaler_for(rig: Rig, shape: MergeShape, rank: int, n: int, monkeypatch: pytest.MonkeyPatch) -> Scaler:
    monkeypatch.setattr(topology, "on_gpu", lambda device: True)
    monkeypatch.setattr(cuda_engine, "kernels_for", lambda device, dtype, size: rig.kernels(dtype, size))
    monkeypatch.setattr(topology, "current_stream", lambda device: 0)
    return Scaler(shape, rank, n, rig.device)


@pytest.mark.parametrize("scatter", ["heads", "tokens", "none"])
def test_calls_share_what_was_bound(rig: Rig, scatter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "_BINDINGS_KEPT", 5)
    shape = MergeShape(max_tokens=9, num_heads=4, head_dim=40, dtype=torch.bfloat16, lse_base="2", scatter=scatter,
                       channels=2, v_head_dim=24)  # fmt: skip
    scaler = scaler_for(rig, shape, 1, 2, monkeypatch)
    checks.check_scaler(rig, scaler, shape, 1, 2)
    assert all(0 < len(bound) <= 5 for bound in scaler._bound)
    scaler._bound[0].clear()
    rows, lses = rig.randn(2, 4, 40, dtype=torch.bfloat16), rig.randn(2, 2, 4)
    scaler(rows, lses, 0)
    odd = torch.cat([rows.new_zeros(1), rows.flatten()])[1:].view(rows.shape)
    assert rows.data_ptr() % 16 == 0 != odd.data_ptr() % 16
    scaler(odd, lses, 0)
    units = [params.rows_unit for _, params in scaler._bound[0].values()]
    assert units == [16, 2], "loaded by vectors where a GPU can't"
    before = dict(scaler._bound[0])
    first, second = scaler(rows, lses, 0), scaler(rows.clone(), lses.clone(), 0)
    assert scaler._bound[0] == before, "a call like one before it bound anew"
    for one, other in zip(first, second, strict=True):
        assert same_bits(one, other)
        assert one.data_ptr() != other.data_ptr(), "a later call changes the result of an earlier one"


#: Of the conformance suite, what the kernel has a part in. The whole suite runs over torch's operations, in
#: test_nccl_on_cpu.py.
TAKEN = {
    "constructs", "heads-in-order", "more-than-max-tokens", "width-36", "width-80", "scatter-tokens", "scatter-none",
    "layouts", "lse-base-2", "lse-whole", "empty-rows", "weights-that-underflow", "results-kept", "channels",
}  # fmt: skip


class OverGlooBetweenThreads(AgRsOverGloo):
    name: ClassVar[str] = "ag_rs_between_threads"

    @classmethod
    def check(cls, facts: Facts) -> Verdict:
        return Verdict(True)


def test_conformance_with_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    used = pretend(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    by_kernel: list[Any] = []
    real = EmulatedKernels.bind_scale

    def noting(self: EmulatedKernels, params: Any, vectors: bool | None = None) -> Any:
        by_kernel.append(params)
        return real(self, params, vectors)

    monkeypatch.setattr(EmulatedKernels, "bind_scale", noting)
    cases = [case for case in CASES if case.name in TAKEN]
    assert len(cases) == len(TAKEN)
    report = run_conformance(OverGlooBetweenThreads, ranks=(3,), cases=cases, device="cpu", world="threads")
    failed = {result.case: result.detail[:600] for result in report.results if result.outcome == "failed"}
    assert not failed
    assert used
    assert by_kernel
