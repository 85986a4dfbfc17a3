"""Connect and verify in child processes first, for transports that may hang past rescue.

A rank that hangs inside a library's collective set-up can't be rescued in its own process. So each rank starts one
child (a plain subprocess: engine workers are daemons, which may not have multiprocessing children); the children
connect and verify among themselves; at the deadline all are killed together, and the parents go on with the verdict.

    python -m dcpcomm.trial        the child: a pickled `_Task` on standard input, a JSON verdict as the last line of
    its output
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dcpcomm.decision import Fallen
from dcpcomm.group import Group
from dcpcomm.topology import local_facts
from dcpcomm.transport import MergeShape, MergeTransport

if TYPE_CHECKING:
    from dcpcomm.config import MergeConfig

__all__ = ["try_in_children"]

_GRACE_S = 2.0  # for a verdict that was reached at the deadline to get through
_START_S = 60.0  # for a child to import torch and the transport, before the clock of the trial starts
#: Trials of this process that went well. Of what can tear a message none is kept: each shape is another case.
_went_well: set[str] = set()


@dataclass(frozen=True)
class _Task:
    """What a child needs to take its parent's place."""

    name: str
    target: str
    rank: int
    size: int
    address: str
    port: int
    hosts: list[str]
    places: list[str]
    shape: MergeShape
    config: MergeConfig
    device: str
    parent: int


@dataclass(frozen=True)
class _Ending:
    """How one child ended: with what it agreed on with the others (None: nothing was wrong), or `lost`, and how."""

    fallen: Fallen | None = None
    lost: str = ""

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> _Ending:
        return cls(Fallen(**value["fallen"]) if value["fallen"] else None, value["lost"])


def try_in_children(
    group: Group, shape: MergeShape, config: MergeConfig, cls: type[MergeTransport], device: torch.device
) -> Fallen | None:
    """None where all children connected and verified `cls`, now or for an earlier merger of these processes; else where
    it fell first. Collective over `group`.
    """
    name = cls.name
    one_host = len(set(group.hosts)) == 1
    store = None
    posted = b""
    if group.rank == 0:
        # A store of its own: the group's may live in this process alone, or hold keys that a killed child left half
        # done.
        store = dist.TCPStore(
            "127.0.0.1" if one_host else "0.0.0.0",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_START_S),
        )
        address = "127.0.0.1" if one_host else socket.getfqdn()
        posted = f"{address} {store.port}".encode()
    target = f"{cls.__module__}:{cls.__qualname__}"
    options = str(config.options.get(name))
    key = json.dumps([target, options, group.rank, group.hosts, group.places, str(device)])
    known = b"known " if key in _went_well and not cls.capabilities.soak_bytes else b"new "
    met = group.control.exchange(known + posted, config.verify.deadline_s, f"preparing a trial of {name!r}")
    if all(one.startswith(b"known ") for one in met):
        return None
    _, address, port = met[0].decode().split()
    # Halved: connecting and verifying each get their share of the deadline, at whose end the child is killed.
    half = config.verify.model_copy(update={"deadline_s": config.verify.deadline_s / 2})
    config_of_child = config.model_copy(update={"verify": half})
    task = _Task(
        name,
        target,
        group.rank,
        group.size,
        address,
        int(port),
        group.hosts,
        group.places,
        shape,
        config_of_child,
        str(device),
        os.getpid(),
    )
    ending = _run_child(task, config.verify.deadline_s + _GRACE_S)
    # A parent whose child fell at once waits for one whose child is still starting.
    patience = config.verify.deadline_s + _START_S
    posted_ending = json.dumps(asdict(ending)).encode()
    endings = group.control.exchange(posted_ending, patience, f"trying transport {name!r} in child processes")
    fallen = _culprit([_Ending.from_dict(json.loads(one)) for one in endings])
    if fallen is None:
        _went_well.add(key)
    return fallen


