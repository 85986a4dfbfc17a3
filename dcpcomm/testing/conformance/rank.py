"""One rank, as a case's rank function sees it, and the script of merges that most cases are."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import dcpcomm
from dcpcomm.testing.conformance.case import Case, NotHere
from dcpcomm.testing.conformance.partials import LAYOUTS, NAN, Partials
from dcpcomm.testing.conformance.scene import Scene
from dcpcomm.transport import MergeShape

__all__ = ["Answer", "Call", "Played", "Raised", "Rank", "Script", "answer", "fetched", "play", "settle"]


@dataclass(frozen=True)
class Raised:
    """What a call raised, in a form that any process can read.

    Attributes:
        kinds: names of its class and of that class's bases.
        text: its message.
        ranks: those it names, of a `TransportTimeout`.
        seconds: how long the call took to raise.
    """

    kinds: tuple[str, ...]
    text: str
    ranks: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Answer:
    """What a rank function came to: `value`; or what it raised, `error`; or why it can't run here, `not_here`."""

    value: Any = None
    error: str = ""
    trace: str = ""
    not_here: str = ""


class Rank:
    """One rank of the group under test.

    Attributes:
        scene: the case's.
        group: what an engine would pass to `DCPMerger`.
        rank, size: its place in the group, and how many there are.
        device: where its partials are.
        meet: waits for all ranks of this case, over neither the group nor the transport.
    """

    def __init__(self, scene: Scene, group: Any, rank: int, meet: Callable[[], None]) -> None:
        self.scene, self.group, self.rank, self.meet = scene, group, rank, meet
        self.size = scene.n
        if scene.device == "cuda":
            # Threads have their streams on one GPU; processes have a GPU each, as far as there are.
            threads = hasattr(group, "loopback_store")
            index = torch.cuda.current_device() if threads else rank % torch.cuda.device_count()
            self.device = torch.device("cuda", index)
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device(scene.device)

    def merger(self, shape: MergeShape, deadline_s: float | None = None) -> dcpcomm.DCPMerger:
        """A merger over the transport under test. Collective over the case's ranks.

        Args:
            deadline_s: how long a merge waits for a peer; the scene's by default.
        """
        limit = self.scene.deadline_s if deadline_s is None else deadline_s
        watchdog = {**self.scene.config.get("watchdog", {}), "timeout_s": limit}
        return dcpcomm.DCPMerger(self.group, shape, {**self.scene.config, "watchdog": watchdog}, self.device)

    def mine(self, partials: Partials, layout: str = "contiguous", lse_layout: str = "contiguous") -> Any:
        """(partial_out, partial_lse) of this rank, copies."""
        settle(self.device)
        out = LAYOUTS[layout](partials.outs[self.rank].to(self.device))
        return out, LAYOUTS[lse_layout](partials.lses[self.rank].to(self.device))

    def random(self) -> random.Random:
        """For delays: differs between ranks."""
        return random.Random(f"{self.scene.seed}/{self.scene.case}/{self.rank}")

    def attempt(self, call: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """What `call` returned, or `Raised`."""
        start = time.monotonic()
        try:
            return call(*args, **keywords)
        except Exception as error:
            kinds = tuple(kind.__name__ for kind in type(error).__mro__)
            return Raised(kinds, str(error), tuple(getattr(error, "ranks", ())), time.monotonic() - start)


@dataclass(frozen=True)
class Call:
    """One merge on every rank.

    Args:
        partials: of all ranks.
        channel, tag: as in `merge`.
        layouts, lse_layouts: names in `LAYOUTS`; rank r takes the one at r modulo their number.
        query_start_loc: by it and `seq_lens`, the same on every rank, instead of by the partials' counts.
    """

    partials: Partials
    channel: int = 0
    tag: int = 0
    layouts: tuple[str, ...] = ("contiguous",)
    lse_layouts: tuple[str, ...] = ("contiguous",)
    seq_lens: torch.Tensor | None = None
    query_start_loc: torch.Tensor | None = None

    def arguments(self, at: Rank) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """What rank `at` passes to `merge`."""
        out, lse = at.mine(
            self.partials,
            self.layouts[at.rank % len(self.layouts)],
            self.lse_layouts[at.rank % len(self.lse_layouts)],
        )
        keywords: dict[str, Any] = {"channel": self.channel, "tag": self.tag}
        if self.seq_lens is not None and self.query_start_loc is not None:
            keywords["seq_lens"] = self.seq_lens.to(at.device)
            keywords["query_start_loc"] = self.query_start_loc.to(at.device)
        elif self.partials.counts is not None:
            keywords["valid_counts"] = self.partials.counts[at.rank].to(at.device)
        return out, lse, keywords


@dataclass(frozen=True)
class Script:
    """Merges by one merger, one after the other, and how to take them.

    Args:
        delay_s: each rank sleeps for a random time up to this before each call.
        overwrite: fill the inputs with NaN as soon as the merge has returned, as a producer may.
    """

    shape: MergeShape
    calls: tuple[Call, ...]
    delay_s: float = 0.0
    overwrite: bool = False


@dataclass(frozen=True)
class Played:
    """A rank function: play the script that `script(scene)` writes."""

    script: Callable[[Scene], Script]

    def __call__(self, at: Rank) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return play(at, self.script(at.scene))


def play(at: Rank, script: Script) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(out, lse) of each call of the script on this rank, as they were when the call returned."""
    rng = at.random()
    # All made before the first call, so that calls are back to back where the script says so.
    arguments = [call.arguments(at) for call in script.calls]
    results = []
    with at.merger(script.shape) as merger:
        for out, lse, keywords in arguments:
            if script.delay_s:
                time.sleep(rng.random() * script.delay_s)
            merged, merged_lse = merger.merge(out, lse, return_lse=True, **keywords)
            if script.overwrite:
                out.fill_(NAN)
                lse.fill_(NAN)
            results.append((merged.clone(), merged_lse.clone()))
        settle(at.device)
        merger.check()
    return [fetched(*one) for one in results]


def settle(device: torch.device) -> None:
    """On a GPU, wait for the current stream. Before a copy from or to the host: the driver would wait in it, and keep
    other ranks of this process from launching what is waited for.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def fetched(*tensors: torch.Tensor) -> Any:
    """Copies on CPU."""
    settle(tensors[0].device)
    return tuple(one.cpu().clone() for one in tensors)


def answer(case: Case, at: Rank) -> Answer:
    """Run the case's rank function; what it raises is an answer too, so that all ranks' words reach the report."""
    try:
        return Answer(case.rank_function(at))
    except NotHere as reason:
        return Answer(not_here=str(reason))
    except Exception as error:  # a transport may raise anything, and it belongs in the report
        return Answer(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
