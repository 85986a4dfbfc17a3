"""`nvshmem_put` without a GPU: ranks are threads, a library of our own stands for NVSHMEM, kernels run on the CPU."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pydantic import ValidationError

import dcpcomm
from dcpcomm.backends import nvshmem_library
from dcpcomm.backends.nvshmem_library import NvshmemLibrary
from dcpcomm.backends.nvshmem_put import NvshmemOptions, NvshmemPut
from dcpcomm.combine.fused import fused_bytes
from dcpcomm.combine.put_signal import put_bytes
from dcpcomm.errors import DCPCommError
from dcpcomm.registry import register_transport, unregister_transport
from dcpcomm.testing import LoopbackWorld, run_conformance
from dcpcomm.testing.conformance import CASES
from dcpcomm.topology import Facts
from dcpcomm.transport import MergeShape
from tests.emulated import COMPILER
from tests.nvshmem_rig import ByPeer, ByPut, Jobs, processes
from tests.oracle import judge, make_case
from tests.pretend_nvshmem import Cmp_type, Init_status, Job, Signal_op, _Process

emulated = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernels for the CPU with")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with processes(monkeypatch, tmp_path_factory.getbasetemp()) as make:
        yield make


TAKEN = {
    "constructs", "many-calls", "late-ranks", "channels", "two-mergers", "equals-loopback", "tag-mismatch-named",
    "absent-rank-named", "close-and-construct-again", "close-half-done", "what-was-asked-for",
}  # fmt: skip
#: Of the exchange, which is new, more than of the kernel, which other transports have too.
TAKEN_BY_PUTS = {
    *TAKEN, "rows-vary", "more-than-max-tokens", "width-80", "scatter-heads", "scatter-tokens", "scatter-none",
    "empty-rows", "slow-reader", "rows-mismatch-named", "results-kept", "slices-by-group-rank",
}  # fmt: skip


@emulated
@pytest.mark.parametrize(
    ("cls", "reaches"), [(ByPeer, lambda a, b: True), (ByPut, lambda a, b: False)], ids=["peer", "put_signal"]
)
def test_conformance_on_both_paths(jobs: Jobs, cls: Any, reaches: Any) -> None:
    job = jobs(2, reaches)
    taken = TAKEN_BY_PUTS if cls is ByPut else TAKEN
    cases = [case for case in CASES if case.name in taken]
    assert len(cases) == len(taken)
    report = run_conformance(cls, ranks=(2,), cases=cases, device="cpu", world="threads")
    failed = {result.case: result.detail[:600] for result in report.results if result.outcome == "failed"}
    assert not failed
    assert not job.said


def facts(place: str, device: str = "cuda") -> Facts:
    return Facts(0, 2, "host", device, place, torch.__version__)


def test_what_can_not_be_is_told_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "loopback_peer" in NvshmemPut.check(facts("loopback")).remedy
    assert "the merger is on cpu" in NvshmemPut.check(facts("cpu", "cpu")).reason
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for cuda, names in (("12.8", ["cu12"]), ("13.0", ["cu13"]), (None, ["cu12", "cu13"])):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        verdict = NvshmemPut.check(facts("sm_90"))
        assert verdict.reason == "nvshmem4py isn't installed"
        for one in ("cu12", "cu13"):
            assert all(
                (text in verdict.remedy) == (one in names)
                for text in (f"dcpcomm[{one}]", f"nvshmem4py-{one}", f"nvidia-nvshmem-{one}")
            )


def test_a_package_for_another_cuda_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(nvshmem_library, "_version", lambda name: "0.4.1" if name == "nvshmem4py-cu12" else "")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    verdict = NvshmemPut.check(facts("sm_90"))
    assert verdict.reason == "nvshmem4py is for CUDA 12; torch was built for CUDA 13"
    assert "nvshmem4py-cu13" in verdict.remedy
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert NvshmemPut.check(facts("sm_90")).ok


def test_checking_imports_nothing_and_loading_says_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Any:
        raise ImportError("libnvshmem_host.so.3: cannot open shared object file")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(nvshmem_library, "library", absent)
    assert NvshmemPut.check(facts("sm_90")).ok
    verdict = NvshmemPut.load(facts("sm_90"))
    assert "libnvshmem_host.so.3" in verdict.reason
    assert "nvidia-nvshmem-cu12" in verdict.remedy


def test_it_is_a_candidate_only_where_it_is_asked_for() -> None:
    assert NvshmemPut.capabilities.may_hang
    assert NvshmemPut.capabilities.multi_host
    assert not any(place.startswith(("sm_", "cpu")) for place in NvshmemPut.capabilities.proven_on)


def test_a_package_that_is_too_old_says_what_it_lacks() -> None:
    process = _Process(Job(1), 0)
    del process.bindings.signal_wait_until_on_stream
    with pytest.raises(
        DCPCommError, match=r"nvshmem4py 0\.4\.1 has no signal_wait_until_on_stream; expected 0\.1\.3 or later"
    ):
        NvshmemLibrary(process.core, process.bindings)


def test_the_real_package_has_what_is_used() -> None:
    """Functions by the names of their arguments, as their compiled docstrings have them; constants by their values."""
    real = pytest.importorskip("nvshmem.bindings", reason="nvshmem4py is not installed: pip install 'dcpcomm[cu12]'")
    pretended = _Process(Job(1), 0).bindings
    for name in nvshmem_library._NEEDED[1:]:
        said = re.match(rf"{name}\((.*?)\)", getattr(real, name).__doc__)
        assert said is not None, name
        words = [one.split()[-1] for one in said[1].split(",") if one]
        assert words == list(inspect.signature(getattr(pretended, name)).parameters), name
    for kind in (Cmp_type, Init_status, Signal_op):
        there = {one.name: int(one) for one in getattr(real, kind.__name__)}
        assert {one.name: int(one) for one in kind}.items() <= there.items()
    assert real.uniqueid_dtype.itemsize == pretended.uniqueid_dtype.itemsize
    words = list(inspect.signature(importlib.import_module("nvshmem.core").init).parameters)
    assert words == list(inspect.signature(_Process(Job(1), 0).core.init).parameters)


def test_options_are_those_of_the_kernel_and_the_path() -> None:
    assert NvshmemOptions(threads=64).path == "auto"
    with pytest.raises(ValidationError, match="'auto', 'peer' or 'put_signal'"):
        NvshmemOptions(path="ipc")  # type: ignore[arg-type]
    with pytest.raises(
        ValidationError, match="strict, threads: of the fused kernel, which path put_signal doesn't use"
    ):
        NvshmemOptions(path="put_signal", threads=64, strict=True)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_bytes_are_those_of_the_path(n: int) -> None:
    shape = MergeShape(max_tokens=100, num_heads=8 * n, head_dim=128, dtype=torch.bfloat16, lse_base="e", channels=2)

    def planned(path: Any) -> int:
        return NvshmemPut.device_bytes(shape, n, NvshmemOptions(path=path))

    assert planned("peer") == fused_bytes(shape, n)
    assert planned("put_signal") == put_bytes(shape, n)
    assert planned("auto") == NvshmemPut.device_bytes(shape, n, None) == max(planned("peer"), planned("put_signal"))


# ---------------------------------------------------------------- merging


def merges(group: Any, case: Any, name: str) -> Any:
    shape = MergeShape(max_tokens=8, num_heads=8, head_dim=32, dtype=torch.float32, lse_base=case.base, channels=2)
    config = {"transport": name}
    with dcpcomm.DCPMerger(group, shape, config) as merger:
        results = [merger.merge(case.outs[group.rank], case.lses[group.rank], return_lse=True) for _ in range(3)]
        planned = dcpcomm.plan_bytes(shape, group.size, config, device="cuda")
        return results, merger.device_bytes, planned


@emulated
@pytest.mark.parametrize("reach", [True, False], ids=["peer", "put_signal"])
def test_merges_are_right_and_take_what_was_planned(
    jobs: Jobs, rng: torch.Generator, reach: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    job, cls = jobs(2, lambda a, b: reach), ByPeer if reach else ByPut
    register_transport(cls.name, cls)
    try:
        case = make_case(rng, 2, b=5, h=8, d=32, dtype=torch.float32)
        answers = LoopbackWorld(2).run(merges, case, cls.name)
    finally:
        unregister_transport(cls.name)
    for results in zip(*(results for results, _, _ in answers), strict=True):
        judge(list(results), case)
    assert all(held == planned for _, held, planned in answers)
    assert not job.held
    assert not job.said


def raises_once(group: Any, case: Any, name: str) -> Any:
    shape = MergeShape(max_tokens=8, num_heads=8, head_dim=32, dtype=torch.float32, lse_base=case.base)
    with dcpcomm.DCPMerger(group, shape, {"transport": name}) as merger:
        out, lse = case.outs[group.rank], case.lses[group.rank]
        merger.merge(out, lse)
        said = ""
        try:
            merger.merge(out, lse.double() if group.rank else lse)
            merger.check()
        except DCPCommError as error:
            said = str(error)
        return said, merger.merge(out, lse)


@emulated
@pytest.mark.parametrize("reach", [True, False], ids=["peer", "put_signal"])
def test_a_call_that_raised_on_one_rank_is_told_and_the_next_is_right(
    jobs: Jobs, rng: torch.Generator, reach: bool
) -> None:
    job, cls = jobs(2, lambda a, b: reach), ByPeer if reach else ByPut
    register_transport(cls.name, cls)
    try:
        case = make_case(rng, 2, b=5, h=8, d=32, dtype=torch.float32)
        answers = LoopbackWorld(2).run(raises_once, case, cls.name)
    finally:
        unregister_transport(cls.name)
    assert "rank 1 raised in call" in answers[0][0]
    assert "float64" in answers[0][0]
    assert "float64" in answers[1][0]
    judge([result for _, result in answers], case)
    assert not job.said
