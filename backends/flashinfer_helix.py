"""`flashinfer_helix`: FlashInfer's all-to-all for decode context parallelism, over memory that all GPUs of a group map.

Damaged rows have been seen on Hopper, at any setting (docs/transports/flashinfer_helix.md). So it is never used there
without a soak, which finds them; `checked` carries every word twice and proves it on arrival, and `allow_unverified`
takes what comes.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import uuid
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from dcpcomm import topology
from dcpcomm.backends import flashinfer_library
from dcpcomm.backends.flashinfer_library import StoreComm
from dcpcomm.backends.helix_entries import Entries, EntryLayout, Sent
from dcpcomm.backends.helix_twins import Twins
from dcpcomm.errors import TransportUnavailable
from dcpcomm.group import Group
from dcpcomm.log import log
from dcpcomm.topology import Facts, hardware_queues
from dcpcomm.transport import Capabilities, MergeShape, MergeTransport, Verdict

__all__ = ["FlashInferHelix", "HelixOptions"]

CHANNELS_VARIABLE = "DCP_A2A_CHANNEL_COUNT"  # FlashInfer's own; read once by each process
_QUEUE = 512 * 1024 + 2 * 256  # bytes of one queue and its two counters
_GROUPS = 8  # peers that one of its blocks serves
_LIKELY_PROCESSORS = 148  # where there is no GPU to ask
_GRANULE = 2 << 20
_OLDEST, _HOPPER = 90, 9
#: FlashInfer's host code keeps tables without a lock; ranks that are threads of one process call it in turn.
_in_turn = threading.Lock()
#: Workspaces of closed mergers by id, with this rank's place and the group's size: FlashInfer keeps each to the end of
#: the process, and the same ranks may take it again.
_idle: dict[str, tuple[int, int, torch.Tensor]] = {}


class HelixOptions(BaseModel):
    """How rows go through FlashInfer's exchange."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable_pdl: bool | None = Field(
        default=None,
        description="programmatic dependent launch; by default as FlashInfer does, on where the GPU has it",
    )
    heads_per_entry: int | None = Field(
        default=None,
        gt=0,
        description="heads of a row in one message; fewer than all cost two copies, not yet measured",
    )
    checked: bool = Field(
        default=False, description="every word twice, proven on arrival: right on sm_90 too, for 3 times the bytes"
    )
    allow_unverified: bool = Field(
        default=False, description="use it although its rows may be wrong; says so each time"
    )

    @model_validator(mode="after")
    def _one_way(self) -> HelixOptions:
        if self.checked and (self.allow_unverified or self.heads_per_entry is not None):
            raise ValueError("checked proves all rows, in entries of its own: drop allow_unverified, heads_per_entry")
        return self


