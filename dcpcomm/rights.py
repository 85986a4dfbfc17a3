"""What this container lets processes do for each other: shared memory, descriptors, tracing. Tried, not looked up."""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Right", "rights"]

_SHM = Path("/dev/shm")
_LITTLE_SHM = 64 << 20
_PIDFD_GETFD = 438
#: What a sibling would do: take a descriptor of a process that is none of its children.
_TAKE = f"""
import ctypes, os, sys
pidfd = os.pidfd_open(os.getppid())
taken = ctypes.CDLL(None, use_errno=True).syscall({_PIDFD_GETFD}, pidfd, int(sys.argv[1]), 0)
print(os.strerror(ctypes.get_errno()) if taken < 0 else "")
"""


@dataclass(frozen=True)
class Right:
    """One thing that a process may do here, or not.

    Attributes:
        ok: None where it could not be tried.
        said: what was seen.
        remedy: what would change it.
        needed_by: what is impossible, or slow, without it.
    """

    name: str
    ok: bool | None
    said: str
    remedy: str = ""
    needed_by: str = ""


def rights() -> list[Right]:
    """All of them. Takes some tens of milliseconds: one is tried from another process."""
    return [_container(), _shared_memory(), _descriptors(), _tracing(), _locked_memory()]


def _container() -> Right:
    marks = [mark for mark in ("/.dockerenv", "/run/.containerenv") if os.path.exists(mark)]
    seccomp = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("Seccomp:"):
                mode = line.split()[1]
                seccomp = {"0": "no seccomp filter", "1": "strict seccomp", "2": "a seccomp filter"}.get(mode, mode)
    return Right("container", True, ", ".join([*(marks or ["no mark of one"]), *([seccomp] if seccomp else [])]))


def _shared_memory() -> Right:
    needed = "NCCL and Gloo between processes of one host"
    if not _SHM.is_dir():
        return Right("shared memory", False, f"there is no {_SHM}", "mount a tmpfs there", needed)
    try:
        with tempfile.TemporaryFile(dir=_SHM) as file:
            file.write(b"1")
            file.flush()
    except OSError as error:
        return Right("shared memory", False, f"{_SHM}: {error.strerror}", f"make {_SHM} writable", needed)
    usage = shutil.disk_usage(_SHM)
    said = f"{_SHM}: {usage.free >> 20} of {usage.total >> 20} MiB free"
    if usage.free < _LITTLE_SHM:
        return Right("shared memory", False, said, "docker run --shm-size=1g, or --ipc=host", needed)
    return Right("shared memory", True, said, "", needed)


def _descriptors() -> Right:
    needed = "memory handles that are file descriptors (VMM, symmetric memory)"
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        with ours, theirs:
            ours.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))])
            _, passed, _, _ = theirs.recvmsg(1, socket.CMSG_SPACE(4))
            got = array.array("i", passed[0][2][:4])[0] if passed else -1
        if got < 0:
            return Right("descriptors over a socket", False, "none arrived", "allow SCM_RIGHTS", needed)
        os.close(got)
    except (OSError, AttributeError) as error:
        return Right("descriptors over a socket", False, str(error), "allow SCM_RIGHTS over unix sockets", needed)
    return Right("descriptors over a socket", True, "passed", "", needed)


def _tracing() -> Right:
    name, needed = "ptrace, pidfd_getfd", "libraries that take descriptors from a peer instead of being sent them"
    scope = ""
    with contextlib.suppress(OSError):
        scope = f" (yama ptrace_scope {Path('/proc/sys/kernel/yama/ptrace_scope').read_text().strip()})"
    try:
        with open(os.devnull) as file:
            command = [sys.executable, "-I", "-S", "-c", _TAKE, str(file.fileno())]
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Right(name, None, f"could not be tried: {error}{scope}", "", needed)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["?"])[-1]
        return Right(name, None, f"could not be tried: {said}{scope}", "", needed)
    refused = done.stdout.strip()
    if refused:
        return Right(name, False, f"refused to a sibling: {refused}{scope}", "docker run --cap-add=SYS_PTRACE", needed)
    return Right(name, True, f"allowed to a sibling{scope}", "", needed)


def _locked_memory() -> Right:
    needed = "RDMA between hosts (InfiniBand, RoCE)"
    try:
        import resource
    except ImportError:
        return Right("locked memory", None, "this system has no limits to read", "", needed)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit in (resource.RLIM_INFINITY, ctypes.c_ulong(-1).value):
        return Right("locked memory", True, "unlimited", "", needed)
    return Right("locked memory", False, f"{limit >> 10} KiB", "docker run --ulimit memlock=-1", needed)
