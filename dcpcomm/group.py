"""Ranks, and the one channel over which they agree before any transport exists.

The control channel runs over a key-value store. Rank 0 of the group is the decider: it collects what every rank posted,
and publishes one write-once record; every rank, rank 0 included, acts on that record and on nothing else. So a
deadline that passes differently on two ranks can't make them decide differently: whoever misses the record raises.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dcpcomm.errors import DCPCommError, SelectionMismatch, ShapeError, TransportTimeout

__all__ = ["Control", "Group", "Outcome", "first_failure"]

_GRACE_S = 1.5  # how much longer a rank waits for the record than rank 0 waits for the ranks


class Outcome(NamedTuple):
    """What one rank reported of one step, and after how many seconds of its own."""

    ok: bool
    reason: str = ""
    seconds: float = 0.0


def first_failure(outcomes: list[Outcome]) -> tuple[int, str] | None:
    """(rank, reason) of the rank that failed first: the later ones often failed only because they waited for it."""
    failed = [(outcome.seconds, rank) for rank, outcome in enumerate(outcomes) if not outcome.ok]
    if not failed:
        return None
    _, rank = min(failed)
    return rank, outcomes[rank].reason


class Control:
    """Collective steps over a store, among the ranks of one group only, in the same order on every rank.

    Args:
        store: a torch.distributed store that every rank of the group reaches.
        prefix: unique to the merger, the same on all its ranks.
    """

    def __init__(self, store: Any, rank: int, size: int, prefix: str, default_deadline_s: float = 120.0) -> None:
        self.rank, self.size = rank, size
        self.default_deadline_s = default_deadline_s
        self._store = dist.PrefixStore(prefix, store)
        self._step = 0

    def exchange(self, payload: bytes, deadline_s: float | None = None, what: str = "a step") -> list[bytes]:
        """Every rank's `payload`, by rank, as rank 0 saw them.

        Args:
            deadline_s: seconds that rank 0 waits for the others, counted from its own arrival.
            what: names the step in errors.

        Raises:
            TransportTimeout: naming the ranks that did not arrive; on every rank that did.
            SelectionMismatch: a rank called `fail` instead; on every other rank, naming it and its reason.
        """
        return self._run((True, payload), deadline_s, what)

    def agree(self, mine: Outcome, deadline_s: float | None = None, what: str = "a step") -> list[Outcome]:
        """Every rank's outcome of the step before, by rank. Raises as `exchange`."""
        outcomes = self.exchange(pickle.dumps(tuple(mine)), deadline_s, what)
        return [Outcome(*pickle.loads(outcome)) for outcome in outcomes]

    def fail(self, reason: str) -> None:
        """In place of the next `exchange`: make it raise on every other rank, with `reason`. Doesn't "
        "wait for anybody."""
        step, self._step = self._step, self._step + 1
        if self.size == 1:
            return
        if self.rank == 0:
            self._put(f"{step}/record", ("failed", {0: reason}))
        else:
            self._put(f"{step}/{self.rank}", (False, reason))

    def note(self, key: str, value: str) -> None:
        """Leave a word for the others, outside of any step: what this rank last did, or why it raised."""
        with contextlib.suppress(Exception):  # a note is a courtesy: a store that is gone must not hide the real error
            self._store.set(f"note/{self.rank}/{key}", value)

    def read_note(self, rank: int, key: str) -> str:
        """What `rank` last noted under `key`; "" where it did not, or where the store is gone."""
        with contextlib.suppress(Exception):
            if self._store.check([f"note/{rank}/{key}"]):
                return str(self._store.get(f"note/{rank}/{key}").decode())
        return ""

    def _run(self, posted: tuple[bool, Any], deadline_s: float | None, what: str) -> list[bytes]:
        step, self._step = self._step, self._step + 1
        if self.size == 1:
            return [posted[1]]
        limit = self.default_deadline_s if deadline_s is None else deadline_s
        try:
            kind, value = self._decide(step, posted, limit) if self.rank == 0 else self._obey(step, posted, limit)
        except (RuntimeError, ValueError, OSError) as error:
            if isinstance(error, DCPCommError):
                raise
            raise TransportTimeout(
                f"rank {self.rank}: the store that the ranks meet at is gone ({type(error).__name__}: "
                f"{error}) in {what}"
            ) from error
        if kind == "all":
            return list(value)
        if kind == "failed":
            reasons = "; ".join(f"rank {rank} raised {reason}" for rank, reason in sorted(value.items()))
            raise SelectionMismatch(f"rank {self.rank}: {what} was called off: {reasons}")
        missing: tuple[int, ...] = value
        if self.rank in missing:
            raise TransportTimeout(
                f"rank {self.rank}: {what} had ended before this rank arrived: the others waited {limit:g} "
                "s and gave up. "
                "Call again, on all ranks of the group",
                missing,
            )
        doing = (self.read_note(rank, "doing") for rank in missing)
        heard = "; ".join(f"rank {rank} was last {did}" for rank, did in zip(missing, doing, strict=True) if did)
        raise TransportTimeout(
            f"rank {self.rank}: {what}: rank {_listed(missing)} of {self.size} did not arrive within {limit:g} s. "
            "Every rank of the group must make this call; is that process alive, and does it make the same calls in the same "
            f"order?{' ' + heard if heard else ''}",
            missing,
        )

    def _decide(self, step: int, posted: tuple[bool, Any], limit: float) -> tuple[str, Any]:
        self._store.set(f"{step}/open", "1")
        keys = [f"{step}/{rank}" for rank in range(1, self.size)]
        self._poll(lambda: self._store.check(keys), limit)
        frames = {0: posted}
        for rank, key in enumerate(keys, start=1):
            if self._store.check([key]):
                frames[rank] = pickle.loads(self._store.get(key))
        failed = {rank: value for rank, (ok, value) in frames.items() if not ok}
        missing = tuple(rank for rank in range(self.size) if rank not in frames)
        record: tuple[str, Any]
        if failed:
            record = ("failed", failed)
        elif missing:
            record = ("missing", missing)
        else:
            record = ("all", [value for _, value in sorted((r, v) for r, (_, v) in frames.items())])
        self._put(f"{step}/record", record)
        # All have posted this step, so all have read the record of the step before.
        if step and not missing:
            for rank in range(1, self.size):
                self._store.delete_key(f"{step - 1}/{rank}")
            self._store.delete_key(f"{step - 1}/record")
            self._store.delete_key(f"{step - 1}/open")
        return record

    def _obey(self, step: int, posted: tuple[bool, Any], limit: float) -> tuple[str, Any]:
        self._put(f"{step}/{self.rank}", posted)
        key = f"{step}/record"
        if not self._poll(
            lambda: self._store.check([key]), limit + _GRACE_S, lambda: self._store.check([f"{step}/open"])
        ):
            return "missing", (0,)
        return pickle.loads(self._store.get(key))  # type: ignore[no-any-return]

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # bytes are fine; the stubs know only str

    @staticmethod
    def _poll(done: Callable[[], bool], limit: float, restart: Callable[[], bool] | None = None) -> bool:
        """Wait until `done`, at most `limit` seconds; once more as long from the moment that `restart` first holds.

        Polled instead of `store.wait`: that holds a TCP store's connection, and with it every other thread of the
        process.
        """
        deadline = time.monotonic() + limit
        pause = 0.0002
        began = time.monotonic()
        while True:
            if done():
                return True
            now = time.monotonic()
            if restart is not None and now - began > 0.05 and restart():
                deadline, restart = now + limit, None
            if now >= deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 0.01)


