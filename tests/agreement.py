"""Constructions of one merger on N ranks that are threads, and what became of each; transports that fail where told.

A transport of `flaky` fails on given ranks in given stages, so that "one rank's installation is older" or "one rank's
driver refuses" can be had in one process.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from abc import ABCMeta
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

import dcpcomm
from dcpcomm.backends.loopback import Loopback
from dcpcomm.registry import registered_transports, unregister_transport
from dcpcomm.testing import Fault, FaultyTransport, LoopbackRank, LoopbackWorld, RankDied, faulty
from dcpcomm.transport import API_VERSION, Capabilities, MergeTransport
from dcpcomm.verify import load_of

DEADLINE_S = 1.0  # where it is meant to pass
PATIENCE_S = 15.0  # where it is not: what is found at once must be found at once on a busy machine too
SLACK_S = 5.0  # how much later than the deadline of the stage a rank may learn that it passed
RUN_TIMEOUT_S = 40.0
#: The last exchange of a quick verification: a rank that finds its bits wrong there keeps nobody waiting.
LAST = load_of("quick", 0, False).rounds - 1

STAGES = ("import", "declared", "check", "refuse", "prepare", "connect", "verify")


@dataclass(frozen=True)
class Built:
    """A rank that has a merger: what it says of itself, and whether its first merge was right."""

    transport: str
    explained: str
    right: bool
    seconds: float

    def line(self, name: str) -> str:
        """What `explain` says of one candidate."""
        (line,) = (line for line in self.explained.splitlines() if line.strip().startswith(f"{name}:"))
        return line.strip()


@dataclass(frozen=True)
class Failed:
    """A rank whose construction raised: after how long, and when by `time.monotonic()`."""

    error: Exception
    seconds: float
    at: float
    trace: str

    @property
    def kind(self) -> type[Exception]:
        return type(self.error)

    @property
    def text(self) -> str:
        return str(self.error)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(getattr(self.error, "ranks", ()))


@dataclass(frozen=True)
class Died:
    """A rank that is no more."""


Fate = Any  # Built | Failed | Died


def settings(deadline_s: float = PATIENCE_S, level: str = "quick", **changes: Any) -> dict[str, Any]:
    """A configuration, with `deadline_s` as every deadline that it has."""
    return {
        "verify": {"level": level, "deadline_s": deadline_s},
        "watchdog": {"timeout_s": deadline_s},
        **changes,
    }


def construct(
    n: int,
    config: dict[str, Any] | Callable[[int], dict[str, Any]],
    shape: Callable[[int], dict[str, Any]] | None = None,
    until: threading.Event | None = None,
    absent: int = 0,
    inside: Callable[[int, dcpcomm.DCPMerger], None] | None = None,
) -> list[Fate]:
    """Construct one merger and merge once; the fate of each rank.

    Args:
        config, shape: of all ranks, or by rank.
        until, absent: set when all but `absent` ranks are done: it ends what still hangs.
        inside: called on each rank that built a merger, after its first merge.
    """
    lock, done = threading.Lock(), [0]

    def rank(group: LoopbackRank) -> Fate:
        try:
            return _fate(group, config(group.rank) if callable(config) else config, shape, inside)
        finally:
            with lock:
                done[0] += 1
                if until is not None and done[0] >= n - absent:
                    until.set()

    return LoopbackWorld(n).run(rank, timeout_s=RUN_TIMEOUT_S)


def _fate(
    group: LoopbackRank,
    config: dict[str, Any],
    shape: Callable[[int], dict[str, Any]] | None,
    inside: Callable[[int, dcpcomm.DCPMerger], None] | None,
) -> Fate:
    given = {"max_tokens": 8, "num_heads": 2 * group.size, "head_dim": 16, "dtype": torch.float32, "lse_base": "e"}
    given |= shape(group.rank) if shape is not None else {}
    started = time.monotonic()
    try:
        merger = dcpcomm.DCPMerger(group, dcpcomm.MergeShape(**given), config)
        seconds = time.monotonic() - started
        with merger:
            built = Built("+".join(merger.transports), merger.explain(), merges_right(merger), seconds)
            if inside is not None:
                inside(group.rank, merger)
            return built
    except RankDied:
        return Died()
    except Exception as error:
        now = time.monotonic()
        return Failed(error, now - started, now, traceback.format_exc())


def merges_right(merger: dcpcomm.DCPMerger, tokens: int = 5) -> bool:
    """One merge of random partials against the oracle."""
    n, shape = merger.group.size, merger.shape
    generator = torch.Generator().manual_seed(tokens)
    outs = torch.randn((n, tokens, shape.num_heads, shape.head_dim), generator=generator)
    lses = torch.randn((n, tokens, shape.num_heads), generator=generator)
    want, _ = dcpcomm.reference.merge_partials(outs, lses, lse_base=shape.lse_base)
    got = merger.merge(outs[merger.group.rank], lses[merger.group.rank])
    return bool(torch.allclose(got.double(), want[merger.group.rank], atol=1e-5))


def others_than(*names: str) -> list[str]:
    """Every registered transport but these: what to forbid for these to be the only candidates."""
    return [name for name in registered_transports() if name not in names]


# ---------------------------------------------------------------- transports


def rank_here() -> int:
    """The rank whose thread this is; -1 for none's."""
    name = threading.current_thread().name
    return int(name.removeprefix("rank ")) if name.startswith("rank ") else -1


