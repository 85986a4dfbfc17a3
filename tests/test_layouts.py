"""Transports that take the rows as they are (layout "view"), or that merge by themselves (`fused_merge`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

import dcpcomm
from dcpcomm.backends.loopback import Loopback
from dcpcomm.registry import unregister_transport
from dcpcomm.testing import LoopbackWorld
from dcpcomm.transport import Capabilities
from tests.oracle import Case, judge, make_case


class Viewing(Loopback):
    """Moves views of the inputs: nothing is packed for it, and it packs nothing."""

    name: ClassVar[str] = "viewing"
    capabilities: ClassVar[Capabilities] = Capabilities(devices=("cpu",), layout="view")

    def exchange(self, send: Any, channel: int, recv: torch.Tensor | None = None) -> Any:
        assert recv is None, "a transport with layout view is handed no packed buffer"
        out, lse = send
        n, rank = self.group.size, self.group.rank
        for peer in range(n):
            self._mail[channel, rank, peer].put((out[:, peer].clone(), lse[:, peer].clone()))
        arrived = [self._mail[channel, source, rank].get(timeout=20) for source in range(n)]
        return torch.stack([one for one, _ in arrived], 1), torch.stack([one for _, one in arrived], 1)


class Merging(Loopback):
    """Gathers all partials and merges them by the oracle."""

    name: ClassVar[str] = "merging"
    capabilities: ClassVar[Capabilities] = Capabilities(devices=("cpu",))
    lse_is_lost = False

    def fused_merge(self, partial_out: torch.Tensor, partial_lse: torch.Tensor, channel: int) -> Any:
        n, rank = self.group.size, self.group.rank
        for peer in range(n):
            self._mail[channel, rank, peer].put((partial_out.clone(), partial_lse.clone()))
        outs, lses = zip(*(self._mail[channel, source, rank].get(timeout=20) for source in range(n)), strict=True)
        out, lse = dcpcomm.reference.merge_partials(
            torch.stack(outs), torch.stack(lses), lse_base=self.shape.lse_base, scatter=self.shape.scatter
        )
        return out[rank].to(self.shape.dtype), torch.zeros(lse[rank].shape) if self.lse_is_lost else lse[rank].float()


class MergingWithoutLse(Merging):
    """Loses the LSE on the way: its proof must find that."""

    name: ClassVar[str] = "merging_without_lse"
    lse_is_lost = True


@pytest.fixture(params=[Viewing, Merging], ids=lambda cls: cls.name)
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    dcpcomm.register_transport(request.param.name, request.param)
    yield request.param.name
    unregister_transport(request.param.name)


def merges(group: Any, case: Case, transport: str, max_tokens: int, scatter: str = "heads") -> Any:
    config = {"transport": transport, "watchdog": {"timeout_s": 20}}
    shape = dcpcomm.MergeShape(
        max_tokens=max_tokens,
        num_heads=case.outs.shape[2],
        head_dim=case.outs.shape[3],
        dtype=case.outs.dtype,
        lse_base=case.base,
        scatter=scatter,
    )
    counts = None if case.counts is None else case.counts[group.rank]
    with dcpcomm.DCPMerger(group, shape, config) as merger:
        assert merger.device_bytes == dcpcomm.plan_bytes(shape, group.size, config) == 0
        return merger.merge(case.outs[group.rank], case.lses[group.rank], valid_counts=counts, return_lse=True)


@pytest.mark.parametrize("scatter", ["heads", "tokens", "none"])
@pytest.mark.parametrize("max_tokens", [12, 4], ids=["whole", "chunked"])
def test_the_result_is_the_oracles(transport: str, scatter: str, max_tokens: int, rng: torch.Generator) -> None:
    n = 2
    case = make_case(rng, n, b=12)
    case.counts = torch.randint(0, 3, (n, 12), generator=rng)
    judge(LoopbackWorld(n).run(merges, case, transport, max_tokens, scatter), case, scatter)


def test_a_merge_that_is_wrong_does_not_pass_its_proof(rng: torch.Generator) -> None:
    dcpcomm.register_transport(MergingWithoutLse.name, MergingWithoutLse)
    try:
        with pytest.raises(dcpcomm.launch.RankFailed) as failure:
            LoopbackWorld(2).run(merges, make_case(rng, 2, b=4), MergingWithoutLse.name, 12)
    finally:
        unregister_transport(MergingWithoutLse.name)
    assert isinstance(failure.value.cause, dcpcomm.VerificationFailed)
    assert "merged lse at" in str(failure.value.cause)
    assert "the oracle says" in str(failure.value.cause)