class Group:
    """The ranks that merge with each other, as transports see them.

    Attributes:
        rank, size: this rank's place in the group, which also names its slice of the result, and how many there are.
        process_group: a torch ProcessGroup over just these ranks, or None.
        control: the only way by which a transport may meet its peers.
        hosts: by rank, the identity of its host; known from the first agreed step on.
        roster: by rank, an id made for this construction; known likewise.
        timeout_s: how long a rank waits for the others where all of them must come (construct, reset, gather).
        exchange_timeout_s: how long an exchange may wait for a peer; None where it waits on and the watchdog only says
            so.
        generation: how often the merger was reset: a transport of one generation must not meet messages of another.
        loopback: the world object, where the ranks are threads of one process; else None.
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
        self.roster: list[str] = []
        self.timeout_s = 120.0
        self.exchange_timeout_s: float | None = 120.0
        self.generation = 0
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
                    "group=None means the default process group, but torch.distributed isn't initialised; "
                    "call torch.distributed.init_process_group first, or pass a group"
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
                f"group is a {type(group).__name__}; expected None, a torch ProcessGroup, or an object "
                "with rank_in_group, "
                "world_size, device_group and perhaps cpu_group"
            )
        store = _store_of(device_group) if group.world_size > 1 else dist.HashStore()
        return cls(
            store,
            group.rank_in_group,
            group.world_size,
            process_group=device_group,
            cpu_group=getattr(group, "cpu_group", None),
        )

    def store(self, purpose: str) -> Any:
        """A store of its own for a transport whose library meets through one; `purpose` keeps two of them apart."""
        return dist.PrefixStore(f"{self.prefix}/{purpose}/{self.generation}", self._store)

    def all_gather(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """`[N, *tensor.shape]`: the tensor of every rank. Not for the hot path.

        Raises:
            ShapeError: the ranks brought tensors of different shapes or dtypes.
            TransportTimeout: naming the ranks that did not arrive.
        """
        mine = (tuple(tensor.shape), str(tensor.dtype))
        shapes = [pickle.loads(p) for p in self.control.exchange(pickle.dumps(mine), self.timeout_s, what)]
        if any(shape != mine for shape in shapes):
            listed = ", ".join(f"rank {rank} {shape} {dtype}" for rank, (shape, dtype) in enumerate(shapes))
            raise ShapeError(
                f"rank {self.rank}: {what}: the ranks brought different tensors: {listed}; expected one shape and dtype"
            )
        gathered = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        over = self._group_for(tensor.device)
        if self.size == 1:
            gathered[0] = tensor
        elif over is not None:
            # Their presence was just agreed on, so this can't wait for a rank that isn't coming.
            dist.all_gather(list(gathered), tensor.contiguous(), group=over)
        else:
            raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            for rank, other in enumerate(self.control.exchange(raw, self.timeout_s, what)):
                gathered[rank] = torch.frombuffer(bytearray(other), dtype=tensor.dtype).view(tensor.shape)
        return gathered

    def _group_for(self, device: torch.device) -> Any:
        """The process group that moves tensors of `device`, or None."""
        for group in (self.process_group, self.cpu_group):
            if group is not None and device.type in {d.type for d in group._device_types}:
                return group
        return None


def _store_of(process_group: Any) -> Any:
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._get_process_group_store(process_group)
    except KeyError:
        raise ShapeError(
            "this ProcessGroup isn't registered with torch.distributed, so its store can't be found; make it by "
            "init_process_group or new_group"
        ) from None


def _listed(ranks: Any) -> str:
    return ", ".join(str(rank) for rank in ranks)