class FlashInferHelix(MergeTransport):
    """One workspace per channel; a call is one launch of FlashInfer's kernel, on views of the partials."""

    name: ClassVar[str] = "flashinfer_helix"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cuda",),
        world_sizes=(2, 64),
        graph_capturable=True,
        may_hang=True,
        interruptible=False,
        soak_bytes=1 << 30,
        proven_on=("sm_100", "sm_103"),
        layout="view",
    )
    Options = HelixOptions
    package: ClassVar[str] = "flashinfer"  # another one stands in for it in tests

    def __init__(self, group: Group, shape: MergeShape, options: Any) -> None:
        super().__init__(group, shape, options)
        self._entries: Entries | None = None
        self._workspaces: dict[str, torch.Tensor] = {}
        self._by_channel: list[torch.Tensor] = []
        self._rooms: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._key = ""

    @classmethod
    def check(cls, facts: Facts) -> Verdict:
        generation = facts.place.removeprefix("sm_")
        if generation.isdigit() and int(generation) < _OLDEST:
            return Verdict(False, f"its kernel needs sm_90 or later; this is {facts.place}", "use nccl_a2a or cupy_ipc")
        if not flashinfer_library.installed(cls.package):
            return Verdict(False, "FlashInfer isn't installed", flashinfer_library.EXTRAS)
        if facts.place == "loopback" and facts.device == "cuda":
            if facts.world_size > 2:
                return Verdict(
                    False,
                    f"its waiting kernels of {facts.world_size} ranks may not fit on one GPU together",
                    "use 2 virtual ranks, or loopback_peer",
                )
            if hardware_queues() < 2 * facts.world_size:
                return Verdict(
                    False,
                    f"streams share {hardware_queues()} queues of the GPU, so kernels that wait for each other may "
                    "stand in one",
                    "set CUDA_DEVICE_MAX_CONNECTIONS=32, or make the LoopbackWorld, before this process uses CUDA",
                )
        return Verdict(True)

    @classmethod
    def load(cls, facts: Facts) -> Verdict:
        with _in_turn:
            return flashinfer_library.loaded(cls.package, facts.world_size)

    @classmethod
    def device_bytes(cls, shape: MergeShape, world_size: int, options: Any) -> int:
        """Workspaces and what rows arrive in. On a machine without a GPU its workspaces are guessed, from above."""
        on_gpu = torch.cuda.is_available()
        count = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count if on_gpu else 0
        queues = max(1, (count or _LIKELY_PROCESSORS) // (2 * -(-world_size // _GROUPS)))
        workspace = -(-_QUEUE * world_size * queues // _GRANULE) * _GRANULE
        options = options or HelixOptions()
        entries: Entries
        try:
            if options.checked:
                entries = Twins(shape, world_size, torch.device("meta"), 0)
            else:
                entries = EntryLayout(shape, world_size, options.heads_per_entry)
        except TransportUnavailable:  # it won't carry this shape, and says so in `prepare`
            return 0
        rows, statistics = entries.capacity()
        return shape.channels * (workspace + 2 * rows + 4 * statistics) + entries.own_bytes

    def prepare(self) -> bytes:
        if self.unverified:
            log.warning(
                "rank %d: flashinfer_helix is used unverified (options.flashinfer_helix.allow_unverified): on sm_90 it "
                "returns rows with stale halves of lines, and reports nothing", self.group.rank,
            )  # fmt: skip
        self._comm = flashinfer_library.library(self.package)
        self._call = self._comm.decode_cp_a2a_alltoall
        self._takes_out = flashinfer_library.takes_out(self._call)
        self._seed = uuid.uuid4().hex
        if not self.options.checked:
            self._entries = EntryLayout(self.shape, self.group.size, self.options.heads_per_entry)
        card = {
            "seed": self._seed,
            "idle": [name for name, (rank, n, _) in _idle.items() if (rank, n) == (self.group.rank, self.group.size)],
            "must match": {
                "FlashInfer": flashinfer_library.version(self.package),
                CHANNELS_VARIABLE: os.environ.get(CHANNELS_VARIABLE, ""),
                "multiprocessors": flashinfer_library.gpu_card(self.group.device)["processors"],
            },
        }
        if self.group.loopback is not None:
            self._offer_plain_memory()
        return json.dumps(card).encode()

    def _offer_plain_memory(self) -> None:
        """Ranks that are threads share one tensor: FlashInfer's allocator has one rank per process."""
        self._key = f"{self.group.prefix}/{self.group.generation}/helix"
        self._office = self.group.loopback.world.mail(self._key)
        if self.group.rank == 0:
            words = -(-self._comm.decode_cp_a2a_workspace_size(self.group.size) // 8)
            with torch.inference_mode(False):
                self._office.memory[0] = [
                    torch.empty((self.group.size, words), dtype=torch.int64, device=self.group.device)
                    for _ in range(self.shape.channels)
                ]

    def connect(self, peers: list[bytes]) -> None:
        told = [json.loads(card) for card in peers]
        for rank, card in enumerate(told):
            for what, value in card["must match"].items():
                if value != told[0]["must match"][what]:
                    raise TransportUnavailable(
                        f"{what} is {told[0]['must match'][what]!r} on rank 0 and {value!r} on rank {rank}: their "
                        "kernels would wait for other messages than are sent; make it the same on all ranks"
                    )
        meeting = StoreComm(self.group, "helix", self.group.timeout_s)
        try:
            self._make_entries(told[0]["seed"])
            self._by_channel = self._workspaces_for(told, meeting)
            for workspace in self._by_channel:
                self._comm.decode_cp_a2a_init_workspace(workspace, self.group.rank, self.group.size)
            assert self._entries is not None
            self._entries.warm(self.group.device)
        except Exception as error:
            meeting.fail(error)
            raise
        # A peer that sent before this rank's queues are empty would wait for ever, and so would this one.
        meeting.barrier()

    def _make_entries(self, seed: str) -> None:
        device = self.group.device
        if self.options.checked:
            self._entries = Twins(self.shape, self.group.size, device, int(seed[:15], 16))
        assert self._entries is not None
        rows, statistics = self._entries.capacity()
        if self._takes_out:
            with torch.inference_mode(False):
                self._rooms = [
                    (
                        torch.empty(rows, dtype=torch.bfloat16, device=device),
                        torch.empty(statistics, dtype=torch.float32, device=device),
                    )
                    for _ in range(self.shape.channels)
                ]

    def _workspaces_for(self, told: list[Any], meeting: StoreComm) -> list[torch.Tensor]:
        """One per channel: those that all of these ranks have left from before, then new ones."""
        if self.group.loopback is not None:
            return list(self._office.memory[0])
        common = [name for name in told[0]["idle"] if all(name in card["idle"] for card in told)]
        for name in common[: self.shape.channels]:
            self._workspaces[name] = _idle.pop(name)[2]
        for number in range(len(self._workspaces), self.shape.channels):
            mapping = self._comm.Mapping(
                world_size=self.group.size, rank=self.group.rank, gpus_per_node=self.group.size, cp_size=self.group.size
            )
            config = self._comm.mnnvl.MnnvlConfig(comm_backend=meeting)
            with torch.inference_mode(False):
                made = self._comm.decode_cp_a2a_allocate_mnnvl_workspace(mapping, mnnvl_config=config)
            self._workspaces[f"{told[0]['seed']}/{number}"] = made
        return list(self._workspaces.values())

    def proof_facts(self) -> list[str]:
        assert self._entries is not None
        driver = getattr(torch._C, "_cuda_getDriverVersion", int)() if topology.on_gpu(self.group.device) else 0
        channels = os.environ.get(CHANNELS_VARIABLE, "")
        return [
            flashinfer_library.version(self.package),
            self._entries.words,
            channels,
            str(driver),
            str(self.shape.dtype),
        ]

    def distrusted(self) -> str:
        if self.options.checked or not topology.on_gpu(self.group.device):
            return ""
        if torch.cuda.get_device_capability(self.group.device)[0] != _HOPPER:
            return ""
        return (
            "the soak found nothing, but on sm_90 FlashInfer's rows are known to be damaged, narrow ones once in "
            "millions (docs/transports/flashinfer_helix.md); options.flashinfer_helix.checked: true proves every row"
        )

    def exchange(self, send: Any, channel: int, recv: torch.Tensor | None = None) -> Any:
        out, lse = send
        assert self._entries is not None
        rows, statistics = sent = self._entries.sent(out, lse, channel)
        more: dict[str, Any] = {} if self.options.enable_pdl is None else {"enable_pdl": self.options.enable_pdl}
        if self._takes_out:
            room, room_of_statistics = self._rooms[channel]
            more["out"] = (
                room[: rows.numel()].view(rows.dtype).view(rows.shape),
                room_of_statistics[: statistics.numel()].view(statistics.shape),
            )
        shared = self.group.loopback is not None and rows.is_cuda
        with _in_turn if shared else contextlib.nullcontext():
            got = self._call(*sent, self._by_channel[channel], self.group.rank, self.group.size, **more)
        return self._entries.arrived(Sent(*got), out.shape, channel)

    def poll(self, channel: int) -> None:
        if self._entries is not None:
            self._entries.poll(channel)

    def close(self) -> None:
        """Workspaces go back for the next merger of these ranks: FlashInfer has no call that frees one."""
        for name, workspace in self._workspaces.items():
            _idle[name] = self.group.rank, self.group.size, workspace
        if self._key:
            self.group.loopback.world.leave(self._key, self.group.rank)
            self._key = ""
        self._workspaces, self._by_channel, self._rooms, self._entries = {}, [], [], None
