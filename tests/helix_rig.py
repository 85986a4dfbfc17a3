"""Merges over `flashinfer_helix` without a GPU, for its tests: shapes, configurations, a cache of their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import dcpcomm
from dcpcomm.backends import flashinfer_helix
from dcpcomm.registry import unregister_transport
from dcpcomm.testing import LoopbackWorld
from dcpcomm.transport import MergeShape
from tests.helix_on_cpu import HelixOnCpu
from tests.world import rank_of, size_of

#: One line in so many is torn. On Hopper, in entries of 16 KiB (139 lines), it is one in some thousands; and of 1 GiB
#: that are sent there, this soak sends one MiB, in which some sixteen lines are torn for each rank.
TEARS = "1000"


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
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
