"""All that must be shown of a machine's GPUs, step by step, within a budget of time.

    python -m dcpcomm.bench.all_gpus --out results                   # on all GPUs of this host
    python -m dcpcomm.bench.all_gpus --out results --minutes 25 --only verify --only conformance
    python -m dcpcomm.bench.all_gpus --dry-run --gpus 8              # what would be run, on any machine

On two GPUs and more a rank has a GPU of its own, with N = all of them, and 8 and 4 of them. On one GPU ranks are
streams of it, with N = 8, 4 and 2: that shows the protocol, and nothing of links. For each N, from the largest:

    probe          what the machine offers; a transport that it says can't work is skipped, with the reason
    verify         each transport: a soak of patterns, every bit compared; who fails it has no further steps. Between
                   processes that share one GPU it is a shorter proof, and what wants a GPU for each rank is skipped
    merge          the sweep of all transports and rivals against the limit (dcpcomm bench)
    replays        each transport over peer memory: 100,000 replays with changing data (dcpcomm.bench.replays). More
                   than two virtual ranks take turns on their GPU, and make fewer, for the same time
    conformance    each transport, when all of the above is done for every N

Each step is a process with a limit of time; `summary.json` is written anew after each, so what there is survives.
States: passed, failed, skipped, and out of time, which a step is that was ended at its limit, or never begun. Exit
status: 0 all that was not skipped has passed, 1 something has not, 2 wrong usage, or no GPU.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer

from dcpcomm.bench.steps import Done, Step, limit_for, run_step
from dcpcomm.cachefolder import write_whole

__all__ = ["KINDS", "Contender", "contenders", "main", "narrowed", "plan", "run_all", "sizes_for"]

KINDS = ("probe", "verify", "conformance", "merge", "replays")

#: Seconds that steps take, about. Of virtual ranks as measured on one H200, and on top of that for each rank.
_WANTS_S = {"probe": 10.0, "verify": 20.0, "conformance": 60.0, "merge": 60.0, "replays": 60.0}
_VIRTUAL_WANTS_S = {"conformance": (30.0, 10.0), "merge": (25.0, 5.0), "replays": (40.0, 0.0)}
_THREADS = ("loopback", "loopback_peer")  # between threads of one process alone
_VIRTUAL = "ranks are streams of one GPU: nothing is said of links"
_SHARED = "ranks are processes that share one GPU: nothing is said of links"


@dataclass(frozen=True)
class Contender:
    """A registered transport that may carry merges between processes on GPUs.

    Attributes:
        peer: it works over peer memory.
    """

    name: str
    peer: bool


def contenders() -> tuple[Contender, ...]:
    """All that are registered and say that they work on GPUs, by name."""
    from dcpcomm.registry import registered_transports, try_load
    from dcpcomm.transport import PeerMemoryTransport

    found = []
    for name in sorted(set(registered_transports()) - set(_THREADS)):
        cls, _ = try_load(name)
        if cls is not None and "cuda" in cls.capabilities.devices:
            found.append(Contender(name, issubclass(cls, PeerMemoryTransport)))
    return tuple(found)


def sizes_for(gpus: int) -> tuple[int, ...]:
    """Every N, the largest first."""
    if gpus < 2:
        return (8, 4, 2)[: 3 * gpus]
    return tuple(sorted({gpus, *(n for n in (4, 8) if n < gpus)}, reverse=True))


def plan(gpus: int, transports: Sequence[Contender], replays: int = 100_000, commit: str = "") -> list[Step]:
    """The steps for a host with so many GPUs; none without one.

    Args:
        commit: of the sources, where they are no checkout.
    """
    steps = []
    for n in sizes_for(gpus):
        steps += _virtual(n, replays, commit) if gpus == 1 else _processes(n, transports, replays, commit)
    if gpus == 1:
        steps += [_verify(2, one.name, _SHARED) for one in _probed(steps, 2, transports)]
    # The longest last: what the budget doesn't reach is conformance of fewer ranks than that of all.
    return sorted(steps, key=lambda step: step.kind == "conformance")


def _probed(steps: list[Step], n: int, transports: Sequence[Contender]) -> Sequence[Contender]:
    """The transports, once it is asked what the machine makes of them."""
    command = (sys.executable, "-m", "dcpcomm", "probe", "--ranks", str(n), "--device", "cuda", "--json")
    steps.append(Step(f"n{n}-probe", "probe", n, "", command, _WANTS_S["probe"]))
    return transports


def _processes(n: int, transports: Sequence[Contender], replays: int, commit: str) -> list[Step]:
    """A process and a GPU for each rank."""
    steps: list[Step] = []
    _probed(steps, n, transports)
    steps += [_verify(n, one.name) for one in transports]
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), "-m")
    steps.append(_merge(f"n{n}", n, (*torchrun, "dcpcomm", "bench"), commit))
    for one in transports:
        if one.peer:
            steps.append(_replays(f"n{n}", n, one.name, (*torchrun, "dcpcomm.bench.replays"), replays, commit))
    return steps + [_conformance(f"n{n}", n, one.name) for one in transports]


def _virtual(n: int, replays: int, commit: str) -> list[Step]:
    """A stream of the one GPU for each rank."""
    python, name, ranks = (sys.executable, "-m"), f"n{n}-virtual", ("--ranks", str(n))
    fewer = max(1, 2 * replays // n)
    steps = [
        _merge(name, n, (*python, "dcpcomm", "bench", *ranks), commit, _VIRTUAL),
        _replays(name, n, "loopback_peer", (*python, "dcpcomm.bench.replays", *ranks), fewer, commit, _VIRTUAL),
        _conformance(name, n, "loopback_peer", _VIRTUAL),
    ]
    wants = {kind: base + each * n for kind, (base, each) in _VIRTUAL_WANTS_S.items()}
    return [replace(step, wants_s=wants[step.kind]) for step in steps]


def _heads(least: int, n: int) -> str:
    """Heads that divide over `n` ranks."""
    return str(-(-least // n) * n)


def _verify(n: int, transport: str, note: str = "") -> Step:
    # Processes that share a GPU take turns of milliseconds: a soak between them was not done in a minute.
    proof = ("--level", "standard", "--max-tokens", "16") if note == _SHARED else ("--level", "soak")
    command = (
        sys.executable, "-m", "dcpcomm", "verify", transport, "--ranks", str(n), "--device", "cuda",
        "--num-heads", _heads(128, n), *proof, "--json",
    )  # fmt: skip
    return Step(f"n{n}-verify-{transport}", "verify", n, transport, command, _WANTS_S["verify"], note)


def _conformance(prefix: str, n: int, transport: str, note: str = "") -> Step:
    name = f"{prefix}-conformance-{transport}"
    command = (
        sys.executable, "-m", "dcpcomm", "conformance", transport, "--ranks", str(n), "--device", "cuda",
        "--junit", f"{name}.xml",
    )  # fmt: skip
    return Step(name, "conformance", n, transport, command, _WANTS_S["conformance"], note)


def _merge(prefix: str, n: int, start: tuple[str, ...], commit: str, note: str = "") -> Step:
    name = f"{prefix}-merge"
    command = (*start, "--heads", _heads(128, n), "--rivals", *_results(name, commit))
    return Step(name, "merge", n, "", command, _WANTS_S["merge"], note)


def _replays(
    prefix: str, n: int, transport: str, start: tuple[str, ...], replays: int, commit: str, note: str = ""
) -> Step:
    name = f"{prefix}-replays-{transport}"
    command = (
        *start, "--transport", transport, "--replays", str(replays), "--heads", _heads(16, n), *_results(name, commit),
    )  # fmt: skip
    return Step(name, "replays", n, transport, command, _WANTS_S["replays"], note)


def _results(name: str, commit: str) -> tuple[str, ...]:
    return ("--json", f"{name}.json", *(("--commit", commit) if commit else ()))


def narrowed(steps: Sequence[Step], kinds: Sequence[str], transports: Sequence[str]) -> list[Step]:
    """The steps of these kinds, about these transports; all where none is named. Probes that serve no step go.

    Args:
        transports: steps about several transports stay.
    """
    kept = [
        one
        for one in steps
        if (not kinds or one.kind in kinds or one.kind == "probe")
        and (not transports or one.transport in ("", *transports))
    ]
    return [
        one
        for at, one in enumerate(kept)
        if one.kind != "probe" or "probe" in kinds or any(_judged(later, one.ranks) for later in kept[at:])
    ]


def _judged(step: Step, n: int) -> bool:
    """Whether a probe for N says if this step can be made."""
    return step.ranks == n and step.transport not in ("", *_THREADS)


# ---------------------------------------------------------------- running them


def run_all(
    steps: Sequence[Step], folder: Path, budget_s: float, about: dict[str, Any], say: Callable[[str], Any]
) -> list[Done]:
    """Run the steps one after the other, whatever becomes of each; `folder` gets their output and `summary.json`.

    Args:
        about: what else stands in the summary.
    """
    ends = time.monotonic() + budget_s
    done: list[Done] = []
    verdicts: dict[int, dict[str, str]] = {}

    def note(one: Done) -> None:
        done.append(one)
        summary = {**about, "budget_s": budget_s, "steps": [each.as_dict() for each in done]}
        write_whole(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
        say(f"{one.step.name}: {one.state}" + (f" ({one.detail})" if one.detail else f" in {one.seconds:.0f} s"))

    for number, step in enumerate(steps):
        reason = verdicts.get(step.ranks, {}).get(step.transport)
        if reason is not None:
            note(Done(step, "skipped", reason))
            continue
        unusable = {(n, name) for n, by_name in verdicts.items() for name in by_name}
        after = sum(one.wants_s for one in steps[number + 1 :] if (one.ranks, one.transport) not in unusable)
        limit_s = limit_for(step.wants_s, after, ends - time.monotonic())
        if limit_s is None:
            note(Done(step, "out of time", "not begun: the budget is spent"))
            continue
        say(f"{step.name}: begun, for {limit_s:.0f} s at the most")
        try:
            finished = run_step(step, folder, limit_s)
        except BaseException as interruption:
            note(Done(step, "failed", f"interrupted: {type(interruption).__name__}"))
            raise
        if finished.state == "failed" and step.note == _SHARED and (why := _needs_more(folder / f"{step.name}.out")):
            finished = replace(finished, state="skipped", detail=why)
        note(finished)
        if step.kind == "probe" and finished.state == "passed":
            verdicts[step.ranks] = _unusable(folder / f"{step.name}.out")
        if step.kind == "verify" and step.transport and finished.state == "failed":
            verdicts.setdefault(step.ranks, {})[step.transport] = f"{step.name} failed"
    return done


def _unusable(file: Path) -> dict[str, str]:
    """From what `dcpcomm probe --json` printed: transport -> why it can't be used, and what would help."""
    probed = json.loads(file.read_text(encoding="utf-8"))
    return {
        one["name"]: "; ".join(filter(None, (one["reason"], one["remedy"])))
        for one in probed["transports"]
        if one["verdict"] == "no" and one["name"] not in _THREADS  # of processes, which those are not for
    }


