"""The contract between the framework and whatever moves the rows.

Two families, because there are two ways to move rows:

* `MergeTransport`, the exchange family: the framework packs, the transport moves, the framework combines.
* `PeerMemoryTransport`, the peer family: the transport maps every peer's memory, the framework does the rest.

A transport is constructed for one group, one shape and one device; it is used by one merger and closed by it.
docs/write-a-transport.md builds one from nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from dcpcomm import topology
from dcpcomm.errors import ShapeError, TransportUnavailable
from dcpcomm.log import log

if TYPE_CHECKING:
    from pydantic import BaseModel

    from dcpcomm.combine.kernels import Kernels
    from dcpcomm.group import Group
    from dcpcomm.topology import Facts

__all__ = [
    "API_VERSION",
    "LSE_BASES",
    "SCATTERS",
    "Capabilities",
    "MergeShape",
    "MergeTransport",
    "PeerBuffers",
    "PeerMemoryTransport",
    "Verdict",
]

API_VERSION = 1
LSE_BASES = ("e", "2")
SCATTERS = ("heads", "tokens", "none")
PARTIAL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LSE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_INT32_MAX = 2**31 - 1
_MOST_CHANNELS = 256


@dataclass(frozen=True, kw_only=True)
class MergeShape:
    """What every merge of one merger has in common. Must be the same on every rank.

    Args:
        max_tokens: rows that one exchange can carry; a merge of more rows runs in chunks.
        num_heads: H, attention heads of the whole DCP group. A multiple of the group's size.
        head_dim: width of `partial_out`: L (kv_lora_rank) for latent partials, else V.
        dtype: of `partial_out`: torch.float16, torch.bfloat16 or torch.float32.
        lse_base: "e" (FlashMLA, FlashAttention) or "2" (FlashInfer, trtllm-gen): the base of the LSE that the attention
            kernel returned. Never guessed: a wrong base gives plausible, wrong tokens.
        scatter: what is divided over ranks in the result: "heads", "tokens" or "none".
        channels: independent sets of buffers, one per micro-batch in flight.
        v_head_dim: V, for `merge_and_project`; `head_dim` is then L. None where nothing is projected.
        require_graph: only transports that can be captured in a CUDA graph.

    Raises:
        ShapeError: naming the field, what came and what was expected.
    """

    max_tokens: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    lse_base: Literal["e", "2"]
    scatter: Literal["heads", "tokens", "none"] = "heads"
    channels: int = 1
    v_head_dim: int | None = None
    require_graph: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "num_heads", "head_dim", "channels", "v_head_dim"):
            value = getattr(self, name)
            if name == "v_head_dim" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _INT32_MAX:
                raise ShapeError(f"MergeShape.{name} is {value!r}; expected a positive integer")
        if self.channels > _MOST_CHANNELS:
            raise ShapeError(f"MergeShape.channels is {self.channels}; expected at most {_MOST_CHANNELS}")
        if not isinstance(self.require_graph, bool):
            raise ShapeError(f"MergeShape.require_graph is {self.require_graph!r}; expected True or False")
        if self.dtype not in PARTIAL_DTYPES:
            raise ShapeError(f"MergeShape.dtype is {self.dtype!r}; expected one of {_names(PARTIAL_DTYPES)}")
        if self.lse_base not in LSE_BASES:
            raise ShapeError(f"MergeShape.lse_base is {self.lse_base!r}; expected one of {LSE_BASES}")
        if self.scatter not in SCATTERS:
            raise ShapeError(f"MergeShape.scatter is {self.scatter!r}; expected one of {SCATTERS}")

    def check_world_size(self, world_size: int) -> None:
        """Raise `ShapeError` unless the heads divide evenly over `world_size` ranks."""
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ShapeError(f"world_size is {world_size!r}; expected a positive integer")
        if self.num_heads % world_size:
            raise ShapeError(
                f"num_heads={self.num_heads} is not a multiple of the group's size {world_size}; pad the heads to "
                f"{-(-self.num_heads // world_size) * world_size}, or use another group size"
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """Every width D that a merge of this shape may put on the wire."""
        return (self.head_dim,) if self.v_head_dim is None else (self.head_dim, self.v_head_dim)

    def tokens_per_exchange(self, world_size: int) -> int:
        """Rows of one exchange at the most. For token scatter a multiple of `world_size`, and at least that."""
        if self.scatter != "tokens":
            return self.max_tokens
        return max(1, self.max_tokens // world_size) * world_size

    def rows_per_destination(self, tokens: int, world_size: int) -> int:
        """(row, head) pairs that one rank sends to one other in an exchange of `tokens` rows."""
        rows = tokens * self.num_heads
        return rows if self.scatter == "none" else rows // world_size

    def result_rows(self, tokens: int, world_size: int) -> tuple[int, int]:
        """The first two axes of a merge's result: (tokens, heads)."""
        if self.scatter == "heads":
            return tokens, self.num_heads // world_size
        if self.scatter == "tokens":
            return tokens // world_size, self.num_heads
        return tokens, self.num_heads


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a transport declares of itself; the framework trusts it only as a reason to leave the transport out.

    Args:
        devices: device types it moves rows on.
        dtypes: dtypes of `partial_out` that it carries.
        world_sizes: smallest and largest group.
        row_alignment: bytes that a packed row must be a multiple of. Rows are padded to 16; a transport that needs more
            serves only the widths that come out right.
        multi_host: whether ranks may sit on different hosts.
        graph_capturable: whether an exchange can be captured in a CUDA graph.
        deterministic: whether the result is bit-equal to the canonical arithmetic.
        may_hang: whether connecting or using it wrongly can hang a process past rescue.
        interruptible: whether a call whose peer does not come ends at the deadline. False: nothing ends it but the
            process, and so says the watchdog.
        soak_bytes: bytes to send and compare before it is trusted; 0 where it cannot tear a message.
        proven_on: places ("cpu", "sm_90", ...) where it is a candidate without being named; empty: everywhere.
        layout: "packed" or "view", see `MergeTransport.exchange`.
        ragged: whether a message may be shorter or longer than the receiver awaits, up to the stride of `recv`. A
            ragged transport lets ranks that disagree about B read each other's header instead of failing in the
            library.
    """

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = PARTIAL_DTYPES
    world_sizes: tuple[int, int] = (2, 1024)
    row_alignment: int = 16
    multi_host: bool = False
    graph_capturable: bool = False
    deterministic: bool = True
    may_hang: bool = False
    interruptible: bool = True
    soak_bytes: int = 0
    proven_on: tuple[str, ...] = ()
    layout: Literal["packed", "view"] = "packed"
    ragged: bool = False


@dataclass(frozen=True)
class Verdict:
    """Whether a transport can be used here; where not, why, and what would change that."""

    ok: bool
    reason: str = ""
    remedy: str = ""


class MergeTransport(ABC):
    """Moves rows between the ranks of one group.

    Life: `check` (class method) -> `__init__` -> `prepare` -> `connect` -> `exchange`, many times -> `close`. Whatever
    raises before `connect` has ended is reported as this rank's reason, and the transport is closed on all ranks.
    """

    api_version: ClassVar[int] = API_VERSION
    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    Options: ClassVar[type[BaseModel] | None] = None

    def __init__(self, group: Group, shape: MergeShape, options: Any) -> None:
        """Keep what is needed; cheap, local, no communication.

        Args:
            group: ranks, hosts, `process_group` (may be None), `control`, `timeout_s` for connecting and
                `exchange_timeout_s` for an exchange.
            shape: of every merge to come.
            options: an instance of `Options`, or None where the class has none.
        """
        self.group = group
        self.shape = shape
        self.options = options

    @classmethod
    def check(cls, facts: Facts) -> Verdict:
        """Whether it can work on this machine. Local, under a second, nothing collective."""
        return Verdict(True)

    @classmethod
    def load(cls, facts: Facts) -> Verdict:
        """Import and compile what it needs, and say why that fails. Local, nothing collective; may take minutes the
        first time. Called where `check` found nothing, before the clock of any step starts.
        """
        return Verdict(True)

    @property
    def unverified(self) -> bool:
        """Whether its user takes it although it may deliver wrong rows: an option `allow_unverified` that is true.
        What its verification finds wrong is then said, and is no reason to leave it out.
        """
        return bool(getattr(self.options, "allow_unverified", False))

    def proof_facts(self) -> list[str]:
        """What else a soak's verdict depends on: versions of libraries, widths of messages. Called after `connect`."""
        return []

    def distrusted(self) -> str:
        """Why a soak that found nothing proves nothing here, where that is so: a fault that is known, but may be rarer
        than a soak is long. Empty: it is trusted. Called after `connect`.
        """
        return ""

    @abstractmethod
    def prepare(self) -> bytes:
        """Allocate, and return what peers must know (handles, ids). Local."""

    @abstractmethod
    def connect(self, peers: list[bytes]) -> None:
        """Open the peers, given what every rank's `prepare` returned, by group rank. May be collective."""

    def exchange(self, send: Any, channel: int, recv: torch.Tensor | None = None) -> Any:
        """Move rows; on CUDA, on the current stream.

        Layout "packed": `send` is uint8 `[N, 1 + R, W]`, block i for rank i, block `rank` for itself; `recv` has that
        shape, its blocks at any stride. Fill `recv` so that block i is what rank i sent here, and return it, or return
        a tensor of the transport's own of that shape, valid until the next call on this channel. What lies in block
        `rank` isn't looked at: a rank's own rows are read where they are.

        Layout "view": `send` is `(out [B, N, H/N, D], lse [B, N, H/N])`, views; return tensors of these shapes in
        which the N axis is the source rank, valid until the next call on this channel.

        Raises:
            TransportTimeout: naming the peers that did not arrive within `group.exchange_timeout_s` (None: wait on).
        """
        raise TypeError(f"transport {self.name!r} implements neither exchange nor fused_merge")

    #: A transport that merges by itself sets this to a method
    #: `fused_merge(partial_out [B,H,D], partial_lse [B,H] float32, channel) -> (out, lse float32)`, and is then never
    #: asked to `exchange`. Rows to leave out come with LSE -inf and may hold anything.
    fused_merge: Any = None
    #: The framework's fused kernel over this transport's memory, where that is what merges.
    fused: Any = None
    #: Whether `fused_merge` itself takes NaN and +inf in an LSE for -inf, and any strides of it.
    cleans: bool = False

    def poll(self, channel: int) -> None:  # noqa: B027
        """Raise what went wrong in this channel's exchanges since they were asked for, where `exchange` returns before
        its rows are there (on a GPU). Must not wait.
        """

    def interrupt(self, channel: int, error: Exception) -> None:  # noqa: B027
        """On a GPU, from another thread, past the deadline: end this channel's exchange, which waits for a peer, and
        have `poll` raise `error`. Nothing where exchanges end by themselves. Must not wait.
        """

    def cancel(self, send: torch.Tensor, channel: int) -> None:
        """Tell peers that this rank has nothing to send in this call (ragged transports).

        `send` is `[N, 1, W]`: headers alone. Must not wait for peers; what they send meanwhile is discarded by the next
        `exchange` on this channel.
        """
        raise TypeError(f"transport {self.name!r} is not ragged: it cannot cancel a call")

    @classmethod
    def needs_workspace(cls, on_gpu: bool) -> bool:
        """Whether the framework must hand it packed buffers."""
        return cls.fused_merge is None and cls.capabilities.layout == "packed"

    @classmethod
    def device_bytes(cls, shape: MergeShape, world_size: int, options: Any) -> int:
        """Bytes it allocates on the merger's device itself, beyond the framework's workspace. Arithmetic only."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Free everything. Safe twice, and after a half-done `prepare` or `connect`."""


