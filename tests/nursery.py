"""Python processes that need not import torch first: forked from one that has.

`Nursery.python` is `subprocess.Popen([sys.executable, ...])` for tests: a process with arguments, an environment, a
folder, a path, warnings and outputs of its own, that ends as Python ends. What is about how a process starts, or about
what it imports, is tested with `subprocess`.

    python tests/nursery.py SOCKET PARENT        the process that the others are forked from
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

_STATUS = struct.Struct("q")


class Python:
    """One process that was begun, and what it prints."""

    def __init__(self, link: socket.socket, command: list[str]) -> None:
        self._link, self._command = link, command
        self._files = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115

    def begin(self, request: list[Any]) -> None:
        socket.send_fds(self._link, [b"."], [file.fileno() for file in self._files])
        with self._link.makefile("w") as stream:
            stream.write(json.dumps(request) + "\n")
        self._pid = self._number()

    def wait(self, timeout: float = 100.0) -> subprocess.CompletedProcess[str]:
        """Its status and outputs; past `timeout` it is ended, and subprocess.TimeoutExpired raised."""
        self._link.settimeout(timeout)
        try:
            status = self._number()
        except TimeoutError:
            self._link.settimeout(10)
            os.kill(self._pid, signal.SIGKILL)  # not yet waited for: whoever does that tells us first
            self._number()
            raise subprocess.TimeoutExpired(self._command, timeout) from None
        finally:
            self._link.close()
        printed = []
        for file in self._files:
            with file:
                file.seek(0)
                printed.append(file.read().decode())
        return subprocess.CompletedProcess(self._command, status, *printed)

    def _number(self) -> int:
        data = self._link.recv(_STATUS.size, socket.MSG_WAITALL)
        return int(_STATUS.unpack(data)[0])


class Nursery:
    """The process that has imported torch; started when first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="nursery")
        self._address = str(Path(self._folder.name) / "s")

    def python(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        folder: Path | None = None,
        warned: str | None = None,
    ) -> Python:
        """Begin `python -W WARNED ARGUMENTS`, with -c or -m, or with a script's path first."""
        if self._process is None:
            self._start()
        link = socket.socket(socket.AF_UNIX)
        link.connect(self._address)
        begun = Python(link, [sys.executable, *arguments])
        given = dict(os.environ) if environment is None else environment
        begun.begin([arguments, given, str(folder or Path.cwd()), warned])
        return begun

    def _start(self) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("DCPCOMM_", "PYTHONPATH"))}
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._address, str(os.getpid())],
            env={**kept, "OMP_NUM_THREADS": "1"},  # matrices as small as those of tests only wait for more threads
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            cwd=self._folder.name,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._folder.cleanup()


# ---------------------------------------------------------------- the process that forks, and what it forks


def die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve(address: str, parent: str) -> list[Any]:
    """Fork a process for each request. Returns in that process. Ends with `parent`, however that ends."""
    die_with(int(parent))
    import torch

    import dcpcomm.merger

    assert torch.distributed.is_available()
    assert dcpcomm.merger
    gc.freeze()  # or each process copies what all share when it ends
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a keeper ended
    me = os.getpid()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(8)
        os.write(1, b"ready\n")
        while True:
            link = listener.accept()[0]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # from Python 3.12 on: torch has threads, which a forked one lacks
                child = os.fork()
            if child == 0:
                die_with(me)
                break
            link.close()
    return keep(link)


def keep(link: socket.socket) -> list[Any]:
    """Fork the process that was asked for, and tell how it ended. Returns in that process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, outputs, *_ = socket.recv_fds(link, 1, 2)
    with link.makefile() as stream:
        request: list[Any] = json.loads(stream.readline())
    me = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid != 0:
        link.sendall(_STATUS.pack(pid))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        link.sendall(_STATUS.pack(status))
        os._exit(0)
    die_with(me)
    link.close()
    for fd, output in enumerate(outputs, 1):
        os.dup2(output, fd)
        os.close(output)
    return request


def become(arguments: list[str], environment: dict[str, str], folder: str, warned: str | None) -> None:
    """Run in this process what a new `python` would."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:1] = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    importlib.invalidate_caches()
    if warned is not None:
        sys.warnoptions[:] = [warned]
        warnings.simplefilter(warned)  # type: ignore[arg-type]
    first, *rest = arguments
    if first == "-m":
        sys.path.insert(0, folder)
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path.insert(0, str(Path(first).resolve().parent))
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    become(*serve(*sys.argv[1:]))
