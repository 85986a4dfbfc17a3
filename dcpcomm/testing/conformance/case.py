"""What one case is, and what a transport may leave unclaimed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dcpcomm.testing.conformance.rank import Rank
    from dcpcomm.testing.conformance.scene import Scene

__all__ = [
    "Carries",
    "Case",
    "Claim",
    "NotHere",
    "calls_off",
    "every_transport",
    "keeps_deadlines",
    "ragged",
    "repeatable",
    "sends_headers",
    "spares_peers",
    "works_in_graphs",
]

#: Given the scene, "" where the transport claims what a case proves, else which of its declarations says that it
#: doesn't.
Claim = Callable[["Scene"], str]


class NotHere(Exception):
    """Raised by a rank function: this machine or this torch can't show what the case is about. The reason is reported
    as "not claimed".
    """


def every_transport(scene: Scene) -> str:
    """What the contract asks of all."""
    return ""


@dataclass(frozen=True)
class Carries:
    """Claims that it moves partials of `dtype`."""

    dtype: torch.dtype

    def __call__(self, scene: Scene) -> str:
        carried = scene.capabilities.dtypes
        return "" if self.dtype in carried else f"dtypes: carries {', '.join(map(str, carried))}"


def repeatable(scene: Scene) -> str:
    return "" if scene.capabilities.deterministic else "deterministic=False"


def works_in_graphs(scene: Scene) -> str:
    if not scene.capabilities.graph_capturable:
        return "graph_capturable=False"
    return "" if scene.device == "cuda" else f"CUDA graphs: the merge is on {scene.device}"


def ragged(scene: Scene) -> str:
    return sends_headers(scene) or ("" if scene.capabilities.ragged else "ragged=False")


def sends_headers(scene: Scene) -> str:
    """Only packed rows travel with the header that says which call they belong to."""
    if scene.fused:
        return "it merges by itself: its rows carry no header"
    layout = scene.capabilities.layout
    return "" if layout == "packed" else f'layout="{layout}": its rows carry no header'


def keeps_deadlines(scene: Scene) -> str:
    if not scene.capabilities.interruptible:
        return "interruptible=False"
    return "may_hang=True" if scene.capabilities.may_hang else ""


def calls_off(scene: Scene) -> str:
    """A rank whose call raised sends its headers alone: on a GPU always, elsewhere where they may come without rows."""
    headers = sends_headers(scene)
    return headers or ("" if scene.device == "cuda" or scene.capabilities.ragged else "ragged=False")


def spares_peers(scene: Scene) -> str:
    return keeps_deadlines(scene) if calls_off(scene) else ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that a right transport does and some wrong one doesn't.

    Args:
        name: lower case, words joined by `-`.
        proves: one line: what is right, and which fault would show.
        rank_function: run on every rank at once, in a process or thread of its own; it merges through public calls
            only, and what it returns goes to `judge`. At the top level of a module, so that a process finds it.
        judge: `judge(scene, got)`, `got` by group rank; raises AssertionError with what came and what was expected.
        claim: whether the transport claims this at all; where not, the case is reported "not claimed", with the reason.
        reordered: run it in a group whose global ranks are not in order.
    """

    name: str
    proves: str
    rank_function: Callable[[Rank], Any]
    judge: Callable[[Scene, list[Any]], None]
    claim: Claim = every_transport
    reordered: bool = False
