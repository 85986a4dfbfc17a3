"""Where a figure was measured: GPUs, driver, link, versions, commit. What can't be found out is None."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import dcpcomm

__all__ = ["commit", "facts", "link_in", "machine", "processor", "versions"]


def machine(gpus: list[str]) -> dict[str, Any]:
    """For JSON.

    Args:
        gpus: name of each rank's GPU; none on CPU.
    """
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    topology = _output("nvidia-smi", "topo", "-m")
    return {
        "gpus": gpus,
        "driver": driver.splitlines()[0].strip() if driver else None,
        "link": link_in(topology) if topology else None,
        "cpu": processor(),
        "host_cores": os.cpu_count(),
        "kernel": platform.release(),
    }


def facts(module: str, gpus: list[str], of_commit: str | None) -> dict[str, Any]:
    """What a result of `python -m MODULE` begins with: command, time, commit, machine and versions."""
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": of_commit or commit(),
        "machine": machine(gpus),
        "versions": versions(),
    }


def versions() -> dict[str, Any]:
    """For JSON."""
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() and torch.distributed.is_nccl_available() else None
    return {
        "dcpcomm": dcpcomm.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "python": platform.python_version(),
    }


def processor() -> str:
    """The CPU's name, as Linux has it."""
    with contextlib.suppress(OSError):
        named = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        if named:
            return named[1].strip()
    return platform.processor() or platform.machine()


def link_in(topology: str) -> str | None:
    """Between the first two GPUs, from what `nvidia-smi topo -m` prints: "NV18", "PIX", "SYS", ..."""
    row = re.search(r"^GPU0\s+X\s+(\w+)", re.sub(r"\x1b\[[\d;]*m", "", topology), re.MULTILINE)
    # With one GPU the column behind it is that of CPU affinity, or a network card's.
    return row[1] if row and re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", row[1]) and "GPU1" in topology else None


def commit() -> str | None:
    """The commit of the sources that run, with a "+" where they differ from it."""
    folder = str(Path(dcpcomm.__file__).resolve().parent)
    name = _output("git", "-C", folder, "rev-parse", "HEAD")
    if not name:
        return None
    return name.strip() + ("+" if _output("git", "-C", folder, "status", "--porcelain", "-uno") else "")


def _output(*command: str) -> str | None:
    """What a command prints; None where it isn't there or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
