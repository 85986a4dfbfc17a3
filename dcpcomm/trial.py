"""Connect and verify in child processes first, for transports that may hang past rescue.

A rank that hangs inside a library's collective set-up can't be rescued in its own process. So each rank starts one
child (a plain subprocess: engine workers are daemons, which may not have multiprocessing children); the children
connect and verify among themselves; at the deadline all are killed together, and the parents go on with the verdict.

    python -m dcpcomm.trial        the child: a pickled `_Task` on standard input, a JSON verdict as the last line of
    its output
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dcpcomm.decision import Fallen
from dcpcomm.group import Group
from dcpcomm.transport import MergeShape, MergeTransport

if TYPE_CHECKING:
    from dcpcomm.config import MergeConfig

__all__ = ["try_in_children"]

_START_S = 60.0  # for a child to import torch and the transport, before the clock of the trial starts


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
    shape: MergeShape
    config: MergeConfig
    device: str
    parent: int


def try_in_children(group: Group, shape: MergeShape, config: MergeConfig, cls: type[MergeTransport]) -> Fallen | None:
    """None where all children connected and verified `cls`; else where it fell first. Collective over `group`."""
    name = cls.name
    one_host = len(set(group.hosts)) == 1
    store = None
    posted = b""
    if group.rank == 0:
        # A store of its own: the group's may live in this process alone, or hold keys that a killed child left half
        # done.
        store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_START_S))
        address = "127.0.0.1" if one_host else socket.getfqdn()
        posted = f"{address} {store.port}".encode()
    met = group.control.exchange(posted, config.verify.deadline_s, f"preparing a trial of {name!r}")[0].decode()
    address, port = met.split()
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    target = f"{cls.__module__}:{cls.__qualname__}"
    task = _Task(
        name, target, group.rank, group.size, address, int(port), group.hosts, shape, config, device, os.getpid()
    )
    ok, reason = _run_child(task, config.verify.deadline_s + _START_S)
    patience = config.verify.deadline_s + _START_S
    outcomes = group.control.agree(ok, reason, patience, f"trying transport {name!r} in child processes")
    failed = [(rank, outcome.reason) for rank, outcome in enumerate(outcomes) if not outcome.ok]
    if not failed:
        return None
    rank, reason = next((one for one in failed if "wrong bits" in one[1]), failed[0])
    stage, _, said = reason.partition(": ")
    wrong = "wrong bits" in said
    return Fallen(stage, rank, f"in a child process: {said}", "don't use it on this machine" if wrong else "", wrong)


def _run_child(task: _Task, limit_s: float) -> tuple[bool, str]:
    """(ok, "stage: reason") of this rank's child, which is gone when this returns."""
    child = subprocess.Popen(
        [sys.executable, "-m", "dcpcomm.trial"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        said, errors = child.communicate(pickle.dumps(task), timeout=limit_s)
    except subprocess.TimeoutExpired:
        return False, f"connect: hung, and was killed after {limit_s:g} s (could not verify)"
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
    try:
        verdict = json.loads(said.decode().strip().splitlines()[-1])
        return bool(verdict["ok"]), str(verdict["reason"])
    except (IndexError, ValueError, KeyError):
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        return False, f"connect: the child ended with status {child.returncode}: {last[0]} (could not verify)"


def _child(task: _Task) -> tuple[bool, str]:
    from dcpcomm.registry import register_transport, registered_transports, try_load
    from dcpcomm.select import connect_transport
    from dcpcomm.verify import verify_transport
    from dcpcomm.workspace import Workspace

    if task.name not in registered_transports():
        register_transport(task.name, task.target)
    cls, verdict = try_load(task.name)
    if cls is None:
        return False, f"import: {verdict.reason}"
    if task.device != "cpu":
        torch.cuda.set_device(task.device)
    store = dist.TCPStore(task.address, task.port, is_master=False, wait_for_workers=False)
    group = Group(store, task.rank, task.size)
    group.hosts = task.hosts
    group.timeout_s = task.config.verify.deadline_s
    # Imports and compilation are over: now all children meet, and from here the clock runs.
    group.control.exchange(b"", _START_S, "starting the trial")
    transport = connect_transport(group, task.shape, task.config, cls)
    if isinstance(transport, Fallen):
        return False, f"{transport.stage}: {transport.reason}"
    workspace = Workspace(task.shape, task.size, torch.device(task.device))
    fallen = verify_transport(transport, group, task.shape, task.config.verify, workspace)
    transport.close()
    return (True, "") if fallen is None else (False, f"{fallen.stage}: {fallen.reason}")


def main() -> None:
    """The life of a child."""
    task: _Task = pickle.loads(sys.stdin.buffer.read())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the parent, whatever ends it
    if os.getppid() != task.parent:
        return
    started = time.monotonic()
    try:
        ok, reason = _child(task)
    except Exception as error:  # whatever a plug-in raises is its reason
        ok, reason = False, f"connect: {type(error).__name__}: {error} (after {time.monotonic() - started:.1f} s)"
    print("\n" + json.dumps({"ok": ok, "reason": reason}), flush=True)


if __name__ == "__main__":
    main()
