"""`flashinfer_helix` without a GPU: a stand-in for FlashInfer moves the rows between threads or processes, rightly or
with stale halves of lines as on Hopper.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import dcpcomm
from dcpcomm.backends import flashinfer_helix, flashinfer_library
from dcpcomm.backends.flashinfer_helix import FlashInferHelix, HelixOptions
from dcpcomm.backends.helix_entries import EntryLayout, lines_of
from dcpcomm.errors import TransportUnavailable, VerificationFailed
from dcpcomm.launch import RankFailed
from dcpcomm.registry import unregister_transport
from dcpcomm.testing import LoopbackWorld, run_conformance
from dcpcomm.testing.conformance import CASES
from dcpcomm.transport import Capabilities
from tests import helix_stand_in
from tests.emulated import COMPILER, EmulatedKernels
from tests.helix_on_cpu import HelixOnCpu
from tests.helix_rig import TEARS, in_threads, merges, own_cache, shape_for
from tests.helix_stand_in import comm
from tests.nursery import Nursery
from tests.pretend_gpu import pretend
from tests.world import Raised, World, listening, meet, outcome

__all__ = ["own_cache"]

pytestmark = pytest.mark.usefixtures("own_cache")


# ---------------------------------------------------------------- it moves rows


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"channels": 2},
        {"scatter": "tokens"},
        {"scatter": "none"},
        {"dtype": torch.float16, "head_dim": 20, "num_heads": 12},
        {"dtype": torch.float32, "head_dim": 9, "num_heads": 12},
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"checked": True}], ids=str)
@pytest.mark.parametrize("n", [2, 4])
def test_rows_arrive_whatever_the_shape(n: int, options: dict[str, Any], shape: dict[str, Any]) -> None:
    assert in_threads(n, {"level": "quick", **options}, **shape) == [(True, "verified bit for bit")] * n


def test_fewer_heads_to_an_entry_change_nothing() -> None:
    assert all(right for right, _ in in_threads(2, {"heads_per_entry": 2}))
    with pytest.raises(RankFailed, match=r"heads_per_entry is 3; expected a divisor of the 8 heads .* of which 8 fit"):
        in_threads(2, {"heads_per_entry": 3})


class AsFast(HelixOnCpu):
    """Not soaked, for what is about something else."""

    name: ClassVar[str] = "as_fast"
    capabilities: ClassVar[Capabilities] = dataclasses.replace(HelixOnCpu.capabilities, soak_bytes=0)


TAKEN = {
    "constructs", "many-calls", "late-ranks", "channels", "two-mergers", "equals-loopback", "close-and-construct-again",
    "close-half-done", "what-was-asked-for",
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"checked": True}], ids=str)
def test_conformance(options: dict[str, Any]) -> None:
    cases = [case for case in CASES if case.name in TAKEN]
    assert len(cases) == len(TAKEN)
    config = {"options": {"as_fast": options}}
    report = run_conformance(AsFast, ranks=(2,), cases=cases, device="cpu", world="threads", config=config)
    assert not {result.case: result.detail[:600] for result in report.results if result.outcome == "failed"}


def test_contiguous_rows_are_entries_as_they_lie() -> None:
    out, lse = torch.randn(5, 2, 8, 64).bfloat16(), torch.randn(5, 2, 8)
    sent = EntryLayout(shape_for(2), 2, None).sent(out, lse, 0)
    assert sent.rows.data_ptr() == out.data_ptr()
    assert sent.statistics.data_ptr() == lse.data_ptr()
    odd = torch.randn(5 * 2 * 8 * 64 + 1).bfloat16()[1:].view(5, 2, 8, 64)
    sent = EntryLayout(shape_for(2), 2, None).sent(odd, lse, 0)
    assert sent.rows.data_ptr() % 16 == 0
    assert torch.equal(sent.rows.view_as(odd), odd)


def test_a_message_fits_into_its_queue() -> None:
    """Nothing in FlashInfer checks that it does; 64 heads of 1024 columns would run over the next entry."""
    assert lines_of(64 * 1024 * 2, 64) > 1024
    wide = EntryLayout(shape_for(2, num_heads=128, head_dim=1024), 2, None)
    assert wide.k == 32
    with pytest.raises(TransportUnavailable, match="a row of one head has 131072 bytes"):
        EntryLayout(shape_for(2, head_dim=1 << 16), 2, None)
    assert FlashInferHelix.device_bytes(shape_for(2, head_dim=1 << 16), 2, None) == 0


@pytest.mark.parametrize("options", [{}, {"checked": True}], ids=str)
def test_what_it_takes_is_planned(options: dict[str, Any]) -> None:
    config = {"transport": "flashinfer_helix", "options": {"flashinfer_helix": options}}
    one, two = (dcpcomm.plan_bytes(shape_for(2, channels=c), 2, config) for c in (1, 2))
    assert 1.9 * one < two < 2.1 * one
    assert one > 2 * 148 // 2 * (512 << 10) // 2


@pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernels for the CPU with")
@pytest.mark.parametrize("options", [{}, {"checked": True}], ids=str)
def test_merges_take_the_path_of_a_gpu(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The engine's kernels combine what arrived, nothing is copied to be cleaned, and replays are verified."""
    pretend(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    monkeypatch.setattr(HelixOnCpu, "capabilities", dataclasses.replace(HelixOnCpu.capabilities, graph_capturable=True))
    monkeypatch.setattr(EmulatedKernels, "origin", "emulated")
    assert in_threads(2, {"level": "quick", **options}, channels=2) == [(True, "verified bit for bit")] * 2


# ---------------------------------------------------------------- stale halves of lines


def test_the_soak_finds_stale_halves_and_says_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELIX_STAND_IN_TEARS", TEARS)
    for level in ("quick", "off", "standard"):
        with pytest.raises(RankFailed) as caught:
            in_threads(2, {"level": level})
        assert isinstance(caught.value.cause, VerificationFailed), level
        text = str(caught.value.cause)
        assert re.search(r"rank [01] got \d+ wrong words of \d+ from rank [01] in round \d+, which lie in", text), text
        assert re.search(r"\d+ row\(s\).* in \d+ run\(s\) of at most \d+ bytes; the first in row \d+, byte", text), text
        assert re.search(r"wanted 0x[0-9a-f]{8}, got 0x[0-9a-f]{8}, (stale: the word of \d+ round|all bits set)", text)
        assert re.search(r"; \d+ of \d+ rounds brought wrong bits", text), text


def test_stale_words_are_dated_four_rounds_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue has four entries, and so do the sizes of a soak's rounds."""
    put = comm._Queue.put
    monkeypatch.setattr(comm._Queue, "put", lambda queue, lines, _: put(queue, lines, 500 * (queue.counters[0] > 5)))
    with pytest.raises(RankFailed, match="stale: the word of 4 round") as caught:
        in_threads(2, {})
    assert isinstance(caught.value.cause, VerificationFailed)


def test_it_is_no_candidate_where_it_is_not_proven_and_nobody_asked() -> None:
    def auto(group: Any) -> str:
        with dcpcomm.DCPMerger(group, shape_for(2), {"forbid": ["loopback_peer"]}, device="cpu") as merger:
            return merger.explain()

    for text in LoopbackWorld(2, device="cpu").run(auto):
        assert "helix_on_cpu: fell at declared on rank 0: proven on sm_100, sm_103; this is loopback" in text


def test_checked_rows_are_right_although_lines_are_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELIX_STAND_IN_TEARS", "300")
    assert in_threads(2, {"checked": True}, channels=2) == [(True, "verified bit for bit")] * 2


def test_taken_unverified_it_says_so_each_time_and_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELIX_STAND_IN_TEARS", "40")
    for _ in range(2):
        with listening() as heard:
            results = in_threads(2, {"allow_unverified": True, "level": "quick"})
        assert sum("is used unverified (options.flashinfer_helix.allow_unverified)" in one for one in heard) == 2
        assert any("delivers wrong rows, and is used all the same" in one for one in heard)
        assert all(said == "not verified (its option allow_unverified)" for _, said in results)
        assert not all(right for right, _ in results)


def test_a_soak_that_found_nothing_is_not_trusted_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = HelixOnCpu(SimpleNamespace(device=torch.device("cuda", 0)), shape_for(2), HelixOptions())  # type: ignore[arg-type]
    for capability, checked, doubted in (((9, 0), False, True), ((9, 0), True, False), ((10, 0), False, False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        transport.options = HelixOptions(checked=checked)
        assert bool(transport.distrusted()) == doubted

    monkeypatch.setattr(HelixOnCpu, "distrusted", lambda transport: "rarer than that")
    with pytest.raises(RankFailed, match=r"fell at verify on rank [01]: not proven: rarer than that") as caught:
        in_threads(2, {"level": "off"})
    assert isinstance(caught.value.cause, TransportUnavailable)
    assert not isinstance(caught.value.cause, VerificationFailed)


def test_another_width_and_another_library_are_another_proof() -> None:
    def facts_of(**changes: Any) -> tuple[str, ...]:
        group = SimpleNamespace(device=torch.device("cpu"), size=2)
        transport = HelixOnCpu(group, shape_for(2, **changes), HelixOptions())  # type: ignore[arg-type]
        transport._entries = EntryLayout(transport.shape, 2, None)
        return tuple(transport.proof_facts())

    assert len({facts_of(), facts_of(head_dim=128), facts_of(dtype=torch.float16), facts_of(num_heads=32)}) == 4
    assert facts_of(max_tokens=99) == facts_of()


# ---------------------------------------------------------------- processes: trial, workspaces, ends


def in_process(group: Any, options: dict[str, Any], tears: str) -> Any:
    os.environ["HELIX_STAND_IN_TEARS"] = tears
    os.environ["DCPCOMM_CACHE_DIR"] = f"/proc/nowhere/{tears}"
    dcpcomm.register_transport("helix_on_cpu", HelixOnCpu)
    try:
        return outcome(merges, group, {"level": "standard", **options}, {"channels": 2}, 4)
    finally:
        del os.environ["HELIX_STAND_IN_TEARS"], os.environ["DCPCOMM_CACHE_DIR"]  # other tests share these processes
        unregister_transport("helix_on_cpu")
        meet()


@pytest.fixture
def pair(pool: Any) -> World:
    return World("gloo_a2a", 2, pool)


def test_processes_try_it_in_children_and_then_merge(pair: World) -> None:
    for result in pair.run(in_process, {}, "0", fresh=True):
        assert result == (True, "verified bit for bit"), result


def test_a_torn_line_in_a_child_is_the_reason_in_its_parents(pair: World) -> None:
    for result in pair.run(in_process, {}, "500", fresh=True):
        assert isinstance(result, Raised)
        assert "VerificationFailed" in result.kinds, result.trace
        assert "in a child process: wrong bits: rank" in result.text


def constructs_again(group: Any) -> tuple[int, int, int]:
    dcpcomm.register_transport("as_fast", AsFast)
    before = dict(comm.calls)
    sizes = []
    for channels in (2, 1, 2):
        shape = shape_for(2, channels=channels)
        transport = AsFast(dcpcomm.group.Group.of(group), shape, HelixOptions())
        transport.close()
        for _ in range(2):
            transport.group.generation += 1
            cards = transport.group.control.exchange(transport.prepare())
            transport.connect(cards)
            out, lse = torch.randn(3, 2, 8, 64).bfloat16(), torch.randn(3, 2, 8)
            got, _ = transport.exchange((out, lse), channels - 1)
            assert torch.equal(got[:, transport.group.rank], out[:, transport.group.rank])
            sizes.append(len(transport._by_channel))
            transport.group.control.exchange(b"")
            transport.close()
            transport.close()
            transport.group.control.exchange(b"")
    unregister_transport("as_fast")
    return comm.calls["allocate"] - before.get("allocate", 0), sum(sizes), len(flashinfer_helix._idle)


def test_workspaces_are_taken_again_for_flashinfer_frees_none(pair: World) -> None:
    for allocated, used, idle in pair.run(constructs_again):
        assert used == 10
        assert allocated <= 2
        assert idle >= 2


EXITS = {
    "without close": "",
    "closed twice": "merger.close(); merger.close()",
    "dropped": "del merger",
}
SCRIPT = """
import torch, dcpcomm
from dcpcomm.testing import LoopbackWorld
from tests.test_helix import AsFast
dcpcomm.register_transport("as_fast", AsFast)
shape = dcpcomm.MergeShape(max_tokens=4, num_heads=4, head_dim=32, dtype=torch.bfloat16, lse_base="e")
kept = []
def body(group):
    merger = dcpcomm.DCPMerger(group, shape, {"transport": "as_fast"}, device="cpu")
    merger.merge(torch.randn(3, 4, 32).bfloat16(), torch.randn(3, 4))
    kept.append(merger)
    WAY
LoopbackWorld(2, device="cpu").run(body)
"""


@pytest.mark.parametrize("way", EXITS)
def test_processes_end_cleanly(way: str, nursery: Nursery, tmp_path: Path) -> None:
    done = nursery.python("-c", SCRIPT.replace("WAY", EXITS[way]), folder=Path(__file__).parent.parent).wait()
    assert (done.returncode, done.stderr.strip()) == (0, ""), done


def test_the_stand_in_stands_for_what_is_called() -> None:
    assert set(flashinfer_library._CALLS) <= set(comm.__all__)
    assert helix_stand_in.__version__ == flashinfer_library.version("tests.helix_stand_in")
    assert flashinfer_library.takes_out(comm.decode_cp_a2a_alltoall)
    assert not flashinfer_library.takes_out(lambda partial_o, softmax_stats: None)
