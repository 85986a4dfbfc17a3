"""FlashInfer as `flashinfer_helix` needs it: imported and compiled, or the reason; and met over dcpcomm's own store."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import time
from typing import Any

import torch

from dcpcomm.errors import TransportTimeout, TransportUnavailable
from dcpcomm.group import Group
from dcpcomm.log import log
from dcpcomm.transport import Verdict

__all__ = ["StoreComm", "gpu_card", "installed", "library", "loaded", "takes_out", "version"]

EXTRAS = "pip install 'dcpcomm[cu12]' or 'dcpcomm[cu13]'"
_CALLS = (
    "decode_cp_a2a_workspace_size",
    "decode_cp_a2a_allocate_mnnvl_workspace",
    "decode_cp_a2a_init_workspace",
    "decode_cp_a2a_alltoall",
)
#: What an error of FlashInfer's compilation says, and what to do about it; the first that fits.
_REMEDIES = (
    (("ninja", "No such file"), "pip install ninja"),
    (("nvcc",), "install nvcc of the CUDA toolkit that torch was built for, and say where by CUDA_HOME"),
    (("JIT",), "unset FLASHINFER_DISABLE_JIT, or install flashinfer-jit-cache of FlashInfer's version"),
    (("architecture",), "use it on sm_90 or later; FLASHINFER_CUDA_ARCH_LIST, if set, must name this GPU's"),
    (("Permission",), "say where it may write by FLASHINFER_WORKSPACE_BASE"),
)
_OTHERWISE = "see the compiler's words in the log (DCPCOMM_LOG=info); do nvcc and torch have the same CUDA?"
_LONGEST = 300


def library(package: str) -> Any:
    """The module with FlashInfer's collectives. `package`: "flashinfer", or what stands in for it."""
    return importlib.import_module(f"{package}.comm")


def installed(package: str) -> bool:
    """Whether it is there to be imported. Doesn't import it."""
    return importlib.util.find_spec(package) is not None


def version(package: str) -> str:
    """FlashInfer's own."""
    return str(getattr(importlib.import_module(package), "__version__", "unknown"))


def takes_out(call: Any) -> bool:
    """Whether `decode_cp_a2a_alltoall` writes where it is told to; older ones return memory of their own."""
    return "out" in inspect.signature(call).parameters


def loaded(package: str, world_size: int) -> Verdict:
    """Import FlashInfer and have it compile its exchange; minutes the first time, then from its cache."""
    try:
        comm = library(package)
    except Exception as error:  # its imports end in drivers and bindings, which raise whatever they like
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        return Verdict(
            False,
            f"importing FlashInfer raised {_said(error)}",
            f"pip install what provides {missing!r}; {EXTRAS} brings all of it" if missing else EXTRAS,
        )
    lacking = [name for name in _CALLS if not hasattr(comm, name)]
    if lacking:
        return Verdict(
            False,
            f"FlashInfer {version(package)} has no {lacking[0]}",
            "install a later flashinfer-python; 0.7.4 is what was tried",
        )
    try:
        comm.decode_cp_a2a_workspace_size(world_size)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        log.info("FlashInfer %s can't compile its exchange: %s", version(package), said)
        remedy = next((remedy for words, remedy in _REMEDIES if all(word in said for word in words)), _OTHERWISE)
        return Verdict(False, f"FlashInfer {version(package)} can't compile its exchange here: {_said(error)}", remedy)
    return Verdict(True)


def _said(error: Exception) -> str:
    """The error in one line that a table can take."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


class StoreComm:
    """What FlashInfer calls a communication backend, over the store of one group: no process group is needed, every
    step has a deadline, and a rank that fails is named to the others instead of being waited for.

    Args:
        deadline_s: for all steps together, from now on.
    """

    def __init__(self, group: Group, purpose: str, deadline_s: float) -> None:
        self._store = group.store(purpose)
        self._rank, self._size = group.rank, group.size
        self._limit, self._ends = deadline_s, time.monotonic() + deadline_s
        self._step = 0

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def allgather(self, data: Any) -> tuple[Any, ...]:
        """Every rank's `data`, by rank: numbers, text, bytes, None, and tuples of them.

        Raises:
            TransportTimeout: naming the ranks that did not arrive.
            TransportUnavailable: a rank called `fail`; naming it and its reason.
        """
        step, self._step = self._step, self._step + 1
        # As text of literals: what is read from a store that others can write to must not be able to run.
        self._store.set(f"{step}/{self._rank}", repr(data))
        others = [rank for rank in range(self._size) if rank != self._rank]
        pause = 0.0005
        while others := [rank for rank in others if not self._store.check([f"{step}/{rank}"])]:
            if self._store.check(["failed"]):
                rank, reason = json.loads(self._store.get("failed"))
                raise TransportUnavailable(f"rank {rank} could not set FlashInfer up: {reason}")
            if time.monotonic() > self._ends:
                listed = ", ".join(map(str, others))
                raise TransportTimeout(
                    f"rank {listed} did not arrive within {self._limit:g} s at step {step} of FlashInfer's set-up",
                    tuple(others),
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        return tuple(ast.literal_eval(self._store.get(f"{step}/{rank}").decode()) for rank in range(self._size))

    def bcast(self, data: Any, root: int) -> Any:
        """The `data` of rank `root`."""
        return self.allgather(data if self._rank == root else None)[root]

    def barrier(self) -> None:
        """Return when all ranks have come."""
        self.allgather(None)

    def Split(self, color: int, key: int) -> StoreComm:
        """This very group, in this very order: there is no other that a workspace could span."""
        told = self.allgather((color, key))
        if told != tuple((color, rank) for rank in range(self._size)):
            raise TransportUnavailable(
                f"FlashInfer split {self._size} ranks into {sorted(set(told))}; expected one group in rank order"
            )
        return self

    def fail(self, error: Exception) -> None:
        """Have the others raise, too, instead of waiting for this rank."""
        self._store.set("failed", json.dumps([self._rank, f"{type(error).__name__}: {error}"[:_LONGEST]]))


def gpu_card(device: torch.device) -> dict[str, Any]:
    """What ranks must know of each other's GPU."""
    if device.type != "cuda":
        return {"gpu": str(device), "processors": 0}
    found = torch.cuda.get_device_properties(device)
    return {"gpu": str(found.uuid), "processors": found.multi_processor_count}
