"""`nvshmem_put`: one-sided puts over NVSHMEM's symmetric memory. One host or many.

Where every rank reaches every other's memory by loads and stores, the fused kernel merges, as over CUDA IPC (path
"peer"); else packed blocks are put by NVSHMEM, with a signal each (path "put_signal").
"""

from __future__ import annotations

import json
import time
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from pydantic import Field, model_validator

from dcpcomm import topology
from dcpcomm.backends import nvshmem_library
from dcpcomm.backends.cupy_ipc import tensor_at
from dcpcomm.backends.nvshmem_library import NvshmemLibrary
from dcpcomm.combine.fused import fused_bytes
from dcpcomm.combine.peer_options import PeerOptions
from dcpcomm.combine.put_signal import PutSignal, put_bytes
from dcpcomm.errors import TransportUnavailable
from dcpcomm.log import log
from dcpcomm.topology import Facts
from dcpcomm.transport import Capabilities, MergeShape, PeerBuffers, PeerMemoryTransport, Verdict

__all__ = ["NvshmemOptions", "NvshmemPut"]

_PATIENCE_S = 2.0
Path = Literal["peer", "put_signal"]


class NvshmemOptions(PeerOptions):
    """Of `nvshmem_put`; those of the fused kernel are for path "peer"."""

    path: Literal["auto", "peer", "put_signal"] = Field(
        "auto", description="how rows travel; auto: peer where all ranks reach each other's memory, else put_signal"
    )
    trust_pes: bool = Field(
        False,
        description="an NVSHMEM that somebody else started, of as many PEs as the group has ranks, is the group's",
    )

    @model_validator(mode="after")
    def _of_the_path(self) -> NvshmemOptions:
        given = sorted(self.model_fields_set & PeerOptions.model_fields.keys())
        if self.path == "put_signal" and given:
            raise ValueError(f"{', '.join(given)}: of the fused kernel, which path put_signal doesn't use; drop them")
        return self


