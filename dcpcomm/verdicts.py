"""Soaks remembered: which transports have proven themselves on this machine, with these libraries.

One file per verdict, in `DCPCOMM_CACHE_DIR` (default `~/.cache/dcpcomm`). A verdict counts for exactly the machine,
group size, code and versions that it was found with, and only where every rank of a group holds it.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import time
from typing import TYPE_CHECKING

import torch

import dcpcomm
from dcpcomm.cachefolder import cache_dir, write_whole
from dcpcomm.transport import MergeTransport

if TYPE_CHECKING:
    from dcpcomm.group import Group

__all__ = ["holds", "key_of", "remember"]


def key_of(transport: MergeTransport, group: Group) -> str:
    """A name for (transport, its source, machine, GPUs, group size, torch): whatever may change a verdict."""
    try:
        source = inspect.getsource(inspect.getmodule(type(transport)) or type(transport))
    except (OSError, TypeError):
        source = repr(type(transport))
    facts = [dcpcomm.__version__, transport.name, source, str(transport.options), sorted(set(group.hosts)), group.size]
    facts += [torch.__version__, torch.version.cuda, transport.capabilities.soak_bytes, *transport.proof_facts()]
    if torch.cuda.is_available():
        facts += [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def holds(key: str) -> bool:
    """Whether this machine remembers a soak that found nothing wrong."""
    file = cache_dir() / "soaks" / f"{key}.json"
    try:
        return file.stat().st_uid == os.getuid() and json.loads(file.read_text(encoding="utf-8"))["proven"] == key
    except (OSError, ValueError, KeyError, TypeError):
        return False


def remember(key: str) -> None:
    """Remember a soak; where the cache can't be written, it is simply run again next time."""
    with contextlib.suppress(OSError):
        write_whole(cache_dir() / "soaks" / f"{key}.json", json.dumps({"proven": key, "at": time.time()}))
