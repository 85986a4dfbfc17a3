"""A merge of dcpcomm over one named transport, in the form in which rivals are measured. Unlike them it takes counts of
valid rows, and may project through W_UV.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import torch
import yaml

from dcpcomm.bench import ablation
from dcpcomm.bench.ranks import Ranks
from dcpcomm.bench.rivals.rival import Rival
from dcpcomm.bench.timing import settle
from dcpcomm.merger import DCPMerger
from dcpcomm.projection import GatheredWUV, project
from dcpcomm.reference import merge_partials
from dcpcomm.registry import load_transport
from dcpcomm.transport import MergeShape

__all__ = ["Ours", "named"]


def named(contender: str) -> tuple[str, dict[str, Any]]:
    """`cupy_ipc:threads=256,strict=true` -> the transport's registered name, and its options.

    Raises:
        ValueError: an option without a value.
    """
    name, _, given = contender.partition(":")
    options = {}
    for one in given.split(",") if given else ():
        key, equals, value = one.partition("=")
        if not key or not equals or not value:
            raise ValueError(f"{contender!r}: {one!r} is no KEY=VALUE; expected, say, cupy_ipc:threads=256")
        options[key] = yaml.safe_load(value)
    return name, options


class Ours(Rival):
    """`DCPMerger.merge` with `out=`, as an engine calls it; `merge_and_project` where the shape has a `v_head_dim`.

    Args:
        group: what a `DCPMerger` takes.
        contender: a transport's registered name, and perhaps options; see `named`. The option `without` is the
            benchmark's own: see `ablation`.
        config: the rest of the merger's configuration; default: verified quickly.

    Attributes:
        counts: int32 or int64 `[N, B]`, every rank's valid counts of the merges to come; None: no row is empty.
    """

    def __init__(
        self,
        ranks: Ranks,
        shape: MergeShape,
        device: torch.device,
        group: Any,
        contender: str,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(ranks, shape, device)
        self.name = contender  # type: ignore[misc]
        self._transport, self._options = named(contender)
        self._without = self._options.pop("without", None)
        capabilities = load_transport(self._transport).capabilities
        # A product with W_UV is rounded before it is merged, or made of what was.
        projects = shape.v_head_dim is not None
        self.sums_rounded = projects or not capabilities.deterministic  # type: ignore[misc]
        self.graph_capturable = capabilities.graph_capturable
        self._group, self._config = group, config or {"verify": {"level": "quick"}}
        self._merger: DCPMerger | None = None
        self._outs: dict[int, torch.Tensor] = {}
        self.counts: torch.Tensor | None = None
        self._w_uv: torch.Tensor | None = None  # [H, L, V], of all ranks
        self._gathered: GatheredWUV | None = None

    def prepare(self) -> None:
        ablation.use(self._without)
        config: dict[str, Any] = {**self._config, "transport": self._transport}
        if self._options:
            config["options"] = {self._transport: self._options}
        self._merger = DCPMerger(self._group, self.shape, config, self.device)
        if self.shape.v_head_dim is not None:
            self._bring_weights(self.shape.v_head_dim)

    def _bring_weights(self, value: int) -> None:
        seed: int = self.ranks.gather(secrets.randbelow(2**40))[0]
        shape = self.shape.num_heads, self.shape.head_dim, value
        weights = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / self.shape.head_dim**0.5
        self._w_uv = weights.to(self.shape.dtype)
        own = slice(self.ranks.rank * self.heads, (self.ranks.rank + 1) * self.heads)
        assert self._merger is not None
        self._gathered = self._merger.gather_w_uv(self._w_uv[own].to(self.device))

    def bring(self, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> None:
        tokens = partial_out.shape[0]
        if tokens not in self._outs:
            shape = tokens, self.heads, self.shape.v_head_dim or self.shape.head_dim
            self._outs[tokens] = torch.empty(shape, dtype=self.shape.dtype, device=self.device)
        if self._gathered is not None:
            # cuBLAS takes memory when a thread first comes to it: later another rank may be waiting on this GPU.
            project(partial_out[:, : self.heads], self._gathered.local)
            if self._gathered.full is not None:
                project(partial_out, self._gathered.full)
            settle(self.device)

    def merge(self, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> torch.Tensor:
        return self.call(partial_out, partial_lse)()

    def call(self, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> Callable[[], torch.Tensor]:
        assert self._merger is not None
        keywords: dict[str, Any] = {"out": self._outs[partial_out.shape[0]]}
        if self.counts is not None:
            keywords["valid_counts"] = self.counts[self.ranks.rank].to(self.device)
        if self._gathered is not None:
            return functools.partial(
                self._merger.merge_and_project, partial_out, partial_lse, self._gathered, **keywords
            )
        return functools.partial(self._merger.merge, partial_out, partial_lse, **keywords)

    def want(self, outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
        own = slice(self.ranks.rank * self.heads, (self.ranks.rank + 1) * self.heads)
        merged = merge_partials(
            outs[:, :, own], lses[:, :, own], lse_base=self.shape.lse_base, valid_counts=self.counts, scatter="none"
        )[0][0]
        return merged if self._w_uv is None else torch.einsum("bhl,hlv->bhv", merged, self._w_uv[own].double())

    def count_wrong(self, got: torch.Tensor, want: torch.Tensor) -> int:
        # Whoever writes this option into the contender's name wants the time of rows that are known to be damaged.
        return 0 if self._options.get("allow_unverified") else super().count_wrong(got, want)

    def check(self) -> None:
        assert self._merger is not None
        self._merger.check()

    def close(self) -> None:
        if self._merger is not None:
            self._merger.close()
        self._merger = self._gathered = None
        self._outs.clear()
