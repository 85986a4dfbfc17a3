"""The judge: what came, against `dcpcomm.reference.merge_partials` in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcpcomm.testing.conformance.partials import Partials, ulp
from dcpcomm.testing.conformance.rank import Raised, Script
from dcpcomm.testing.conformance.scene import Scene

__all__ = ["JudgedBy", "expect_raised", "judge_merge", "judge_script", "same_bits"]

_AXES = {3: ("row", "head", "column"), 2: ("row", "head")}


@dataclass(frozen=True)
class JudgedBy:
    """A judge: every call of the script that `script(scene)` writes, against the reference."""

    script: Callable[[Scene], Script]

    def __call__(self, scene: Scene, got: list[Any]) -> None:
        judge_script(scene, self.script(scene), got)


def judge_script(scene: Scene, script: Script, got: Sequence[Any]) -> None:
    """`got[rank][i]` is (out, lse) of call i."""
    for i, call in enumerate(script.calls):
        what = f"call {i} of {len(script.calls)}, B={call.partials.outs.shape[1]}"
        judge_merge(scene, call.partials, [results[i] for results in got], script.shape.scatter, what)


def judge_merge(scene: Scene, partials: Partials, got: Sequence[Any], scatter: str, what: str, merges: int = 1) -> None:
    """`got[rank]` is (out, lse), against the float64 merge of `partials`, which took so many `merges` in a row."""
    wanted, wanted_lse = partials.merged(scatter)
    bound = partials.bound(scatter)
    for rank, (out, lse) in enumerate(got):
        where = f"{what}: rank {rank}"
        assert out.dtype == partials.outs.dtype, f"{where}: got {out.dtype}, expected {partials.outs.dtype}"
        assert out.shape == wanted[rank].shape, (
            f"{where}: got out of shape {tuple(out.shape)}, expected {tuple(wanted[rank].shape)}"
        )
        assert lse.dtype == torch.float32, f"{where}: got an LSE of {lse.dtype}, expected torch.float32"
        assert lse.shape == wanted_lse[rank].shape, (
            f"{where}: got an LSE of shape {tuple(lse.shape)}, expected {tuple(wanted_lse[rank].shape)}"
        )
        _judge_values(out, wanted[rank], _allowed(scene, out.dtype, wanted[rank], bound[rank], merges), where)
        _judge_values(lse, wanted_lse[rank], merges * 3e-6 * (1 + wanted_lse[rank].abs()), f"{where}: LSE")


def _allowed(scene: Scene, dtype: torch.dtype, wanted: torch.Tensor, bound: torch.Tensor, merges: int) -> torch.Tensor:
    """How far rounding may take a result: once, at the end, where the transport is canonical; else in each term of the
    sum.
    """
    roundings = merges if scene.capabilities.deterministic else merges * (scene.n + 2)
    if roundings > 1:
        return roundings * (torch.finfo(dtype).eps + 2e-6) * bound
    once = 1e-5 * wanted.abs() if dtype == torch.float32 else ulp(wanted, dtype)
    return once + 2e-6 * bound


def _judge_values(got: torch.Tensor, wanted: torch.Tensor, allowed: torch.Tensor, where: str) -> None:
    finite = wanted.isfinite()
    error = (got.double() - torch.where(finite, wanted, 0.0)).abs()
    wrong = torch.where(finite, ~(error <= allowed), got.double() != wanted)  # true for a NaN that came
    if not wrong.any():
        return
    first = tuple(wrong.nonzero()[0].tolist())
    place = ", ".join(f"{axis} {i}" for axis, i in zip(_AXES[got.dim()], first, strict=True))
    heads = f" (heads {sorted(set(wrong.nonzero()[:, 1].tolist()))[:8]})"
    raise AssertionError(
        f"{where}: {int(wrong.sum())} of {wrong.numel()} values are wrong{heads}; the first at {place}: got "
        f"{got[first].item():.9g}, expected {wanted[first].item():.9g}"
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def expect_raised(got: Any, kinds: tuple[str, ...], words: Sequence[object], within_s: float, where: str) -> None:
    """`got` is a `Raised` of one of `kinds` whose message has all of `words`, raised within `within_s`."""
    expected = f"expected {' or '.join(kinds)} within {within_s:g} s"
    assert isinstance(got, Raised), f"{where}: the merge returned a result; {expected}"
    assert set(kinds) & set(got.kinds), f"{where}: raised {got.kinds[0]}: {got.text}; {expected}"
    assert got.seconds < within_s, f"{where}: raised after {got.seconds:.1f} s; {expected}: {got.text}"
    lacking = [str(word) for word in words if str(word) not in got.text]
    assert not lacking, f"{where}: its error doesn't mention {', '.join(map(repr, lacking))}: {got.text}"
