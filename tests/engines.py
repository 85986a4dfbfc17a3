"""What stands in for an engine: its group objects, its micro-batch threads, and its package with modules that bind
each other's functions.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from dcpcomm import adapters
from tests.world import config_for, meet, rank_of, size_of


class Coordinator:
    """What vLLM's and SGLang's group coordinators have in common. It can't be hashed, as some objects can't."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, group: Any) -> None:
        group = getattr(group, "device_group", group)
        self.rank_in_group, self.world_size = rank_of(group), size_of(group)
        self.device_group = self.cpu_group = group
        if not isinstance(group, dist.ProcessGroup):  # a rank of a loopback world: what makes it one
            self.loopback_store, self.world, self.rank, self.size = (
                group.loopback_store, group.world, group.rank, group.size
            )  # fmt: skip


@contextlib.contextmanager
def adapted(group: Any, **stated: Any) -> Iterator[Coordinator]:
    """The adapters, configured for the transport under test; ranks that are threads share what is configured."""
    coordinator = Coordinator(group)
    meet()
    adapters.configure(**{"max_tokens": 32, "config": config_for(group), **stated})
    meet()
    try:
        yield coordinator
        meet()
    finally:
        adapters.close_all(coordinator)
        adapters.configure(**dict.fromkeys(("max_tokens", "channels", "require_graph", "config")))


UBATCHING = ModuleType("vllm.v1.worker.ubatching")
_ids: dict[int, int] = {}


def _current() -> int:
    return _ids[threading.get_ident()] if _ids else 0


UBATCHING.dbo_current_ubatch_id = _current  # type: ignore[attr-defined]


@contextlib.contextmanager
def micro_batches() -> Iterator[None]:
    """vLLM's module of micro-batches is loaded, on all ranks from before to after the block."""
    sys.modules[UBATCHING.__name__] = UBATCHING
    meet()
    try:
        yield
        meet()
    finally:
        sys.modules.pop(UBATCHING.__name__, None)


@contextlib.contextmanager
def micro_batch(number: int) -> Iterator[None]:
    """This thread computes that one."""
    _ids[threading.get_ident()] = number
    try:
        yield
    finally:
        del _ids[threading.get_ident()]


class Package:
    """Source files of a package that comes before any other of its name, until `remove`."""

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        (self.name,) = {name.split(".")[0] for name in files}
        self._folder = folder
        self._before = self._take()
        for name, source in files.items():
            path = folder.joinpath(*name.split("."))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".py").write_text(source)
            for parent in path.parents:
                if parent == folder:
                    break
                parent.joinpath("__init__.py").touch()
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()

    def load(self, name: str) -> Any:
        return importlib.import_module(name)

    def remove(self) -> None:
        self._take()
        sys.path.remove(str(self._folder))
        sys.modules.update(self._before)
        importlib.invalidate_caches()

    def _take(self) -> dict[str, ModuleType]:
        loaded = [name for name in sys.modules if name.split(".")[0] == self.name]
        return {name: sys.modules.pop(name) for name in loaded}
