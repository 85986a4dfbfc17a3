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
import torch.distributed as dist

import dcpcomm
from dcpcomm.backends import flashinfer_helix, flashinfer_library
from dcpcomm.backends.flashinfer_helix import FlashInferHelix, HelixOptions
from dcpcomm.backends.flashinfer_library import StoreComm
from dcpcomm.backends.helix_entries import EntryLayout, lines_of
from dcpcomm.backends.helix_twins import Twins
from dcpcomm.errors import TransportTimeout, TransportUnavailable, VerificationFailed
from dcpcomm.launch import RankFailed
from dcpcomm.registry import unregister_transport
from dcpcomm.testing import LoopbackWorld, run_conformance
from dcpcomm.testing.conformance import CASES
from dcpcomm.topology import Facts
from dcpcomm.transport import Capabilities, MergeShape
from tests import helix_stand_in
from tests.emulated import COMPILER, EmulatedKernels
from tests.helix_on_cpu import HelixOnCpu
from tests.helix_stand_in import comm
from tests.nursery import Nursery
from tests.pretend_gpu import pretend
from tests.world import Raised, World, listening, meet, outcome, rank_of, size_of

#: One line in so many is torn. On Hopper, in entries of 16 KiB (139 lines), it is one in some thousands; and of 1 GiB
#: that are sent there, this soak sends one MiB, in which some sixteen lines are torn for each rank.
TEARS = "1000"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DCPCOMM_CACHE_DIR", str(tmp_path))
    for variable in ("HELIX_STAND_IN_TEARS", "HELIX_STAND_IN_FAILS", flashinfer_helix.CHANNELS_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    dcpcomm.register_transport("helix_on_cpu", HelixOnCpu)
    yield
    unregister_transport("helix_on_cpu")


def shape_for(n: int, **changes: Any) -> MergeShape:
    given = {"max_tokens": 16, "num_heads": 8 * n, "head_dim": 64, "dtype": torch.bfloat16, "lse_base": "e"}
    return MergeShape(**{**given, **changes})


def config_for(level: str = "standard", **options: Any) -> dict[str, Any]:
    return {"transport": "helix_on_cpu", "options": {"helix_on_cpu": options}, "verify": {"level": level}}


def merges(group: Any, options: dict[str, Any], shape: dict[str, Any], count: int = 3) -> tuple[bool, str]:
    """Whether all results were right, and what `explain` says of the transport."""
    n, rank = size_of(group), rank_of(group)
    mine = shape_for(n, **shape)
    right = True
    with dcpcomm.DCPMerger(group, mine, config_for(**options), device="cpu") as merger:
        for number in range(count):
            generator = torch.Generator().manual_seed(number)
            outs = torch.randn(n, 12, mine.num_heads, mine.head_dim, generator=generator).to(mine.dtype)
            lses = torch.randn(n, 12, mine.num_heads, generator=generator)
            lses[:, 2] = -torch.inf
            outs[1, 3], lses[1, 3] = torch.nan, torch.inf
            want, want_lse = dcpcomm.reference.merge_partials(outs, lses, lse_base="e", scatter=mine.scatter)
            got, lse = merger.merge(outs[rank], lses[rank], return_lse=True, channel=number % mine.channels, tag=number)
            right &= torch.allclose(got.double(), want[rank], rtol=1e-2, atol=1e-2)
            right &= torch.allclose(lse.double(), want_lse[rank], rtol=1e-5)
        merger.check()
        (said,) = re.findall(r"helix_on_cpu: in use, (.*)", merger.explain())
    return right, said


def in_threads(n: int, options: dict[str, Any], **shape: Any) -> list[tuple[bool, str]]:
    return LoopbackWorld(n, device="cpu").run(merges, options, shape)


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


# ---------------------------------------------------------------- twins


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


# ---------------------------------------------------------------- reasons and remedies


def facts(place: str, size: int = 2, device: str = "cuda") -> Facts:
    return Facts(0, size, "host", device, place, torch.__version__)


def test_what_can_not_be_is_told_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HelixOnCpu.check(facts("sm_90")).ok
    old = HelixOnCpu.check(facts("sm_80"))
    assert "needs sm_90" in old.reason
    assert "nccl_a2a" in old.remedy
    monkeypatch.setattr(HelixOnCpu, "package", "there.is.no.such")
    monkeypatch.setattr(flashinfer_library.importlib.util, "find_spec", lambda name: None)
    absent = HelixOnCpu.check(facts("sm_90"))
    assert (absent.ok, absent.reason) == (False, "FlashInfer isn't installed")
    assert "dcpcomm[cu12]" in absent.remedy


def test_virtual_ranks_that_would_wait_for_each_other_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "3 ranks may not fit on one GPU" in HelixOnCpu.check(facts("loopback", 3)).reason
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in HelixOnCpu.check(facts("loopback")).remedy
    assert HelixOnCpu.check(facts("loopback", 3, "cpu")).ok


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist", "CUDA_HOME"),
        ("[Errno 2] No such file or directory: 'ninja'", "pip install ninja"),
        ("JIT compilation is disabled via FLASHINFER_DISABLE_JIT environment variable", "unset FLASHINFER_DISABLE_JIT"),
        ("No supported CUDA architectures found for major versions [9, 10, 11, 12].", "sm_90 or later"),
        ("[Errno 13] Permission denied: '/root/.cache/flashinfer'", "FLASHINFER_WORKSPACE_BASE"),
        ("Ninja build failed. Ninja output: error: identifier is undefined", "DCPCOMM_LOG=info"),
    ],
)
def test_what_keeps_it_from_compiling_has_a_remedy(said: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELIX_STAND_IN_FAILS", said)
    verdict = HelixOnCpu.load(facts("sm_90"))
    assert not verdict.ok
    assert "FlashInfer 0.0.stand-in can't compile its exchange here: RuntimeError: " in verdict.reason
    assert remedy in verdict.remedy
    with pytest.raises(RankFailed, match=r"fell at import on rank 0: FlashInfer 0\.0\.stand-in can't compile"):
        in_threads(2, {})


def test_imports_that_fail_and_versions_that_are_too_old_have_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(package: str) -> Any:
        raise ModuleNotFoundError("No module named 'cuda'", name="cuda")

    def broken(package: str) -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file " + "x" * 1000)

    monkeypatch.setattr(flashinfer_library, "library", lacks)
    verdict = HelixOnCpu.load(facts("sm_90"))
    assert "No module named 'cuda'" in verdict.reason
    assert "provides 'cuda'" in verdict.remedy
    monkeypatch.setattr(flashinfer_library, "library", broken)
    verdict = HelixOnCpu.load(facts("sm_90"))
    assert "libcuda.so.1" in verdict.reason
    assert len(verdict.reason) < 400
    monkeypatch.setattr(flashinfer_library, "library", lambda package: SimpleNamespace())
    verdict = HelixOnCpu.load(facts("sm_90"))
    assert "0.0.stand-in has no decode_cp_a2a_workspace_size" in verdict.reason
    assert "0.7.4" in verdict.remedy


def test_options_that_exclude_each_other_are_told() -> None:
    for more in ({"allow_unverified": True}, {"heads_per_entry": 4}):
        config = {"transport": "flashinfer_helix", "options": {"flashinfer_helix": {"checked": True, **more}}}
        with pytest.raises(dcpcomm.ConfigError, match="checked proves all rows"):
            dcpcomm.load_config(config)


# ---------------------------------------------------------------- meeting over the store


def comms(n: int, deadline_s: float = 20.0) -> list[StoreComm]:
    store = dist.HashStore()
    groups = [SimpleNamespace(rank=rank, size=n, store=lambda purpose: store) for rank in range(n)]
    return [StoreComm(group, "helix", deadline_s) for group in groups]  # type: ignore[arg-type]


def test_what_flashinfer_gathers_comes_back_by_rank() -> None:
    met = comms(3)
    sent = ("host", None, b"\x00\xff", 7)

    def body(group: Any) -> Any:
        mine = met[group.rank].Split(0, group.rank)
        mine.barrier()
        gathered = mine.allgather((group.rank, *sent))
        return gathered, mine.bcast(f"from {group.rank}", 2), mine.Get_size(), mine.Get_rank()

    for rank, (gathered, cast, size, place) in enumerate(LoopbackWorld(3, device="cpu").run(body)):
        assert gathered == tuple((other, *sent) for other in range(3))
        assert (cast, size, place) == ("from 2", 3, rank)


def test_who_fails_or_does_not_come_is_named() -> None:
    first, second = comms(2)
    second.fail(OSError("no memory left"))
    with pytest.raises(TransportUnavailable, match="rank 1 could not set FlashInfer up: OSError: no memory left"):
        first.barrier()
    with pytest.raises(TransportTimeout, match=r"rank 1, 2 did not arrive within 0.05 s") as caught:
        comms(3, 0.05)[0].barrier()
    assert caught.value.ranks == (1, 2)


def test_a_group_that_is_split_otherwise_is_refused() -> None:
    met = comms(2)

    def body(group: Any) -> Any:
        return outcome(met[group.rank].Split, group.rank, 0)

    assert all(isinstance(one, Raised) for one in LoopbackWorld(2, device="cpu").run(body))


def test_ranks_whose_kernels_would_not_meet_are_told_before(monkeypatch: pytest.MonkeyPatch) -> None:
    card = flashinfer_library.gpu_card
    places = iter([{"processors": 132}, {"processors": 66}])
    monkeypatch.setattr(flashinfer_library, "gpu_card", lambda device: next(places, card(device)))
    with pytest.raises(RankFailed, match=r"multiprocessors is (132|66) on rank 0 and (132|66) on rank 1"):
        in_threads(2, {})


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