def _needs_more(file: Path) -> str | None:
    """From what `dcpcomm verify --json` printed: why the transport can't be used by ranks that share a GPU."""
    try:
        (judged,) = json.loads(file.read_text(encoding="utf-8"))
        return str(judged["why"]) if judged["verdict"] == "unusable" else None
    except (ValueError, TypeError, KeyError):
        return None  # it didn't get that far


def _status(done: Sequence[Done]) -> int:
    states = [one.state for one in done if one.step.kind != "probe" or one.state != "passed"]
    return 0 if "passed" in states and not {"failed", "out of time"} & set(states) else 1


def main(
    out: Annotated[Path | None, typer.Option(help="folder of the results; made if it isn't there")] = None,
    minutes: Annotated[float, typer.Option(help="budget of time for all steps together", min=0.5)] = 10.0,
    only: Annotated[list[str] | None, typer.Option(help=f"a kind of step: {', '.join(KINDS)}; repeatable")] = None,
    transport: Annotated[
        list[str] | None, typer.Option(help="steps about this transport, and about several; repeatable")
    ] = None,
    replays: Annotated[int, typer.Option(help="of each check by replays", min=1)] = 100_000,
    of_commit: Annotated[
        str, typer.Option("--commit", help="which the results are of, where what runs is no checkout")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the steps, and run none")] = False,
    gpus: Annotated[int | None, typer.Option(help="with --dry-run: for so many GPUs", min=0)] = None,
) -> None:
    """Show all that must be shown of this machine's GPUs, within a budget of time."""
    if gpus is not None and not dry_run:
        raise typer.BadParameter(f"--gpus {gpus}; expected only with --dry-run: what runs takes all GPUs of this host")
    for one in only or []:
        if one not in KINDS:
            raise typer.BadParameter(f"--only {one}; expected one of {', '.join(KINDS)}")
    here = torch.cuda.device_count() if gpus is None else gpus
    if here == 0:
        print("this needs a CUDA GPU, and there is none; --dry-run --gpus N prints the steps for N", file=sys.stderr)
        raise typer.Exit(2)
    candidates = contenders()
    names = {*_THREADS, *(one.name for one in candidates)}
    for name in transport or []:
        if name not in names:
            raise typer.BadParameter(f"--transport {name}; expected one of {', '.join(sorted(names))}")
    steps = narrowed(plan(here, candidates, replays, of_commit), only or (), transport or ())
    wanted_s = sum(one.wants_s for one in steps)
    if dry_run:
        _print_plan(steps, here, wanted_s, minutes * 60)
        return
    if out is None:
        raise typer.BadParameter("--out is missing; expected a folder for the results")
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _ended)
    done = run_all(steps, out.absolute(), minutes * 60, _about(here, of_commit), lambda text: print(text, flush=True))
    counts = {
        state: [one.state for one in done].count(state) for state in ("passed", "failed", "out of time", "skipped")
    }
    print(", ".join(f"{count} {state}" for state, count in counts.items()) + f"; see {out / 'summary.json'}")
    raise typer.Exit(_status(done))


