"""What stands behind a merger: the agreed transport, the memory, the channels; made together, reset together, closed
together.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from dcpcomm import topology
from dcpcomm.channel import Channel
from dcpcomm.combine.engine import Partials, engine_for
from dcpcomm.config import MergeConfig, load_config, options_for
from dcpcomm.decision import Fallen
from dcpcomm.errors import DCPCommError, ShapeError, TransportTimeout, TransportUnavailable
from dcpcomm.explain import describe, remember
from dcpcomm.group import Group
from dcpcomm.log import log
from dcpcomm.rows import RowCounts
from dcpcomm.select import establish, select
from dcpcomm.transport import MergeShape
from dcpcomm.watchdog import Watchdog
from dcpcomm.workspace import Workspace, counter_bytes

__all__ = ["Session"]


class Session:
    """One merger's connection to its peers. Constructing is collective over the group, as `reset` is; `close` is local.

    Attributes:
        group, shape, config, device: what it was made for.
        decision: what all ranks agreed on.
        transports: connected, by name; none in a group of one rank.
        channels: one per channel of the shape.
    """

    def __init__(self, group: Any, shape: MergeShape, config: Any, device: torch.device | str | int | None) -> None:
        self.group = Group.of(group)
        self.shape = shape
        try:
            if not isinstance(shape, MergeShape):
                raise ShapeError(f"shape is a {type(shape).__name__}; expected a MergeShape")
            shape.check_world_size(self.group.size)
            self.config: MergeConfig = load_config(config)
            self.device = _device(device)
            # Before the ranks agree on anything: what it allocates may wait for the GPU, and with it for a rank that
            # is ahead.
            self.engine = engine_for(shape, self.group.rank, self.group.size, self.device)
        except Exception as error:
            self.group.control.fail(f"{type(error).__name__}: {error}")
            raise
        self.group.device = self.device
        watchdog = self.config.watchdog
        self.group.timeout_s = watchdog.timeout_s
        self.group.exchange_timeout_s = watchdog.timeout_s if watchdog.action == "raise" else None
        self.group.max_sms = None if self.config.max_sms == "auto" else self.config.max_sms
        self._workspace = Workspace(shape, self.group.size, self.device)
        with self.group.control.beating(), topology.on_device(self.device):
            self.decision, self.transports = select(self.group, shape, self.config, self.device, self._workspace)
        self._on_gpu = topology.on_gpu(self.device)
        if not any(type(one).needs_workspace(self._on_gpu) for one in self.transports.values()):
            self._workspace.release()
        self._watchdog = Watchdog(
            self.group.control, shape.channels, watchdog.timeout_s, watchdog.action, self, self.engine.progress
        )
        self.engine.reset()
        self.channels = self._make_channels()
        self.closed = False
        used = ", ".join(self.decision.transports) or "none"
        log.info("rank %d of %d: merger made, transport %s", self.group.rank, self.group.size, used)
        if self.group.rank == 0 and self.group.size > 1:
            remember(self.explain())

    def explain(self) -> str:
        """What was decided and why, in words."""
        return describe(self.decision, self.shape, self.config, self.group, self.device_bytes, self.engine.words)

    def partials(self, out: torch.Tensor, lse: torch.Tensor, counts: RowCounts | None) -> Partials:
        """A call's inputs as the engine takes them."""
        partials = Partials(out, lse, counts)
        return partials if counts is None or self.engine.reads_counts else partials.cleaned()

    def wire_width(self, tokens: int, projecting: bool) -> int:
        """D of what a merge of `tokens` rows sends."""
        before = projecting and self.shape.v_head_dim and self.decision.choice(tokens).projection == "before"
        return self.shape.v_head_dim or 0 if before else self.shape.head_dim

    @property
    def workspace(self) -> torch.Tensor | None:
        """The framework's own device memory, uint8; None where no transport in use needs it."""
        return self._workspace.memory

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory held, the transports' included."""
        total = self.workspace.numel() if self.workspace is not None else 0
        total += counter_bytes(self.shape, self.group.size, self._on_gpu)
        for transport in self.transports.values():
            cls = type(transport)
            total += cls.device_bytes(self.shape, self.group.size, options_for(self.config, cls))
        return total

    def check_open(self) -> None:
        """Raise `DCPCommError` where `close` was called."""
        if self.closed:
            raise DCPCommError(f"rank {self.group.rank}: this merger is closed")

    def reset(self) -> None:
        """Close the transports, connect and verify them anew, on all ranks; every channel begins again."""
        self.check_open()
        busy = [channel.index for channel in self.channels if channel.busy]
        if busy:
            self.group.control.fail(f"DCPCommError: channel {busy[0]} is inside a call")
            raise DCPCommError(
                f"rank {self.group.rank}: channel {busy[0]} is inside a call; reset when all have returned"
            )
        try:
            self.engine.finish()
        except Exception as error:  # of a kernel, say: the peers must not wait for this rank
            self.group.control.fail(f"{type(error).__name__}: {error}")
            raise
        try:
            # Twice: some may come after a call that waited for one which is here already.
            self.group.control.exchange(b"", 2 * self.group.timeout_s, "resetting the merger")
        except DCPCommError as error:
            for channel in self.channels:  # this rank's next call must not meet one of the peers' before
                channel.broken = channel.broken or error
            raise
        for key in ("raised", "progress"):  # of calls before the reset, whose ordinals come again
            self.group.control.note(key, "")
        for transport in self.transports.values():
            transport.close()
        try:
            with topology.on_device(self.device):
                self._connect_again()
        except BaseException:
            self.close()  # half of it connected: nothing that a call could use
            raise
        self.engine.reset()
        self._watchdog.forget()
        self.channels = self._make_channels()

    def overdue(self, channel: int, ordinal: int, seconds: float, late: tuple[int, ...]) -> None:
        """On the watchdog's thread: a call waits on the GPU past the deadline. Have the transport end it, if it can."""
        who = ", ".join(str(rank) for rank in late)
        error = TransportTimeout(f"rank {who} did not arrive within {seconds:.1f} s in call {ordinal}", late)
        for transport in list(self.transports.values()):
            transport.interrupt(channel, error)

    def _connect_again(self) -> None:
        for name, transport in self.transports.items():
            again = establish(self.group, self.shape, self.config, type(transport), self._workspace)
            if isinstance(again, Fallen):
                raise TransportUnavailable(
                    f"rank {self.group.rank}: reset could not connect {name!r} again: it fell at {again.stage} on "
                    f"rank {again.rank}: {again.reason}. The merger is closed; make a new one"
                )
            self.transports[name] = again

    def disown(self, error: ShapeError) -> None:
        """A call came for no channel that there is, while the peers are in one: keep this rank's next call from meeting
        theirs. With one channel it is known which they are in, and they are told; with several, all of them are broken.
        """
        # On a GPU what calls a call off has as many rows as the call, and nobody knows how many these are.
        if len(self.channels) == 1 and not self._on_gpu and self.channels[0].broken is None:
            ordinal = self.channels[0].enter()
            try:
                self.channels[0].cancel(ordinal, 1, self.shape.head_dim, error)
            finally:
                self.channels[0].leave()
            return
        self.group.control.note("raised", f"ShapeError: {error}")
        for channel in self.channels:
            channel.broken = channel.broken or error

    def close(self) -> None:
        """Give everything back. Local, safe twice."""
        if self.closed:
            return
        self.closed = True
        self._watchdog.stop()
        if self.transports:
            self.group.control.note("closed", "closed its merger")
            if self.group.exchange_timeout_s is not None:  # else a call that waits for a peer may never end
                with contextlib.suppress(RuntimeError):  # of the GPU, long since told to whoever waited for it
                    self.engine.finish()  # its kernels still write to what is freed below
        for transport in self.transports.values():
            transport.close()
        self.transports.clear()
        self.channels.clear()
        self.engine.ordinals = None
        self._workspace.release()

    def _make_channels(self) -> list[Channel]:
        regions = self._workspace.regions() if self.workspace is not None else {}
        return [
            Channel(
                index,
                self.group,
                self.shape,
                self.decision,
                self.transports,
                self._watchdog,
                self.engine,
                self.device,
                regions.get(f"send[{index}]"),
                regions.get(f"recv[{index}]"),
            )
            for index in range(self.shape.channels)
        ]


def _device(device: torch.device | str | int | None) -> torch.device:
    """The device as tensors name theirs: a CPU without an index, a GPU with one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        asked_for = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ShapeError(f"device is {device!r}; expected cpu, cuda or cuda:INDEX, or None") from error
    if asked_for.type == "cpu":
        return torch.device("cpu")
    if asked_for.type != "cuda":
        raise ShapeError(f"device is {asked_for}; expected cpu or cuda")
    if not torch.cuda.is_available():
        raise ShapeError(f"device is {asked_for}, and torch {torch.__version__} finds no GPU here; expected cpu")
    return asked_for if asked_for.index is not None else torch.device("cuda", torch.cuda.current_device())
