"""The partials of all ranks for one merge, in whatever layout, and what merging them must give."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dcpcomm.reference import merge_partials

__all__ = ["LAYOUTS", "Partials", "ulp"]

NAN, INF = math.nan, math.inf


@dataclass
class Partials:
    """What every rank brings to one merge.

    Attributes:
        outs: `[N, B, H, D]`.
        lses: `[N, B, H]`, in `base`.
        base: "e" or "2".
        counts: `[N, B]` valid counts, or None.
    """

    outs: torch.Tensor
    lses: torch.Tensor
    base: str
    counts: torch.Tensor | None = None

    @classmethod
    def random(
        cls,
        rng: torch.Generator,
        n: int,
        b: int,
        h: int,
        d: int,
        dtype: torch.dtype,
        base: str = "e",
        lse_dtype: torch.dtype = torch.float32,
    ) -> Partials:
        """Normal values, and LSEs far enough apart for the weights to matter."""
        spread = 2.0 if base == "e" else 2.0 / math.log(2.0)
        outs = torch.randn(n, b, h, d, generator=rng).to(dtype)
        return cls(outs, (torch.randn(n, b, h, generator=rng) * spread).to(lse_dtype), base)

    @property
    def n(self) -> int:
        return self.outs.shape[0]

    def merged(self, scatter: str) -> tuple[torch.Tensor, torch.Tensor]:
        """What each rank must get, stacked by rank, in float64: out and LSE."""
        return merge_partials(
            self.outs, self.lses.float(), lse_base=self.base, valid_counts=self.counts, scatter=scatter
        )

    def bound(self, scatter: str) -> torch.Tensor:
        """Sum of w_r |out_r|, shaped as the merged out: what rounding is relative to, because the sum may cancel."""
        finite = torch.nan_to_num(self.outs.double().abs(), nan=0.0, posinf=0.0)
        return Partials(finite, self.lses, self.base, self.counts).merged(scatter)[0]


def ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance between neighbours of `dtype` at |x|, in float64."""
    info = torch.finfo(dtype)
    return torch.exp2(torch.floor(torch.log2(x.abs().clamp_min(info.tiny)))) * info.eps


def _hole(*shape: int, like: torch.Tensor) -> torch.Tensor:
    """Memory around the values, filled with what must not be read."""
    return torch.full(shape, NAN, dtype=like.dtype, device=like.device)


def contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def padded_heads(x: torch.Tensor) -> torch.Tensor:
    """`storage[:, :H]` of more stored heads."""
    return _hole(x.shape[0], x.shape[1] + 5, *x.shape[2:], like=x)[:, : x.shape[1]].copy_(x)


def head_major(x: torch.Tensor) -> torch.Tensor:
    """`[H, Bcap, ...].transpose(0, 1)[:B]`."""
    return _hole(x.shape[1], x.shape[0] + 3, *x.shape[2:], like=x).transpose(0, 1)[: x.shape[0]].copy_(x)


def odd_token_stride(x: torch.Tensor) -> torch.Tensor:
    """A token stride that is no multiple of 8 elements."""
    per_token = x[0].numel()
    storage = _hole(x.shape[0] * (per_token + 3), like=x)
    return storage.as_strided(x.shape, (per_token + 3, *contiguous(x).stride()[1:])).copy_(x)


def last_stride_2(x: torch.Tensor) -> torch.Tensor:
    return _hole(*x.shape[:-1], 2 * x.shape[-1], like=x)[..., ::2].copy_(x)


def odd_offset(x: torch.Tensor) -> torch.Tensor:
    """One element into its storage."""
    return _hole(x.numel() + 1, like=x)[1:].view(x.shape).copy_(x)


def all_reversed(x: torch.Tensor) -> torch.Tensor:
    """The axes stored in the opposite order: a transposed LSE, `[D, H, B]` partials."""
    order = tuple(reversed(range(x.ndim)))
    return _hole(*reversed(x.shape), like=x).permute(order).copy_(x)


#: Name -> the same values at other places in memory.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    layout.__name__: layout
    for layout in (contiguous, padded_heads, head_major, odd_token_stride, last_stride_2, odd_offset, all_reversed)
}
