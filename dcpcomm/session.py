"""What stands behind a merger: the agreed transport, the memory, the channels; made together, reset together, closed
together.
"""

from __future__ import annotations

from typing import Any

import torch

from dcpcomm.channel import Channel
from dcpcomm.config import MergeConfig, load_config, options_for
from dcpcomm.errors import DCPCommError, TransportUnavailable
from dcpcomm.group import Group
from dcpcomm.select import Fallen, connect_transport, select
from dcpcomm.transport import MergeShape
from dcpcomm.watchdog import Watchdog
from dcpcomm.workspace import plan

__all__ = ["Session"]


class Session:
    """One merger's connection to its peers. Constructing is collective over the group, as `reset` is; `close` is local.

    Attributes:
        group, shape, config, device: what it was made for.
        decision: what all ranks agreed on.
        transport: connected; None in a group of one rank.
        workspace: the framework's own device memory, uint8; None where the transport needs none.
        channels: one per channel of the shape.
    """

    def __init__(self, group: Any, shape: MergeShape, config: Any, device: torch.device | str | int | None) -> None:
        self.group = Group.of(group)
        self.shape = shape
        try:
            shape.check_world_size(self.group.size)
            self.config: MergeConfig = load_config(config)
            self.device = _device(device)
        except Exception as error:
            self.group.control.fail(f"{type(error).__name__}: {error}")
            raise
        watchdog = self.config.watchdog
        self.group.timeout_s = watchdog.timeout_s
        self.group.exchange_timeout_s = watchdog.timeout_s if watchdog.action == "raise" else None
        self.decision, self.transport = select(self.group, shape, self.config, self.device)
        self._watchdog = Watchdog(self.group.control, shape.channels, watchdog.timeout_s, watchdog.action, self)
        self.workspace = self._allocate()
        self.channels = self._make_channels()
        self.closed = False

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory held, the transport's included."""
        own = self.workspace.numel() if self.workspace is not None else 0
        if self.transport is None:
            return own
        cls = type(self.transport)
        return own + cls.device_bytes(self.shape, self.group.size, options_for(self.config, cls))

    def check_open(self) -> None:
        """Raise `DCPCommError` where `close` was called."""
        if self.closed:
            raise DCPCommError(f"rank {self.group.rank}: this merger is closed")

    def reset(self) -> None:
        """Close the transport and connect it anew, on all ranks; every channel begins again."""
        self.check_open()
        self.group.control.agree(True, "", self.group.timeout_s, "resetting the merger")
        self.group.control.note("raised", "")
        if self.transport is not None:
            self.transport.close()
            self.group.generation += 1
            cls, name = type(self.transport), self.transport.name
            again = connect_transport(self.group, self.shape, self.config, cls, name)
            if isinstance(again, Fallen):
                self.close()
                raise TransportUnavailable(
                    f"rank {self.group.rank}: reset could not connect {name!r} again: it fell at {again.stage} on "
                    f"rank {again.rank}: {again.reason}. The merger is closed; make a new one"
                )
            self.transport = again
        self.channels = self._make_channels()

    def close(self) -> None:
        """Give everything back. Local, safe twice."""
        if self.closed:
            return
        self.closed = True
        self._watchdog.stop()
        if self.transport is not None:
            self.group.control.note("closed", "closed its merger")
            self.transport.close()

    def _allocate(self) -> torch.Tensor | None:
        if self.transport is None or not type(self.transport).needs_workspace():
            return None
        with torch.inference_mode(False):  # an inference tensor could not be written outside of inference mode later
            return torch.empty(plan(self.shape, self.group.size).total, dtype=torch.uint8, device=self.device)

    def _make_channels(self) -> list[Channel]:
        regions: dict[str, torch.Tensor] = {}
        if self.workspace is not None:
            layout = plan(self.shape, self.group.size)
            regions = {region.name: region.of(self.workspace) for region in layout.regions}
        return [
            Channel(
                index,
                self.group,
                self.shape,
                self.transport,
                self._watchdog,
                regions.get(f"send[{index}]"),
                regions.get(f"recv[{index}]"),
            )
            for index in range(self.shape.channels)
        ]


def _device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return torch.device(device)
