"""torch.compile for rivals: one version for each B, as an engine has it with its captured sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Compiled"]


class Compiled:
    """A function, compiled anew for each B, so that no version is one for "any B".

    Raises:
        whatever torch.compile raises: a rival that ran as single operations would be no rival.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._compiled: Callable[..., Any] | None = None

    def begin(self) -> None:
        """For another B: forget the versions there are."""
        torch.compiler.reset()
        self._compiled = torch.compile(self._fn, fullgraph=True, dynamic=False)

    def __call__(self, *args: Any) -> Any:
        assert self._compiled is not None, "begin() comes first"
        return self._compiled(*args)
