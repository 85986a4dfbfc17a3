"""The ranks that merge with each other: a torch ProcessGroup, an engine's coordinator, or threads of one process."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from dcpcomm.control import Control
from dcpcomm.errors import DCPCommError, ShapeError

__all__ = ["Group"]


class Group:
    """The ranks that merge with each other, as transports see them.

    Attributes:
        rank, size: this rank's place in the group, which also names its slice of the result, and how many there are.
        process_group: a torch ProcessGroup over just these ranks, or None.
        control: the only way by which a transport may meet its peers.
        hosts: by rank, the identity of its host; known from the first agreed step on.
        places: by rank, what its GPU is (`Facts.place`); known likewise.
        roster: by rank, an id made for this construction; known likewise.
        timeout_s: how long a rank waits for the others where all of them must come (construct, reset, gather).
        exchange_timeout_s: how long an exchange may wait for a peer; None where it waits on and the watchdog only says
            so.
        max_sms: how many multiprocessors of its GPU this rank's waiting kernels may occupy; None: half of them.
        generation: how many transports were connected so far: what one of them left behind must not meet the next.
        device: where the rows are.
        loopback: this rank's `LoopbackRank`, where the ranks are threads of one process; else None.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        process_group: Any = None,
        cpu_group: Any = None,
        loopback: Any = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.process_group = process_group
        self.cpu_group = cpu_group if cpu_group is not None else process_group
        self.loopback = loopback
        self.hosts: list[str] = []
        self.places: list[str] = []
        self.roster: list[str] = []
        self.timeout_s = 120.0
        self.exchange_timeout_s: float | None = 120.0
        self.max_sms: int | None = None
        self.generation = 0
        self.device = torch.device("cpu")
        self._store = store
        # Counted in the store and by rank, so that a construction that some rank missed can't put it out of step for
        # good.
        entry = store.add(f"dcpcomm/entries/{rank}", 1) if size > 1 else 1
        self.prefix = f"dcpcomm/{entry}"
        self.control = (
            Control(store, rank, size, self.prefix) if size > 1 else Control(dist.HashStore(), 0, 1, self.prefix)
        )

    @classmethod
    def of(cls, group: Any) -> Group:
        """The group that a caller handed in.

        Args:
            group: None (the default process group), a torch ProcessGroup, an engine's coordinator with `rank_in_group`,
                `world_size`, `device_group` and perhaps `cpu_group`, or a rank of `dcpcomm.testing.LoopbackWorld`.

        Raises:
            ShapeError: something else, or a group that this process isn't part of.
            DCPCommError: None, and torch.distributed isn't initialised.
        """
        if hasattr(group, "loopback_store"):
            return cls(group.loopback_store, group.rank, group.size, loopback=group)
        if group is None:
            if not dist.is_initialized():
                raise DCPCommError(
                    "group=None means the default process group, but torch.distributed isn't initialised; call "
                    "torch.distributed.init_process_group first, or pass a group"
                )
            group = dist.group.WORLD
        if isinstance(group, dist.ProcessGroup):
            return cls(_store_of(group), group.rank(), group.size(), process_group=group)
        device_group = getattr(group, "device_group", None)
        if device_group is None or not hasattr(group, "rank_in_group") or not hasattr(group, "world_size"):
            if group is dist.GroupMember.NON_GROUP_MEMBER:
                raise ShapeError(
                    "this process isn't part of the group that was passed: only its members build a merger"
                )
            raise ShapeError(
                f"group is a {type(group).__name__}; expected None, a torch ProcessGroup, or an object with "
                "rank_in_group, world_size, device_group and perhaps cpu_group"
            )
        store = _store_of(device_group) if group.world_size > 1 else dist.HashStore()
        return cls(
            store,
            group.rank_in_group,
            group.world_size,
            process_group=device_group,
            cpu_group=getattr(group, "cpu_group", None),
        )

    @property
    def peers(self) -> list[int]:
        """The other ranks, beginning with the next one, so that not all ranks send to the same peer first."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def store(self, purpose: str) -> Any:
        """A store of its own for a transport whose library meets through one; `purpose` keeps two of them apart."""
        return dist.PrefixStore(f"{self.prefix}/{purpose}/{self.generation}", self._store)

    def all_gather(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """`[N, *tensor.shape]`: the tensor of every rank. Not for the hot path.

        Raises:
            ShapeError: the ranks brought tensors of different shapes or dtypes.
            TransportTimeout: naming the ranks that did not arrive.
        """
        over = self._group_for(tensor.device)
        # A coordinator's process group may count its ranks otherwise than the coordinator does.
        place = self.rank if over is None else over.rank()
        mine = [list(tensor.shape), str(tensor.dtype), place]
        theirs = [json.loads(one) for one in self.control.exchange(json.dumps(mine).encode(), self.timeout_s, what)]
        if any(one[:2] != mine[:2] for one in theirs):
            listed = ", ".join(f"rank {rank} {shape} {dtype}" for rank, (shape, dtype, _) in enumerate(theirs))
            raise ShapeError(
                f"rank {self.rank}: {what}: the ranks brought different tensors: {listed}; expected one shape and dtype"
            )
        gathered = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        if self.size == 1:
            gathered[0] = tensor
        elif over is not None:
            # Their presence was just agreed on, so this can't wait for a rank that isn't coming.
            by_place = sorted(range(self.size), key=lambda rank: theirs[rank][2])
            dist.all_gather([gathered[rank] for rank in by_place], tensor.contiguous(), group=over)
        else:
            # Flat first: a last axis of one index may have any stride, by which bytes can't be seen.
            raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for rank, other in enumerate(self.control.exchange(raw, self.timeout_s, what)):
                gathered[rank] = torch.frombuffer(bytearray(other), dtype=tensor.dtype).view(tensor.shape)
        return gathered

    def _group_for(self, device: torch.device) -> Any:
        """The process group that moves tensors of `device`, or None."""
        for group in (self.process_group, self.cpu_group):
            if group is not None and device.type in {d.type for d in getattr(group, "_device_types", ())}:
                return group
        return None


def _store_of(process_group: Any) -> Any:
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._world.pg_map[process_group][1]
    except KeyError:
        raise ShapeError(
            "this ProcessGroup isn't registered with torch.distributed, so its store can't be found; make it by "
            "init_process_group or new_group"
        ) from None
