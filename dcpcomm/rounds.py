"""A round of a proof: rows whose every word is known, through the very calls and buffers that merges use."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from dcpcomm import pattern, topology
from dcpcomm.combine.engine import by_destination
from dcpcomm.combine.wire import wire_views
from dcpcomm.errors import TransportTimeout
from dcpcomm.graphs import captured
from dcpcomm.group import Group
from dcpcomm.reference import merge_partials
from dcpcomm.transport import MergeShape, MergeTransport
from dcpcomm.workspace import Workspace

__all__ = ["TURNS", "Rounds", "Wrong"]

TURNS, _EAGER_TURN = 4, 2  # rounds of a channel from one captured graph, and which of them is eager all the same
_POISON = 0xA5
_Run = Callable[..., Any]


class Wrong(Exception):
    """Something else arrived than was sent. `what`: says it, or finds it out, which takes longer than a round."""

    def __init__(self, what: str | Callable[[], str]) -> None:
        super().__init__("wrong bits")
        self.what = what

    def __str__(self) -> str:
        return self.what if isinstance(self.what, str) else self.what()


class Rounds:
    """The rounds of one proof, by their numbers, which are the same on all ranks.

    Args:
        replayed: of those, rounds that replay a graph, `TURNS` for each channel.
        ends: by `time.monotonic`, when whoever waits for a rank gives up.
    """

    def __init__(
        self,
        transport: MergeTransport,
        group: Group,
        shape: MergeShape,
        workspace: Workspace,
        replayed: range,
        ends: float,
    ) -> None:
        self._transport, self._group, self._shape, self._workspace = transport, group, shape, workspace
        self._device, self._replayed, self._ends = workspace.device, replayed, ends
        self._replays = [_Replayed(workspace.device, self._captures_of(channel)) for channel in range(shape.channels)]
        self.merges = transport.fused_merge is not None or transport.fused is not None
        views = transport.capabilities.layout == "view"
        self._play = self._merges if self.merges else self._views if views else self._blocks

    def play(self, number: int, tokens: int, width: int) -> None:
        """Round `number`, of `tokens` rows of `width`.

        Raises:
            Wrong: something else arrived here than was sent.
            TransportTimeout: a rank did not come.
        """
        if number not in self._replayed:
            self._play(number, number % len(self._replays), tokens, width, _eagerly)
            return
        channel, turn = divmod(number - self._replayed.start, TURNS)
        self._play(number, channel, tokens, width, _eagerly if turn == _EAGER_TURN else self._replays[channel])

    def _captures_of(self, channel: int) -> Callable[[], None]:
        """What waits until all ranks have captured: a capture takes memory from the driver, which waits for the
        device, and in a process of several ranks for a peer's replay that waits for this rank.
        """

        def meet() -> None:
            if self._group.loopback is None:
                return
            store = self._group.store(f"captured/{channel}")
            store.set(str(self._group.rank), "1")
            late = self._group.peers
            while late := [rank for rank in late if not store.check([str(rank)])]:
                if time.monotonic() > self._ends:
                    raise TransportTimeout(f"rank {', '.join(map(str, late))} captured nothing in time", tuple(late))
                time.sleep(0.0005)

        return meet

    def _arrived(self, channel: int) -> None:
        """Wait for the rows, and hear what the transport found out."""
        if topology.on_gpu(self._device):
            torch.cuda.current_stream(self._device).synchronize()
        self._transport.poll(channel)

    def _blocks(self, number: int, channel: int, tokens: int, width: int, run: _Run) -> None:
        transport, group, shape, workspace = self._transport, self._group, self._shape, self._workspace
        n, rows = group.size, shape.rows_per_destination(tokens, group.size)
        regions = workspace.regions()
        views = wire_views(
            regions[f"send[{channel}]"],
            regions[f"recv[{channel}]"],
            n,
            rows,
            1,
            width,
            shape.dtype,
            transport.capabilities.ragged,
        )
        send, recv = (one.blocks for one in views)
        nbytes = (1 + rows) * send.shape[2]
        for destination in range(n):
            send[destination].view(-1).copy_(pattern.block(nbytes, group.rank, destination, number, workspace.device))
        recv.fill_(_POISON)
        arrived = run(lambda send, recv: transport.exchange(send, channel, recv=recv), send, recv)
        self._arrived(channel)
        if tuple(arrived.shape) != tuple(send.shape):
            raise Wrong(f"exchange returned shape {tuple(arrived.shape)}; expected {tuple(send.shape)}")
        for source in sorted(group.peers):
            self._compare(arrived[source].reshape(-1), source, number, send.shape[2])

    def _views(self, number: int, channel: int, tokens: int, width: int, run: _Run) -> None:
        group, shape, device = self._group, self._shape, self._device
        n = group.size
        t, h = shape.result_rows(tokens, n)
        size = t * h * width * shape.dtype.itemsize

        def fields(source: int, destination: int) -> tuple[torch.Tensor, torch.Tensor]:
            raw = pattern.block(size + 4 * t * h, source, destination, number, device)
            return raw[:size].view(shape.dtype).view(t, h, width), raw[size:].view(torch.float32).view(t, h)

        outs, lses = zip(*(fields(group.rank, destination) for destination in range(n)), strict=True)
        # Strided as a merge's views are: the destination's rows lie side by side in neither of the two.
        out, lse = torch.stack(outs).transpose(0, 1), torch.stack(lses).transpose(0, 1)
        got_out, got_lse = run(lambda out, lse: self._transport.exchange((out, lse), channel), out, lse)
        self._arrived(channel)
        for source in range(n):
            parts = (got_out[:, source].contiguous(), got_lse[:, source].contiguous())
            raw = torch.cat([part.view(-1).view(torch.uint8) for part in parts])
            self._compare(raw, source, number, width * shape.dtype.itemsize, t * h)

    def _compare(self, got: torch.Tensor, source: int, number: int, row: int, rows: int | None = None) -> None:
        """Raise `Wrong` with how much of `got`, uint8, is wrong, where it begins, and what is there instead.

        Args:
            row: bytes of one.
            rows: how many there are; behind them are float32 LSEs. None: all of it is rows.
        """
        # Both on its device: a soak is for more bytes than a host makes in the time.
        want = pattern.block(got.numel(), source, self._group.rank, number, got.device)
        if not torch.equal(got, want):
            whole = len(got) // row if rows is None else rows
            at = source, self._group.rank, number, self._group.size
            raise Wrong(functools.partial(pattern.difference, got, want, *at, row, whole, _POISON))

    def _merges(self, number: int, channel: int, tokens: int, width: int, run: _Run) -> None:
        """Random partials, which every rank can make, against the oracle. In half of the rows one rank alone has
        something, and its bits must come through.
        """
        transport, group, shape, device = self._transport, self._group, self._shape, self._device
        n, ulp = group.size, 2.0 ** {torch.float16: -10, torch.bfloat16: -7, torch.float32: -20}[shape.dtype]
        generator = torch.Generator().manual_seed(number)
        outs = torch.randn(n, tokens, shape.num_heads, width, generator=generator).to(shape.dtype)
        lses = torch.randn(n, tokens, shape.num_heads, generator=generator)
        lses[torch.rand(lses.shape, generator=generator) < 0.1] = -torch.inf
        alone = torch.rand(lses.shape[1:], generator=generator) < 0.5
        who = torch.randint(0, n, lses.shape[1:], generator=generator)
        for rank in range(n):
            lses[rank][alone & (who != rank)] = -torch.inf
        outs[lses == -torch.inf] = torch.nan
        mine = outs[group.rank].to(device), lses[group.rank].to(device)
        out, lse = run(functools.partial(_fused, transport, channel), *mine)
        self._arrived(channel)
        wants = [one[group.rank] for one in merge_partials(outs, lses, lse_base=shape.lse_base, scatter=shape.scatter)]
        exact = by_destination(alone, shape.scatter, n)[group.rank] if transport.capabilities.deterministic else None
        for what, got, want in (("out", out, wants[0]), ("lse", lse, wants[1])):
            got = got.cpu().double().reshape(want.shape)
            close = torch.isclose(got, want, rtol=2 * ulp if what == "out" else 1e-5, atol=ulp)
            if what == "out" and exact is not None:
                close &= (got == want) | ~exact.unsqueeze(-1)
            if not bool(close.all()):
                place = tuple(int(i) for i in (~close).nonzero()[0])
                raise Wrong(
                    f"rank {group.rank}, round {number}: merged {what} at {place} is {float(got[place])}, the oracle "
                    f"says {float(want[place])}; {int((~close).sum())} of {close.numel()} are wrong"
                )


class _Replayed:
    """Calls a step by replaying the graph in which its first call was captured, on that call's tensors.

    Args:
        meet: returns when all ranks have captured.
    """

    def __init__(self, device: torch.device, meet: Callable[[], None]) -> None:
        self._device, self._meet = device, meet
        self._graph: Any = None
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._result: Any = None

    def __call__(self, step: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        if self._graph is None:
            self._tensors = tensors

            def captured_step() -> None:
                self._result = step(*tensors)

            self._graph = captured(captured_step, self._device)
            self._meet()
        for kept, new in zip(self._tensors, tensors, strict=True):
            if kept.data_ptr() != new.data_ptr():
                kept.copy_(new)
        self._graph.replay()
        return self._result


def _eagerly(step: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    return step(*tensors)


def _fused(transport: MergeTransport, channel: int, out: torch.Tensor, lse: torch.Tensor) -> Any:
    if transport.fused is not None:
        return transport.fused.merge_once(out, lse, channel)
    return transport.fused_merge(out, lse, channel)