def _about(gpus: int, of_commit: str) -> dict[str, Any]:
    from dcpcomm.bench.machine import commit, machine, versions

    return {
        "command": shlex.join(["python", "-m", "dcpcomm.bench.all_gpus", *sys.argv[1:]]),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": of_commit or commit(),
        "gpus": gpus,
        "machine": machine([torch.cuda.get_device_name(index) for index in range(gpus)]),
        "versions": versions(),
    }


def _print_plan(steps: list[Step], gpus: int, wanted_s: float, budget_s: float) -> None:
    print(f"{gpus} GPU(s): {len(steps)} steps, about {wanted_s / 60:.0f} min; the budget is {budget_s / 60:g} min")
    if wanted_s > budget_s:
        print("With less than that each step has a share of what is left, and what one saves is the others'.")
    left_s, after_s = budget_s, wanted_s
    for step in steps:
        after_s -= step.wants_s
        limit_s = limit_for(step.wants_s, after_s, left_s)
        left_s -= limit_s or 0.0
        limit = "no time" if limit_s is None else f"{limit_s:.0f} s"
        print(f"\n{step.name}  [{limit}]" + (f"  {step.note}" if step.note else ""))
        print(f"    {step.words}")


def _ended(number: int, frame: Any) -> NoReturn:
    """On SIGTERM: leave by an exception, so that the step that runs is ended too, and the summary written."""
    sys.exit(128 + number)


if __name__ == "__main__":
    typer.run(main)
