"""`cupy_ipc`: each rank's memory opened by the others through CUDA IPC, by CuPy's runtime. GPUs of one host."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import time
from typing import Any, ClassVar

import torch

from dcpcomm import topology
from dcpcomm.combine.peer_options import PeerOptions
from dcpcomm.errors import TransportUnavailable
from dcpcomm.log import log
from dcpcomm.topology import Facts
from dcpcomm.transport import Capabilities, MergeShape, PeerBuffers, PeerMemoryTransport, Verdict

__all__ = ["LAZY_PEER_ACCESS", "CupyIpc", "runtime", "tensor_at"]

_GRANULE = 2 << 20  # of cudaMalloc: a handle opens whole ones
LAZY_PEER_ACCESS = 1
_PATIENCE_S = 2.0


class CupyIpc(PeerMemoryTransport):
    """One allocation per merger, which every peer maps."""

    name: ClassVar[str] = "cupy_ipc"
    #: Of ranks that share a GPU the conformance suite was run; of GPUs side by side not yet.
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cuda",), graph_capturable=True, ragged=True, proven_on=("one sm_90 for all ranks",)
    )
    Options = PeerOptions

    _address = 0
    _offered = False
    _opened: tuple[int, ...] = ()
    _buffers: PeerBuffers | None = None

    @classmethod
    def check(cls, facts: Facts) -> Verdict:
        if facts.place == "loopback":
            return Verdict(
                False, "the ranks are threads of one process, which can't open its own handles", "use loopback_peer"
            )
        try:
            runtime()
        except Exception as error:  # CuPy's loader raises errors of packages that may not be there to be named
            return Verdict(False, f"CuPy can't be imported: {error}", "pip install 'dcpcomm[cu12]' or 'dcpcomm[cu13]'")
        return super().check(facts)

    @classmethod
    def device_bytes(cls, shape: MergeShape, world_size: int, options: Any) -> int:
        return -(-super().device_bytes(shape, world_size, options) // _GRANULE) * _GRANULE

    def prepare(self) -> bytes:
        device, cuda = self.group.device, runtime()
        with topology.on_device(device):
            cuda.setDevice(device.index)
            # Not torch's memory: a handle opens a whole allocation, with whatever else torch has put there.
            self._address = int(cuda.malloc(self.peer_bytes))
            self._own = tensor_at(self._address, self.peer_bytes, device)
            self._own.zero_()
            torch.cuda.current_stream(device).synchronize()
            handle = bytes(cuda.ipcGetMemHandle(self._address))
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return json.dumps({"handle": handle.hex(), "gpu": uuid, "pid": os.getpid(), "bytes": self.peer_bytes}).encode()

    def connect(self, peers: list[bytes]) -> None:
        told, rank, cuda = [json.loads(card) for card in peers], self.group.rank, runtime()
        self._offered = True
        addresses = [0] * len(told)
        addresses[rank] = self._address
        with topology.on_device(self.group.device):
            cuda.setDevice(self.group.device.index)
            for other in self.group.peers:
                try:
                    opened = int(cuda.ipcOpenMemHandle(bytes.fromhex(told[other]["handle"]), LAZY_PEER_ACCESS))
                except Exception as error:  # CuPy's own kind, which may not be there to be named
                    raise TransportUnavailable(
                        f"rank {rank} on GPU {told[rank]['gpu']} can't open the memory of rank {other} on GPU "
                        f"{told[other]['gpu']}: {error}; is there peer access between them (`nvidia-smi topo -p2p rw`)"
                        ", and are both visible to this process (CUDA_VISIBLE_DEVICES)?"
                    ) from error
                addresses[other] = opened
                self._opened += (opened,)
        sharing = sum(one["gpu"] == told[rank]["gpu"] for one in told)
        self._buffers = PeerBuffers(self._own, addresses, sharing)

    def map_symmetric(self, nbytes: int) -> PeerBuffers:
        assert self._buffers is not None
        return self._buffers

    def close(self) -> None:
        """Importers close before the exporter frees: what a peer still has open is leaked, and said."""
        if not self._address:
            return
        address, self._address = self._address, 0
        given_up = self._engine is not None and self._engine.given_up
        opened, self._opened, self._engine, self._buffers = self._opened, (), None, None
        with topology.on_device(self.group.device):
            for one in opened:
                with contextlib.suppress(Exception):  # of a peer that is gone
                    runtime().ipcCloseMemHandle(one)
            key = f"ipc closed/{self.group.generation}"
            self.group.control.note(key, "closed")
            waiting = self._still_open(key) if self._offered else ()
            if given_up or waiting:
                # A peer that was late stores there when it comes; freed, it would be somebody else's memory.
                who = f"rank {', '.join(map(str, waiting))} has it open" if waiting else "a peer did not come in time"
                log.warning(
                    "rank %d: %d bytes are left to the process's end: %s", self.group.rank, self.peer_bytes, who
                )
                return
            runtime().free(address)

    def _still_open(self, key: str) -> tuple[int, ...]:
        """The peers that have not closed their end in time."""
        deadline = time.monotonic() + _PATIENCE_S
        waiting = tuple(self.group.peers)
        while waiting:
            waiting = tuple(peer for peer in waiting if not self.group.control.read_note(peer, key))
            if waiting and time.monotonic() > deadline:
                break
            time.sleep(0.002 if waiting else 0)
        return waiting


def runtime() -> Any:
    """CuPy's binding of the CUDA runtime, without the rest of CuPy."""
    return importlib.import_module("cupy_backends.cuda.api.runtime")


def tensor_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 `[nbytes]`: memory on `device` that torch did not allocate. Whoever did keeps it alive.

    Raises:
        TransportUnavailable: torch makes a copy of it, which nobody else would see.
    """
    with torch.inference_mode(False):  # or it could not be written outside of inference mode
        found = torch.as_tensor(_Region(address, nbytes), device=device)  # told no device, it copies to the CPU
    if found.data_ptr() != address:
        raise TransportUnavailable(
            f"torch {torch.__version__} copies the memory at {address:#x} to {found.device} instead of using it: it "
            f"does not take it for memory of {device}"
        )
    return found


class _Region:
    """Memory in the form that torch takes as a tensor."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip
