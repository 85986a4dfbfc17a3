"""Steps of a long check: each a command with a limit of time, whose output is on disk when it ends, however it ends.

A step that is past its limit is ended with every process that it started, also those that left its process group
(torchrun's ranks have sessions of their own): a rank that is left behind would keep its GPU, and spoil the steps after.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["LEAST_S", "Done", "State", "Step", "limit_for", "run_step"]

State = Literal["passed", "failed", "skipped", "out of time"]

#: With less than this left nothing is begun: ranks take that long to import torch and to meet.
LEAST_S = 20.0
#: What a step may take at the most, of what it wants: beyond that it hangs.
_PATIENCE = 3.0
#: Between a polite signal and the last one, for torchrun to end its ranks.
_GRACE_S = 5.0
#: What every process of a step has in its environment, wherever it has gone.
_MARK = "_DCPCOMM_STEP"


@dataclass(frozen=True)
class Step:
    """One command, and what it is good for.

    Attributes:
        name: also of its files.
        kind: "probe", "verify", "conformance", "merge" or "replays".
        ranks: N.
        transport: the one that it is about; "" where it is about several.
        command: as `subprocess` takes it.
        wants_s: about as long as it takes.
        note: what must be known to read its result.
    """

    name: str
    kind: str
    ranks: int
    transport: str
    command: tuple[str, ...]
    wants_s: float
    note: str = ""

    @property
    def words(self) -> str:
        """The command as one would type it."""
        first = "python" if self.command[0] == sys.executable else self.command[0]
        return shlex.join((first, *self.command[1:]))


@dataclass(frozen=True)
class Done:
    """What became of a step.

    Attributes:
        detail: why it was skipped, or what ended it.
        status: of its process; None where it did not end by itself.
        files: names of its output, in the results' folder.
    """

    step: Step
    state: State
    detail: str = ""
    status: int | None = None
    seconds: float = 0.0
    limit_s: float = 0.0
    files: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Without the path of this machine's Python, as results are shown to others."""
        step = asdict(self.step)
        step["command"] = self.step.words
        own = {"state": self.state, "detail": self.detail, "status": self.status, "files": self.files}
        return {**step, **own, "seconds": round(self.seconds, 1), "limit_s": round(self.limit_s, 1)}


def limit_for(wants_s: float, wanted_after_s: float, left_s: float) -> float | None:
    """Seconds that a step may take: its share of what is left, but three times what it wants at the most.

    Args:
        wants_s: its own wish.
        wanted_after_s: the wishes of all steps after it.
        left_s: until the budget is spent.

    Returns:
        None: there is no time to begin it.
    """
    if left_s < LEAST_S:
        return None
    share = left_s * wants_s / (wants_s + wanted_after_s)
    # A share too small to start in would be wasted: rather those that come first are made, and the last are not.
    return min(max(min(share, _PATIENCE * wants_s), LEAST_S), left_s)


def run_step(step: Step, folder: Path, limit_s: float) -> Done:
    """Run it, with its standard output in `NAME.out` and its standard error in `NAME.err` of `folder`."""
    mark = secrets.token_hex(16)
    # Started elsewhere than here, and not from the sources' folder: `import dcpcomm` must find what is installed.
    environment = {**os.environ, _MARK: mark, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    status: int | None = None
    with (folder / f"{step.name}.out").open("wb") as out, (folder / f"{step.name}.err").open("wb") as err:
        try:
            process = subprocess.Popen(
                step.command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return Done(step, "failed", f"could not be started: {error}", files=_files(step, folder))
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also where this process is interrupted; and what a step that has ended left behind
            left, stuck = _end(process, mark)
    seconds = time.monotonic() - began
    files = _files(step, folder)
    if status is None:
        detail = f"ended at its limit of {limit_s:.0f} s, with {_counted(left)}" + stuck
        return Done(step, "out of time", detail, None, seconds, limit_s, files)
    behind = f"; it left {_counted(left)} behind, now ended" + stuck if left else ""
    if status:
        why = f"signal {-status}" if status < 0 else f"exit status {status}"
        return Done(step, "failed", why + behind, status, seconds, limit_s, files)
    return Done(step, "passed", behind.removeprefix("; "), status, seconds, limit_s, files)


def _files(step: Step, folder: Path) -> list[str]:
    """What it left, but for empty files."""
    return sorted(path.name for path in folder.glob(f"{step.name}.*") if path.stat().st_size)


def _counted(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


def _end(process: subprocess.Popen[bytes], mark: str) -> tuple[int, str]:
    """End all processes of a step; how many there were, and words about those that would not end."""
    seen: set[int] = set()
    if process.poll() is None:
        seen |= {process.pid, *_marked(mark)}
        process.send_signal(signal.SIGTERM)  # torchrun then ends its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        if process.poll() is None:  # else its number, and its group's, may be another's by now
            os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits in the driver isn't ended by a signal
                process.wait(_GRACE_S)
    deadline = time.monotonic() + _GRACE_S
    while (rest := _marked(mark)) and time.monotonic() < deadline:  # one may start another while it is being ended
        seen |= rest
        for pid in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    stuck = f"; {_counted(len(rest))} would not end, and may still hold a GPU" if rest else ""
    return len(seen), stuck


def _marked(mark: str) -> set[int]:
    """Processes that were started by the step with this mark, or by one that was."""
    wanted = f"{_MARK}={mark}".encode()
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        # It may be gone, be another user's, or have ended and only wait to be counted: then nothing can be read.
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    return found