class NvshmemPut(PeerMemoryTransport):
    """One symmetric allocation per merger."""

    name: ClassVar[str] = "nvshmem_put"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cuda",), multi_host=True, graph_capturable=True, ragged=True, may_hang=True,
        proven_on=("no GPU so far",),
    )  # fmt: skip
    Options = NvshmemOptions

    #: "" until `connect` has ended.
    path: Path | Literal[""] = ""
    _library: NvshmemLibrary
    _address = 0
    _by_network = False
    _closing: Any = None
    _buffers: PeerBuffers | None = None

    @classmethod
    def check(cls, facts: Facts) -> Verdict:
        if facts.place == "loopback":
            return Verdict(
                False, "the ranks are threads of one process, which is one PE to NVSHMEM", "use loopback_peer"
            )
        if facts.device != "cuda":
            return Verdict(False, f"NVSHMEM moves memory of GPUs; the merger is on {facts.device}", "use gloo_a2a")
        return nvshmem_library.installed()

    @classmethod
    def load(cls, facts: Facts) -> Verdict:
        return nvshmem_library.loaded()

    @classmethod
    def device_bytes(cls, shape: MergeShape, world_size: int, options: Any) -> int:
        path = "auto" if options is None else options.path
        peer = fused_bytes(shape, world_size) if path != "put_signal" else 0
        return max(peer, put_bytes(shape, world_size) if path != "peer" else 0)

    @classmethod
    def needs_workspace(cls, on_gpu: bool) -> bool:
        return True  # which path it is shows when the memory is there

    def prepare(self) -> bytes:
        self._library = nvshmem_library.library()
        world = self._library.world()
        properties = torch.cuda.get_device_properties(self.group.device)
        card: dict[str, Any] = {"world": world, "name": self._library.name, "version": self._library.version}
        card |= {"gpu": str(properties.uuid), "uid": ""}
        card["torch ranks"] = dist.get_world_size() if dist.is_initialized() else 0
        if world is None and self.group.rank == 0:
            card["uid"] = self._library.unique_id().hex()
        return json.dumps(card).encode()

    def connect(self, peers: list[bytes]) -> None:
        told, rank, device = [json.loads(card) for card in peers], self.group.rank, self.group.device
        self._closing = self.group.store("nvshmem closing")
        with topology.on_device(device):
            pes = self._join(told)
            try:
                self._address = self._library.allocate(self.peer_bytes)
            except Exception as error:  # what is wrong here only must not keep the others waiting
                self.group.control.fail(f"{type(error).__name__}: {error}")
                raise
            own = tensor_at(self._address, self.peer_bytes, device)
            own.zero_()
            torch.cuda.current_stream(device).synchronize()
            reached = [self._address if other == rank else self._library.reach(self._address, pe)
                       for other, pe in enumerate(pes)]  # fmt: skip
        cut_off = [other for other, address in enumerate(reached) if not address]
        what = "finding out which ranks reach each other's memory"
        posted = self.group.control.exchange(json.dumps(cut_off).encode(), self.group.timeout_s, what)
        unreached: list[list[int]] = [json.loads(one) for one in posted]
        self._pes, self.path, self._by_network = pes, self._path(unreached), any(unreached)
        if self._by_network and self._library.waits_missing:
            raise TransportUnavailable(
                f"rank {rank} shares its GPU with another rank without MPS: NVSHMEM has no waits there, and ends the "
                "process that asks for one, as what comes by a network needs; give each rank a GPU, or start MPS"
            )
        self._buffers = PeerBuffers(own, reached, sum(one["gpu"] == told[rank]["gpu"] for one in told))

    def _join(self, told: list[dict[str, Any]]) -> list[int]:
        """The PE of each rank: of a world that is there, or made here. All ranks see the same cards, and so go the same
        way.
        """
        versions = {one["version"] for one in told}
        if len(versions) > 1:
            listed = ", ".join(f"rank {rank}: {one['version']}" for rank, one in enumerate(told))
            raise TransportUnavailable(f"the ranks have different versions of NVSHMEM ({listed}); install one on all")
        n, out = len(told), [rank for rank, one in enumerate(told) if one["world"] is None]
        if len(out) == n:
            self._library.initialise(bytes.fromhex(told[0]["uid"]), self.group.rank, n)
            return list(range(n))
        if out:
            raise TransportUnavailable(
                f"NVSHMEM is initialised on some ranks of the group, and not on rank {', '.join(map(str, out))}; "
                "initialise it on exactly these ranks, or on none, before the merger is made"
            )
        pes = [one["world"][0] for one in told]
        sizes, names = {one["world"][1] for one in told}, {one["name"] for one in told}
        if sizes != {n} or sorted(pes) != list(range(n)) or len(names) > 1:
            listed = ", ".join(
                f"rank {rank}: PE {one['world'][0]} of {one['world'][1]}" for rank, one in enumerate(told)
            )
            raise TransportUnavailable(
                f"NVSHMEM is initialised in this process for other ranks than this group's ({listed}); it has one "
                "world for each process, and all of it must come to every allocation: expected one whose PEs are "
                "exactly this group"
            )
        # Two of somebody else's may have PEs 0 to N - 1 between them as well: the first allocation would never end.
        trusted = self.options is not None and self.options.trust_pes
        if names == {""} and not trusted and any(one["torch ranks"] != n for one in told):
            raise TransportUnavailable(
                f"somebody else has initialised NVSHMEM, in a world of {told[0]['torch ranks']} ranks of torch: its "
                f"{n} PEs may be others than the {n} ranks of this group, which nothing tells; if they are the same, "
                "say so by options.nvshmem_put.trust_pes: true"
            )
        return pes

    def _path(self, cut_off: list[list[int]]) -> Path:
        """The same on all ranks."""
        asked = "auto" if self.options is None else self.options.path
        pairs = [f"rank {rank} to rank {other}" for rank, others in enumerate(cut_off) for other in others]
        if asked == "peer" and pairs:
            raise TransportUnavailable(
                f"path 'peer' was asked for, and these don't reach each other's memory: {', '.join(pairs)}; "
                "path: auto puts with signals instead"
            )
        return "put_signal" if asked == "put_signal" or pairs else "peer"

    def map_symmetric(self, nbytes: int) -> PeerBuffers:
        assert self._buffers is not None
        return self._buffers

    def attach(self) -> None:
        if self.path == "peer":
            super().attach()
            return
        buffers = self.map_symmetric(self.peer_bytes)
        self._engine = PutSignal(
            self.group, self.shape, buffers.own, self._library, self._kernels(buffers), self._pes,
            settles=self._by_network,
        )  # fmt: skip

    def proof_facts(self) -> list[str]:
        return [f"NVSHMEM {self._library.version}", f"path {self.path}"]

    def close(self) -> None:
        """Freeing is collective: it happens where all ranks close, with nothing on its way; else the memory is left,
        and said to be.
        """
        if not self._address:
            return
        address, self._address = self._address, 0
        given_up = self._engine is not None and self._engine.given_up
        self._engine = self._buffers = self.fused = None
        if self._all_close("late" if given_up else "whole"):
            with topology.on_device(self.group.device):
                self._library.free(address)
            return
        who = "a rank did not come in time" if given_up else "not all ranks close it, or a rank of them waited in vain"
        log.warning(
            "rank %d: %d bytes of symmetric memory are left to the process's end: %s",
            self.group.rank, self.peer_bytes, who,
        )  # fmt: skip

    def _all_close(self, mine: str) -> bool:
        """Whether all ranks close now, and all of them are whole. One record says so, which nobody writes twice: who
        gave it up can't be waited for by another that is in the library's call.
        """
        ranks = [str(rank) for rank in range(self.group.size)]
        deadline = time.monotonic() + _PATIENCE_S
        try:
            self._closing.set(str(self.group.rank), mine)
            while not self._closing.check(ranks) and time.monotonic() < deadline:
                time.sleep(0.002)
            here = self._closing.check(ranks)
            whole = here and all(self._closing.get(rank) == b"whole" for rank in ranks)
            return bool(self._closing.compare_set("fate", "", "free" if whole else "leave") == b"free")
        except (RuntimeError, ValueError, OSError):  # the store is gone, and with it whoever could agree
            return False