def _culprit(endings: list[_Ending]) -> Fallen | None:
    """The verdict on all children. A rank that hung or died explains what the others say of having waited for it."""
    fallen = [ending.fallen for ending in endings if ending.fallen is not None]
    wrong = [one for one in fallen if one.wrong]
    lost = [(rank, ending.lost) for rank, ending in enumerate(endings) if ending.lost]
    if wrong or (fallen and not lost):
        chosen = (wrong or fallen)[0]
        return replace(chosen, reason=f"in a child process: {chosen.reason}")
    if not lost:
        return None
    ranks = ", ".join(str(rank) for rank, _ in lost)
    return Fallen("connect", lost[0][0], f"the child process of rank {ranks} {lost[0][1]} (could not verify)")


def _run_child(task: _Task, deadline_s: float) -> _Ending:
    """How this rank's child ended; it is gone when this returns.

    The child says "ready" when all children have imported and met; from then on it has `deadline_s`.
    """
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "dcpcomm.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it ended already: its status says why
                child.stdin.write(pickle.dumps(task))
                child.stdin.close()
            lines = _Lines(child.stdout)
            if not lines.until(b"ready", _START_S) and not lines.ended:
                return _Ending(lost=f"was not ready within {_START_S:g} s")
            if not lines.until(b"verdict ", deadline_s) and not lines.ended:
                return _Ending(lost=f"hung, and was killed after {deadline_s:g} s")
        finally:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            child.stdin.close()
            child.stdout.close()
        if lines.last.startswith(b"verdict "):
            verdict = json.loads(lines.last.removeprefix(b"verdict "))
            return _Ending(fallen=Fallen(**verdict) if verdict is not None else None)
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        return _Ending(lost=f"ended with status {child.returncode}: {said[0]}")


class _Lines:
    """Lines of a pipe, awaited with a deadline."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._fd = pipe.fileno()
        self._rest = b""
        self.last = b""
        self.ended = False

    def until(self, start: bytes, limit_s: float) -> bool:
        """Whether a line that begins with `start` came within `limit_s`; it is then `last`."""
        deadline = time.monotonic() + limit_s
        while True:
            while b"\n" in self._rest:
                self.last, self._rest = self._rest.split(b"\n", 1)
                if self.last.startswith(start):
                    return True
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._fd], [], [], left)[0]:
                return False
            read = os.read(self._fd, 1 << 16)
            if not read:
                self.ended = True
                return False
            self._rest += read


def _child(task: _Task) -> Fallen | None:
    from dcpcomm.registry import register_transport, registered_transports, try_load
    from dcpcomm.select import connect_transport
    from dcpcomm.verify import owes_a_soak, verify_transport
    from dcpcomm.workspace import Workspace

    if task.name not in registered_transports():
        register_transport(task.name, task.target)
    cls, verdict = try_load(task.name)
    if cls is None:
        return Fallen("import", task.rank, verdict.reason, verdict.remedy)
    if task.device != "cpu":
        torch.cuda.set_device(task.device)
    store = dist.TCPStore(task.address, task.port, is_master=False, wait_for_workers=False)
    group = Group(store, task.rank, task.size)
    group.hosts, group.places, group.device = task.hosts, task.places, torch.device(task.device)
    group.timeout_s = task.config.verify.deadline_s
    verdict = cls.load(local_facts(task.rank, task.size, group.device, False))
    if not verdict.ok:
        return Fallen("import", task.rank, verdict.reason, verdict.remedy)
    # Imports and compilation are over: now all children meet, and from here the clock runs.
    group.control.exchange(b"", _START_S, "starting the trial")
    print("ready", flush=True)
    workspace = Workspace(task.shape, task.size, torch.device(task.device))
    transport = connect_transport(group, task.shape, task.config, cls, workspace)
    if isinstance(transport, Fallen):
        return transport
    fallen = None
    if task.config.verify.level != "off" or owes_a_soak(transport, group):
        fallen = verify_transport(transport, group, task.shape, task.config.verify, workspace)
    transport.close()
    return fallen


def main() -> None:
    """The life of a child."""
    task: _Task = pickle.loads(sys.stdin.buffer.read())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the parent, whatever ends it
    if os.getppid() != task.parent:
        return
    try:
        fallen = _child(task)
    except Exception as error:  # whatever a plug-in raises is its reason
        fallen = Fallen("connect", task.rank, f"{type(error).__name__}: {error}")
    print("\nverdict " + json.dumps(asdict(fallen) if fallen is not None else None), flush=True)


if __name__ == "__main__":
    main()