class _PerRank(ABCMeta):
    """Classes that differ between the ranks of one process, as installations do between machines."""

    plan: dict[int, str]
    declares: Capabilities

    @property
    def api_version(cls) -> int:
        return 0 if cls.plan.get(rank_here()) == "import" else API_VERSION

    @property
    def capabilities(cls) -> Capabilities:
        return Capabilities(devices=("cuda",)) if cls.plan.get(rank_here()) == "declared" else cls.declares


REASONS = {
    "import": "api_version 0",
    "declared": "works on cuda",
    "check": "the driver said no",
    "refuse": "compiled without it",
    "prepare": "no memory left",
    "connect": "no route",
    "verify": "wanted 0x",
}


def flaky(
    name: str, plan: dict[int, str], *faults: Fault, inner: type[MergeTransport] = Loopback, **declares: Any
) -> type[FaultyTransport]:
    """`inner`, failing on each rank of `plan` in its stage (of `STAGES`; "refuse" is a check that says no).

    Args:
        declares: capabilities that differ from those of `inner`.
    """
    own: list[Fault] = []
    for rank, stage in plan.items():
        reason = REASONS[stage]
        if stage == "refuse":
            own.append(Fault("refuse", rank=rank, stage="check", reason=reason))
        elif stage == "verify":
            own.append(Fault("corrupt", rank=rank, call=LAST, reason=reason))
        elif stage not in ("import", "declared"):
            where: Literal["check", "prepare", "connect"] = stage  # type: ignore[assignment]
            own.append(Fault("raise", rank=rank, stage=where, reason=reason))
    given = {**vars(inner.capabilities), **declares}
    body = {"plan": plan, "declares": Capabilities(**given), "__module__": __name__}
    base = _PerRank(f"Flaky{name}", (inner,), body)
    return faulty(base, *own, *faults, name=name, capabilities=body["declares"])


def stage_of(failing: str) -> str:
    """The stage that a report should name for one of `STAGES`."""
    return "check" if failing == "refuse" else failing


@contextlib.contextmanager
def registered(*classes: type[MergeTransport]) -> Iterator[None]:
    """Registered by name, and no more afterwards."""
    try:
        for cls in classes:
            dcpcomm.register_transport(cls.name, cls)
        yield
    finally:
        for cls in classes:
            unregister_transport(cls.name)