@dataclass(frozen=True)
class PeerBuffers:
    """Memory that every rank of the group can store to.

    Args:
        own: uint8 `[nbytes]`, this rank's.
        addresses: by group rank, where that rank's memory begins as this rank addresses it; `own`'s among them.
            Numbers, because torch may copy what lies on another GPU to make it a tensor.
        sharing: ranks of the group on this rank's GPU, itself included: their waiting kernels must fit there together.
        kept: whatever must live while the addresses are used, the tensors of ranks in this process, say.
    """

    own: torch.Tensor
    addresses: list[int]
    sharing: int = 1
    kept: object = None


class PeerMemoryTransport(MergeTransport):
    """Maps memory of all ranks; the framework puts the rows, waits and combines.

    A subclass implements `check`, `prepare` (allocate `peer_bytes`, say how to open it), `connect` (open the peers'),
    `map_symmetric` and `close`. It gets the exchange, its two slots, their order and its deadline for free.
    """

    _engine: Any = None

    @classmethod
    def check(cls, facts: Facts) -> Verdict:
        """Whether every GPU of the group on this host reaches the others' memory, as far as the driver tells."""
        remedy = "use one that needs no peer access, such as nccl_a2a; `nvidia-smi topo -p2p rw` shows the pairs"
        cut_off = facts.cut_off()
        return Verdict(False, cut_off, remedy) if cut_off else Verdict(True)

    @property
    def peer_bytes(self) -> int:
        """Bytes that every rank must offer to its peers."""
        return type(self).device_bytes(self.shape, self.group.size, self.options)

    @abstractmethod
    def map_symmetric(self, nbytes: int) -> PeerBuffers:
        """The `nbytes` that `prepare` allocated, zeroed by their owner, here and on every peer. Called once, after
        `connect`.
        """

    def attach(self) -> None:
        """Build the framework's engine on the mapped memory. Called by the framework, after `connect`."""
        buffers = self.map_symmetric(self.peer_bytes)
        if not topology.on_gpu(buffers.own.device):
            from dcpcomm.combine.host_put import HostPut

            self._engine = HostPut(self.group, self.shape, buffers)
            return
        from dcpcomm.combine.fused import FusedPeer
        from dcpcomm.combine.peer_options import PeerOptions

        kernels = self._kernels(buffers)
        options = self.options if isinstance(self.options, PeerOptions) else PeerOptions.model_validate({})
        self.fused = self._engine = FusedPeer(self.group, self.shape, buffers, kernels, options)

    def _kernels(self, buffers: PeerBuffers) -> Kernels:
        """Compiled and loaded. Says so, where kernels that wait may stand in one queue of the GPU."""
        from dcpcomm.combine.cuda_engine import kernels_for

        waiting, queues = self.shape.channels * buffers.sharing, topology.hardware_queues()
        if self.shape.channels > 1 and queues < 2 * waiting:
            log.warning(
                "rank %d: %d kernels may wait at once, and streams share %d queues of the GPU: one that waits may hold "
                "another up, in whose call the peers are; set CUDA_DEVICE_MAX_CONNECTIONS=32 before CUDA starts",
                self.group.rank, waiting, queues,
            )  # fmt: skip
        kernels = kernels_for(buffers.own.device, self.shape.dtype, self.group.size)
        if kernels is None:
            raise TransportUnavailable("the CUDA kernels can't be compiled here; the log says why")
        return kernels

    def exchange(self, send: Any, channel: int, recv: torch.Tensor | None = None) -> Any:
        return self._engine.exchange(send, channel, recv)

    def poll(self, channel: int) -> None:
        self._engine.poll(channel)

    def cancel(self, send: torch.Tensor, channel: int) -> None:
        self._engine.cancel(send, channel)

    @classmethod
    def device_bytes(cls, shape: MergeShape, world_size: int, options: Any) -> int:
        from dcpcomm.combine.fused import fused_bytes
        from dcpcomm.combine.host_put import slots_bytes

        return max(slots_bytes(shape, world_size), fused_bytes(shape, world_size))

    @classmethod
    def needs_workspace(cls, on_gpu: bool) -> bool:
        return not on_gpu  # there the kernel reads the caller's rows themselves


def _names(values: tuple[Any, ...]) -> str:
    return ", ".join(str(v) for v in values)
