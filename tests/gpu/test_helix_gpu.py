"""`flashinfer_helix` on GPUs: on Hopper the soak finds the damage every time, and checked rows are right.

Between virtual ranks of one GPU; between processes where there are two. FlashInfer compiles its exchange first, which
takes a minute where nothing is cached.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import dcpcomm
from dcpcomm import verdicts
from dcpcomm.backends import flashinfer_library
from dcpcomm.errors import VerificationFailed
from dcpcomm.graphs import captured
from dcpcomm.launch import RankFailed
from dcpcomm.testing import LoopbackWorld, TransportConformance

TWO = torch.cuda.device_count() >= 2
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
RUNS = int(os.environ.get("DCPCOMM_TEST_SOAKS", "20"))
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
    pytest.mark.skipif(not flashinfer_library.installed("flashinfer"), reason="needs FlashInfer"),
    pytest.mark.timeout(400),
]
needs_hopper = pytest.mark.skipif(not HOPPER, reason="is about sm_90")
FACTS = (
    r"got \d+ wrong words of \d+ from rank [01] in round \d+, which lie in \d+ row\(s\).* run\(s\) of at most \d+ bytes"
)


@pytest.fixture
def no_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No soak is remembered, from before or for later."""
    monkeypatch.setattr(verdicts, "holds", lambda key: False)
    monkeypatch.setattr(verdicts, "remember", lambda key: None)


def shape_for(**changes: Any) -> dcpcomm.MergeShape:
    given = {"max_tokens": 64, "num_heads": 128, "head_dim": 128, "dtype": torch.bfloat16, "lse_base": "2"}
    return dcpcomm.MergeShape(**{**given, **changes})


def config_for(**options: Any) -> dict[str, Any]:
    return {"transport": "flashinfer_helix", "options": {"flashinfer_helix": options}}


def constructs(group: Any, options: dict[str, Any]) -> None:
    dcpcomm.DCPMerger(group, shape_for(max_tokens=256), config_for(**options)).close()


@needs_hopper
@pytest.mark.parametrize("run", range(RUNS))
def test_the_soak_finds_the_damage_every_time(run: int, no_verdicts: None) -> None:
    with pytest.raises(RankFailed) as caught:
        LoopbackWorld(2).run(constructs, {}, timeout_s=90)
    assert isinstance(caught.value.cause, VerificationFailed), str(caught.value.cause)
    text = str(caught.value.cause)
    if run == 0:
        print(text)
    assert re.search(FACTS, text), text
    assert re.search("stale: the word of 4 round|all bits set", text), text


def right_rows(
    group: Any, options: dict[str, Any], width: int, merges: int, meeting: threading.Barrier
) -> tuple[int, int]:
    """Rows that were wrong, over eager and replayed merges of changing data; and halves that were healed.

    Args:
        meeting: of all ranks: while one waits in a kernel, no other may take memory from the driver.
    """
    shape = shape_for(head_dim=width)
    device = torch.device("cuda", torch.cuda.current_device())
    rank = group.rank
    with dcpcomm.DCPMerger(group, shape, config_for(**options)) as merger:
        generator = torch.Generator().manual_seed(1)
        outs = torch.randn(2, 64, 128, width, generator=generator).bfloat16()
        lses = torch.randn(2, 64, 128, generator=generator)
        want = dcpcomm.reference.merge_partials(outs, lses, lse_base="2")[0][rank].float().to(device)
        out, lse = outs[rank].to(device), lses[rank].to(device)
        signs = [torch.full((), s, dtype=torch.bfloat16, device=device) for s in (1.0, -2.0, 0.5, 4.0, -1.0)]
        given, got = out.clone(), torch.empty(64, 64, width, dtype=torch.bfloat16, device=device)
        sums = torch.zeros((), dtype=torch.int64, device=device)

        def judge(sign: torch.Tensor) -> None:
            sums.add_((~torch.isclose(got.float(), want * sign, rtol=2e-2, atol=4e-2).all(-1)).sum())

        torch.mul(out, signs[0], out=given)
        judge(signs[0])
        sums.zero_()
        torch.cuda.current_stream().synchronize()
        meeting.wait(60)
        graph = captured(lambda: merger.merge(given, lse, out=got), device)
        meeting.wait(60)
        for number in range(merges):
            sign = signs[number % 5]
            torch.mul(out, sign, out=given)
            if number % 2:
                graph.replay()
            else:
                merger.merge(given, lse, out=got)
            judge(sign)
        wrong = int(sums)
        merger.check()
        (transport,) = merger._session.transports.values()
        entries = transport._entries  # type: ignore[attr-defined]
        healed = entries.healed(0) if hasattr(entries, "healed") else 0
    return wrong, healed


@pytest.mark.parametrize("width", [128, 512])
def test_checked_rows_are_right(width: int, no_verdicts: None) -> None:
    meeting = threading.Barrier(2)
    found = LoopbackWorld(2).run(right_rows, {"checked": True}, width, 400, meeting, timeout_s=120)
    print(f"\nchecked, D={width}: (wrong rows, healed halves of lines) by rank: {found}")
    assert [wrong for wrong, _ in found] == [0, 0]


@needs_hopper
def test_taken_unverified_it_is_wrong_here() -> None:
    """Without this the tests above would prove nothing of this machine."""
    meeting = threading.Barrier(2)
    found = LoopbackWorld(2).run(right_rows, {"allow_unverified": True}, 512, 400, meeting, timeout_s=120)
    print(f"\nunverified, D=512: wrong rows by rank: {[wrong for wrong, _ in found]}")
    assert any(wrong for wrong, _ in found)


def test_the_program_for_upstream_shows_the_fault(tmp_path: Path) -> None:
    program = Path(dcpcomm.__file__).parent.parent / "bench/helix_fault.py"
    if not program.is_file():
        from dcpcomm.bench import helix_fault

        program = Path(helix_fault.__file__)
    done = subprocess.run(
        [sys.executable, str(program), "--calls", "100"], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    print(done.stdout[-1500:])
    assert done.returncode == int(HOPPER), done.stdout + done.stderr


SCRIPT = """
import torch, dcpcomm
from dcpcomm.testing import LoopbackWorld
shape = dcpcomm.MergeShape(max_tokens=4, num_heads=8, head_dim=64, dtype=torch.bfloat16, lse_base="e")
config = {"transport": "flashinfer_helix", "options": {"flashinfer_helix": {"allow_unverified": True}}}
kept = []
def body(group):
    merger = dcpcomm.DCPMerger(group, shape, config)
    merger.merge(torch.randn(3, 8, 64, device="cuda").bfloat16(), torch.randn(3, 8, device="cuda"))
    torch.cuda.current_stream().synchronize()
    kept.append(merger)
    WAY
LoopbackWorld(2).run(body)
"""


@pytest.mark.parametrize("way", ["pass", "merger.close(); merger.close()"])
def test_processes_end_cleanly(way: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("WAY", way)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    left = [line for line in done.stderr.splitlines() if "unverified" not in line and "delivers wrong" not in line]
    assert not left, done.stderr


@pytest.mark.skipif(not TWO, reason="a GPU for each of two processes")
class TestHelixChecked(TransportConformance):
    transport = "flashinfer_helix"
    ranks = (2,)
    device: ClassVar[str | None] = "cuda"
    config: ClassVar[dict[str, Any]] = {"options": {"flashinfer_helix": {"checked": True}}}
