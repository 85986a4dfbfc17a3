"""Takes the cases of one transport, one after the other, and reports them."""

from __future__ import annotations

import importlib
import operator
import platform
import secrets
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

import dcpcomm
from dcpcomm.errors import ConfigError, TransportUnavailable
from dcpcomm.launch import RankFailed
from dcpcomm.registry import (
    BY_CALL,
    load_transport,
    register_transport,
    registered_transports,
    unregister_transport,
)
from dcpcomm.testing.conformance.case import Case
from dcpcomm.testing.conformance.cases import CASES
from dcpcomm.testing.conformance.rank import Answer
from dcpcomm.testing.conformance.report import Outcome, Report, Result
from dcpcomm.testing.conformance.scene import Scene
from dcpcomm.testing.conformance.world import Processes, Threads, World
from dcpcomm.testing.loopback import side_by_side
from dcpcomm.topology import local_facts
from dcpcomm.transport import MergeTransport

__all__ = ["ConformanceRun", "run_conformance"]

WorldName = Literal["auto", "processes", "threads"]
#: How long a merge waits for a peer, unless the config says.
DEADLINE_S = 10.0
#: What a rank that waited for the failing one raises: told after what the others raised.
_CONSEQUENCES = ("TransportTimeout", "CallMismatch", "SelectionMismatch", "TimeoutError")
#: Errors whose traceback shows the framework only.
_SAY_IT_ALL = ("TransportUnavailable", "VerificationFailed", "ShapeError", "ConfigError")


def run_conformance(
    transport: str | type[MergeTransport],
    *,
    ranks: Sequence[int] = (3,),
    world: WorldName = "auto",
    cases: Iterable[Case] | None = None,
    config: Mapping[str, Any] | None = None,
    seed: int | None = None,
    device: str | None = None,
    on_result: Callable[[Result], None] | None = None,
) -> Report:
    """Hold a transport to the contract, on this machine.

    Args:
        transport: a registered name, "pkg.mod:Class", or the class.
        ranks: group sizes; two or more ranks each. Three shows more faults than two (the order of sources, say).
        world: "processes", "threads" (for transports that only work over `LoopbackWorld`), or "auto": what the
            transport's own `check` says.
        cases: all of `CASES` by default.
        config: keys of a merger's configuration, the transport's options say; `transport` is set here.
        seed: of the data; fresh in every run by default, and in the report.
        device: "cpu" or "cuda"; by default cuda, where there is one and the transport works there.
        on_result: called after each case.

    Raises:
        ConfigError: no such transport, or arguments that make no sense.
        TransportUnavailable: it can't be loaded, or can't work on this machine; with the reason.
    """
    with ConformanceRun(transport, ranks=ranks, world=world, config=config, seed=seed, device=device) as run:
        chosen = CASES if cases is None else tuple(cases)
        for size in run.ranks:
            unusable = ""
            for case in chosen:
                result = run.not_run(case, size, unusable) if unusable else run.take(case, size)
                # What can't be constructed would fail every other case in the same way, one deadline after the other.
                if case.name == "constructs" and result.outcome == "failed":
                    unusable = "not run, because the case `constructs` failed"
                if on_result is not None:
                    on_result(result)
        return run.report


