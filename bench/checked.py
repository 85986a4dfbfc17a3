"""A step together with the judge of its results: what was never compared is never timed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dcpcomm.errors import DCPCommError

__all__ = ["Checked", "Unverified", "count_wrong", "poison"]


class Unverified(DCPCommError):
    """Something was to be timed whose result was not compared with the oracle, or differed from it."""


class Checked:
    """One call of what is to be timed, and how many elements of its result are wrong.

    Attributes:
        result: of the last call; under a graph, the memory that its last call writes.
        comparisons: how often a result was compared.
        wrong: elements that were wrong, all comparisons together.

    Args:
        step: one call, on the current stream; returns the tensor that holds its result.
        wrong_in: how many of a result's elements are wrong. May wait for the current stream, never for the device.
        name: for messages.
    """

    def __init__(
        self, step: Callable[[], torch.Tensor], wrong_in: Callable[[torch.Tensor], int], name: str = "a step"
    ) -> None:
        self.step, self._wrong_in, self.name = step, wrong_in, name
        self.result: torch.Tensor | None = None
        self.comparisons = self.wrong = 0

    def __call__(self) -> torch.Tensor:
        self.result = self.step()
        return self.result

    @property
    def verified(self) -> bool:
        """Whether a result was compared, and none was ever wrong."""
        return self.comparisons > 0 and self.wrong == 0

    def require_verified(self) -> None:
        """Raise `Unverified` unless `verified`."""
        if not self.comparisons:
            raise Unverified(f"{self.name} was never compared with the oracle: it is not timed")
        if self.wrong:
            raise Unverified(f"{self.name} was wrong in {self.wrong} elements: it is not timed")

    def poison(self) -> None:
        """Overwrite the last result, so that what is compared next was written anew."""
        if self.result is not None:
            poison(self.result)

    def judge(self) -> int:
        """Compare the last result; how many elements are wrong. Its stream must have ended."""
        assert self.result is not None, "nothing to compare: the step was not run"
        wrong = self._wrong_in(self.result)
        self.comparisons += 1
        self.wrong += wrong
        return wrong

    def check(self, meet: Callable[[], object], settle: Callable[[], object]) -> int:
        """Two eager calls, the second onto poison, and compared; how many elements are wrong. Collective.

        Args:
            meet: returns when all ranks have come, on the host.
            settle: waits for what this rank has put on its stream.
        """
        for _ in range(2):
            self.poison()
            self.result = None  # so that an allocator hands the poisoned memory out again
            settle()
            meet()
            self()
            settle()
            meet()
            settle()
        return self.judge()


def poison(tensor: torch.Tensor) -> None:
    """Fill with what no right result holds: NaN, or all bits set."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


def count_wrong(got: torch.Tensor, want: torch.Tensor, *, sums_rounded: bool = False) -> int:
    """Elements of `got` that are further from `want` than rounding explains; NaN is wrong.

    Args:
        got: in the dtype whose rounding counts; any device.
        want: float64, of the same shape, as the oracle has it.
        sums_rounded: terms were rounded before they were added, not only the sum: errors of a unit of the largest
            element.
    """
    if got.shape != want.shape:
        return max(got.numel(), want.numel())
    unit = torch.finfo(got.dtype).eps
    largest = float(want.abs().max()) if want.numel() else 0.0
    # Float32 sums carry some units of the largest element, whatever they are rounded to in the end.
    floor = largest * max(8 * torch.finfo(torch.float32).eps, unit if sums_rounded else 0.0)
    far = (got.to(want.device).double() - want).abs() > want.abs() * unit + floor
    return int((far | got.to(want.device).isnan()).sum())