class ConformanceRun:
    """One transport, ready to take cases. A context manager, because processes may stand behind it.

    Args: as `run_conformance`.

    Attributes:
        report: what was taken so far.
        ranks: group sizes.
    """

    def __init__(
        self,
        transport: str | type[MergeTransport],
        *,
        ranks: Sequence[int] = (3,),
        world: WorldName = "auto",
        config: Mapping[str, Any] | None = None,
        seed: int | None = None,
        device: str | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        if not self.ranks or min(self.ranks) < 2:
            raise ConfigError(f"ranks={self.ranks}; expected group sizes of 2 or more: one rank uses no transport")
        if world not in ("auto", "processes", "threads"):
            raise ConfigError(f"world={world!r}; expected 'auto', 'processes' or 'threads'")
        name, path, self._registered_here = _registered(transport)
        side_by_side()  # before anything starts CUDA
        try:
            self._cls = load_transport(name)
            self._device = _device(self._cls, device)
            self._config = {"verify": {"level": "quick"}, **(config or {}), "transport": name}
            chosen = _world_of(self._cls, max(self.ranks), self._device) if world == "auto" else world
            if chosen == "processes" and path is not None and "<" in path:
                raise ConfigError(f"{path} can't be imported by a rank's process; define it at the top level of a file")
        except BaseException:
            self._unregister(name)
            raise
        target = None if path is None else (name, path)
        self._world: World = Threads() if chosen == "threads" else Processes(max(self.ranks), target)
        self.report = Report(
            transport=name,
            target=f"{self._cls.__module__}:{self._cls.__qualname__}",
            world=chosen,
            seed=secrets.randbelow(2**31) if seed is None else seed,
            versions={
                "dcpcomm": dcpcomm.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "device": self._device,
            },
        )

    def take(self, case: Case, size: int) -> Result:
        """Run one case on a group of `size` ranks, and report it."""
        scene = Scene(
            case=case.name,
            n=size,
            seed=self.report.seed,
            transport=self.report.transport,
            capabilities=self._cls.capabilities,
            fused=self._cls.fused_merge is not None,
            device=self._device,
            config=self._config,
            deadline_s=self._config.get("watchdog", {}).get("timeout_s", DEADLINE_S),
        )
        start, pool = time.monotonic(), torch.get_num_threads()
        torch.set_num_threads(1)  # or torch's own threads fight the ranks for the cores
        try:
            outcome, detail = self._outcome(case, scene)
        finally:
            torch.set_num_threads(pool)
        return self._add(case, size, outcome, detail, time.monotonic() - start)

    def not_run(self, case: Case, size: int, reason: str) -> Result:
        """Report a case as failed without running it."""
        return self._add(case, size, "failed", reason, 0.0)

    def close(self) -> None:
        """End the ranks. Safe twice."""
        self._world.close()
        self._unregister(self.report.transport)

    def __enter__(self) -> ConformanceRun:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _unregister(self, name: str) -> None:
        if self._registered_here:
            unregister_transport(name)
            self._registered_here = False

    def _add(self, case: Case, size: int, outcome: Outcome, detail: str, seconds: float) -> Result:
        result = Result(case.name, case.proves, size, outcome, round(seconds, 3), detail)
        self.report.results.append(result)
        return result

    def _outcome(self, case: Case, scene: Scene) -> tuple[Outcome, str]:
        low, high = scene.capabilities.world_sizes
        unclaimed = case.claim(scene)
        if not low <= scene.n <= high:
            unclaimed = f"world_sizes: groups of {low} to {high} ranks"
        if unclaimed:
            return "not claimed", unclaimed
        try:
            answers = self._world.run(case, scene)
        except RankFailed as failure:  # a rank hung or died
            return "failed", str(failure)
        not_here = next((a.not_here for a in answers if a.not_here), "")
        if not_here:
            return "not claimed", not_here
        if any(a.error for a in answers):
            return "failed", _errors(answers)
        try:
            case.judge(scene, [a.value for a in answers])
        except AssertionError as error:
            return "failed", str(error)
        except Exception as error:  # what came is so far off that the judge can't even read it
            return "failed", f"{type(error).__name__} in judging what came: {error}\n{traceback.format_exc()}"
        return "passed", ""


def _errors(answers: list[Answer]) -> str:
    """What the ranks raised, the likeliest cause first and in one line, and where that came from."""
    raised = [(rank, a) for rank, a in enumerate(answers) if a.error]
    raised.sort(key=lambda pair: pair[1].error.startswith(_CONSEQUENCES))
    (rank, lead), *others = raised
    lines = [f"rank {rank} raised {' '.join(lead.error.split())}"]
    lines += [f"rank {rank} raised {a.error.partition(chr(10))[0]:.300}" for rank, a in others]
    if not lead.error.startswith((*_CONSEQUENCES, *_SAY_IT_ALL)):
        lines.append(lead.trace)
    return "\n".join(lines)


def _registered(transport: str | type[MergeTransport]) -> tuple[str, str | None, bool]:
    """The transport's name; the dotted path by which other processes register it, None where they know it by an entry
    point; and whether it was registered here and now.
    """
    cls: Any = transport
    if isinstance(transport, str):
        known = registered_transports().get(transport)
        if known is not None:
            return transport, known.dotted_path if known.distribution == BY_CALL else None, False
        if ":" not in transport and "." not in transport:
            load_transport(transport)  # raises, naming the nearest
        cls = _imported(transport)
    name = getattr(cls, "name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{transport!r} is no transport: it has no class attribute `name`")
    path = f"{cls.__module__}:{cls.__qualname__}"
    known = registered_transports().get(name)
    if known is not None and known.dotted_path == path:
        return name, path if known.distribution == BY_CALL else None, False
    register_transport(name, path if "<" not in path else cls)
    return name, path, True


def _imported(path: str) -> Any:
    module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except Exception as error:  # a plug-in may raise anything when imported
        raise ConfigError(
            f"{path!r} can't be imported ({type(error).__name__}: {error}); expected 'pkg.mod:Class' of a module that "
            "can be imported here, or a name in `dcpcomm list`"
        ) from error


def _device(cls: type[MergeTransport], asked_for: str | None) -> str:
    here = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    devices = cls.capabilities.devices
    for device in here if asked_for is None else [asked_for]:
        if device in devices and device in here:
            return device
    raise TransportUnavailable(
        f"transport {cls.name!r} works on {', '.join(devices)}; this machine has {' and '.join(here)}"
        + (f", and {asked_for!r} was asked for" if asked_for is not None else "")
        + "; run its conformance where it has one"
    )


def _world_of(cls: type[MergeTransport], size: int, device: str) -> str:
    """Processes, unless the transport says that it needs threads."""
    verdict = cls.check(local_facts(0, size, torch.device(device), False))
    if verdict.ok:
        return "processes"
    if cls.check(local_facts(0, size, torch.device(device), True)).ok:
        return "threads"
    raise TransportUnavailable(
        f"transport {cls.name!r} can't work on this machine: {verdict.reason}"
        + (f"; {verdict.remedy}" if verdict.remedy else "")
    )
