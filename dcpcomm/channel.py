"""One channel: its buffers, its ordered stream of calls, and what became of them.

Every call of a channel has an ordinal, and every message carries it in a header with the call's tag and B. Ranks whose
headers differ never merge: they raise `CallMismatch`, and the channel carries no call until `DCPMerger.reset()`. A
rank whose call raised before it sent sends a header alone, so that its peers raise with its reason and all stay in
step.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dcpcomm import topology
from dcpcomm.again import Again
from dcpcomm.blame import Blame
from dcpcomm.combine.engine import Engine, Failure, Layout, PackedCall, Partials
from dcpcomm.combine.wire import KIND_CANCELLED, Header, WireViews, wire_views
from dcpcomm.decision import Decision
from dcpcomm.errors import CallMismatch, DCPCommError, TransportTimeout
from dcpcomm.group import Group
from dcpcomm.transport import MergeShape, MergeTransport
from dcpcomm.watchdog import Watchdog

if TYPE_CHECKING:
    from dcpcomm.combine.driver import Launch
    from dcpcomm.combine.fused import FusedCall

__all__ = ["Channel"]

_CALLS_KEPT = 1024
_CALLS_KEPT_ELSEWHERE = 8  # they keep a transport's memory alive, which may be another in every call


class Channel:
    """Calls of one channel, over one connected transport.

    Args:
        decision: which transport carries a merge of how many rows.
        transports: the connected ones, by name; none in a group of one rank.
        send, recv: uint8, this channel's regions of the merger's workspace; None where the transport needs none.
    """

    def __init__(
        self,
        index: int,
        group: Group,
        shape: MergeShape,
        decision: Decision,
        transports: dict[str, MergeTransport],
        watchdog: Watchdog,
        engine: Engine,
        device: torch.device,
        send: torch.Tensor | None,
        recv: torch.Tensor | None,
    ) -> None:
        self.index = index
        self.broken: DCPCommError | None = None
        self._group, self._shape, self._watchdog = group, shape, watchdog
        self._decision, self._transports = decision, transports
        self._engine, self._device, self._on_gpu = engine, device, topology.on_gpu(device)
        self._blame = Blame(group, watchdog, index, self._on_gpu)
        self._carriers: dict[int, MergeTransport] = {}  # by B
        self._device_index = device.index
        fused = [one.fused for one in transports.values() if one.fused is not None] if self._on_gpu else []
        # Words that a GPU writes, 0 as long as there is nothing to tell; transports that have none are asked.
        self._states = [one.state(index) for one in (*fused, engine)] if self._on_gpu else []
        self._quiet_polls = [one.poll for one in transports.values() if one.fused is None] if self._on_gpu else []
        self._polls = [(one.fused or one).poll for one in transports.values()]
        self._heads = shape.result_rows(group.size, group.size)[1]
        self._send, self._recv = send, recv
        self._ordinal = 0
        self._busy = threading.Lock()
        self._told: Failure | None = None
        self._device_before: int | None = None
        self._calls: dict[tuple[Any, ...], tuple[PackedCall, WireViews, WireViews]] = {}
        self._fused_calls: dict[tuple[Any, ...], FusedCall] = {}
        self._calls_elsewhere: dict[tuple[Any, ...], tuple[PackedCall, WireViews, WireViews]] = {}

    def enter(self) -> int:
        """Begin a call; its ordinal. `leave` must follow.

        Raises:
            DCPCommError: another thread is inside a call of this channel, or an earlier call broke it.
        """
        if not self._busy.acquire(blocking=False):
            # The peers' calls go on counting: without this the next one here would meet another of theirs.
            self.broken = self.broken or DCPCommError(f"two threads called channel {self.index} at once")
            raise DCPCommError(
                f"rank {self._group.rank}: channel {self.index} is inside a call of another thread; a channel is one "
                "ordered stream of calls: use one channel per micro-batch in flight (MergeShape.channels)"
            )
        try:
            self._look()  # a call that was called off doesn't keep the next one from coming: the peers make it too
        except BaseException:
            self._busy.release()
            raise
        if self._on_gpu and topology.current_device_index() != self._device.index:
            self._device_before = torch.cuda.current_device()  # kernels are launched on the current one
            torch.cuda.set_device(self._device)
        ordinal, self._ordinal = self._ordinal, self._ordinal + 1
        return ordinal

    def enter_quietly(self) -> int | None:
        """As `enter`; None, and nothing is done, where there is something to tell or the device is another."""
        for state in self._states:
            if state[0]:
                return None
        if self.broken is not None or (self._on_gpu and topology.current_device_index() != self._device_index):
            return None
        if not self._busy.acquire(False):
            return None
        try:
            for poll in self._quiet_polls:
                poll(self.index)
        except TransportTimeout:  # told by `enter`
            self._busy.release()
            return None
        ordinal, self._ordinal = self._ordinal, self._ordinal + 1
        return ordinal

    def check(self) -> None:
        """Raise what broke this channel, and once what a GPU has noted of a call that was called off. No wait for the
        device.
        """
        self._look()
        if self._told is not None:
            failure, self._told = self._told, None
            self._refuse(failure.came, failure.mine)

    def _look(self) -> None:
        """Raise what broke this channel; on a GPU, after the call that it broke had returned. What a GPU has noted of a
        call that was called off is kept for `check`: the channel is whole.
        """
        if self.broken is None and self._on_gpu:
            try:
                self._poll()
                failure = self._engine.failure(self.index)
                if failure is not None:
                    self._poll()  # rows that didn't come in time have no header either
                    self._engine.settle(self.index)
                    if not self._called_off(failure):
                        self._refuse(failure.came, failure.mine)
                    self._told = self._told or failure
            except TransportTimeout as error:
                last = self._watchdog.last_words(error.ranks)
                text = f"rank {self._group.rank}: channel {self.index}: {error}. Last heard: {last}"
                self._group.control.note("raised", text)
                call = self._watchdog.own_call(self.index)
                mismatch = self._blame.other_call(error.ranks, call) if call is not None else None
                self._break(mismatch or TransportTimeout(text, error.ranks))
            except CallMismatch as error:  # it is `broken` now
                self._group.control.note("raised", str(error))
        if self.broken is not None:
            raise self._blame.refusal(self.broken)

    def _poll(self) -> None:
        for poll in self._polls:
            poll(self.index)

    def _called_off(self, failure: Failure) -> bool:
        """Whether no rank was in another call, but some had no rows to send."""
        headers = (Header.from_words(one) for one in failure.came)
        return all(
            one == failure.mine or (one.kind, one.ordinal) == (KIND_CANCELLED, failure.mine.ordinal) for one in headers
        )

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return self._busy.locked()

    def leave(self) -> None:
        """End the call that `enter` began."""
        if self._device_before is not None:
            torch.cuda.set_device(self._device_before)
            self._device_before = None
        self._busy.release()

    def cancel(self, ordinal: int, tokens: int, width: int, error: Exception) -> None:
        """This rank's call, of `tokens` rows of `width` as far as it can be told, raised before it sent: let the peers
        raise too instead of waiting.
        """
        if not self._transports or tokens == 0:
            return  # of no rows, the peers send none either
        self._group.control.note(self._blame.cancel_key(ordinal), f"{type(error).__name__}: {error}")
        transport = self._transports[self._decision.transport_for(tokens)]
        if transport.fused is None and (self._send is None or not transport.needs_workspace(self._on_gpu)):
            return  # they find the note when their deadline passes
        try:
            if self._on_gpu:
                self._call_off(transport, tokens, width)
            elif transport.capabilities.ragged:
                header = Header(ordinal=ordinal, tag=0, tokens=0, chunk=0, width=0, kind=KIND_CANCELLED)
                views = self._buffers(transport, 0, 0, self._shape.head_dim)[0]
                views.words[:] = header.words()
                transport.cancel(views.blocks, self.index)
        except Exception as second:
            self._break(DCPCommError(f"telling the peers about {error} failed: {second}"))

    def _call_off(self, transport: MergeTransport, tokens: int, width: int) -> None:
        """On a GPU messages have the length that the peers await: blocks of `tokens` rows, of which the headers alone
        are written, or none in one launch. The host doesn't wait for the peers.
        """
        most = self._shape.tokens_per_exchange(self._group.size)
        for chunk, begin in enumerate(range(0, tokens, most)):
            part = min(most, tokens - begin)
            t = self._shape.result_rows(part, self._group.size)[0]
            layout = Layout(tokens, t, width, (self._shape.num_heads * width, width, 1), (1, 1), torch.float32)
            if transport.fused is not None:
                header = Header(ordinal=0, tag=0, tokens=tokens, chunk=chunk, width=width, kind=KIND_CANCELLED)
                self._fused_call(transport, layout).call_off(header)
                continue
            call, send, recv = self._call(transport, layout, None)
            call.call_off(Header(ordinal=0, tag=0, tokens=0, chunk=0, width=0, kind=KIND_CANCELLED))
            transport.exchange(send.blocks, self.index, recv=recv.blocks)

    def room(
        self, tokens: int, t: int, width: int, out: torch.Tensor | None, want_lse: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Where the result of a call of `tokens` rows goes: `out`, or memory for `[t, h, width]`, and for the LSE
        `[t, h]` float32 if it is wanted. Asked for before anything is sent: there may be none left. None for what the
        transport brings itself.
        """
        transport = self._carrier(tokens) if self._transports else None
        if transport is not None and transport.fused_merge is not None:
            return out, None
        h, device = self._heads, self._device
        if out is None:
            out = torch.empty((t, h, width), dtype=self._shape.dtype, device=device)
        return out, torch.empty((t, h), dtype=torch.float32, device=device) if want_lse else None

    def _carrier(self, tokens: int) -> MergeTransport:
        """What carries calls of so many rows."""
        transport = self._carriers.get(tokens)
        if transport is None:
            transport = self._carriers[tokens] = self._transports[self._decision.transport_for(tokens)]
        return transport

    def merge(
        self, partials: Partials, start: int, t: int, header: Header, out: torch.Tensor | None,
        out_lse: torch.Tensor | None, want_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Exchange and combine rows `start` to `start + t` of the result: one chunk.

        Args:
            out: `[t, h, D]` to write to, any strides; `out_lse`: `[t, h]`; as from `room`.

        Returns:
            the result, and its LSE if it is wanted.

        Raises:
            CallMismatch: a peer is in another call, or raised instead of sending.
            TransportTimeout: a peer did not arrive.
        """
        if not self._transports:
            partials = partials if partials.counts is None else partials.cleaned()
            return self._combine(*partials.part(self._shape.scatter, 1, start, t), out, out_lse)

        transport = self._carrier(header.tokens)
        self._watchdog.begin(self.index, header)
        try:
            if transport.fused_merge is not None:
                merged, merged_lse = self._fused(transport, partials, start, t)
                return merged if out is None else out.copy_(merged), merged_lse if want_lse else None
            if transport.capabilities.layout == "view":
                # Every engine takes NaN and +inf in an LSE for -inf itself: what needs no mask costs no launch.
                plain = partials.counts is None and partials.lse.dtype == torch.float32
                views = partials if plain else partials.cleaned()
                rows, lses = views.part(self._shape.scatter, self._group.size, start, t)
                rows, lses = transport.exchange((rows.transpose(0, 1), lses.transpose(0, 1)), self.index)
                return self._combine(rows.transpose(0, 1), lses.transpose(0, 1), out, out_lse)
            assert out is not None
            layout = _layout(partials, header, t)
            if transport.fused is None:
                self._packed(transport, layout, partials, start, header, out, out_lse)
            else:
                self._fused_call(transport, layout).merge(partials, start, header, out, out_lse)
            return out, out_lse
        except TransportTimeout as error:
            raise self._break(self._blame.timeout(transport.name, error, header)) from error
        except CallMismatch:
            raise
        except Exception as error:
            raise self._failed(transport.name, header, error) from error
        except BaseException as error:  # an interrupt in mid-exchange: half of the messages may be under way
            self._break(DCPCommError(f"{type(error).__name__} interrupted {header}"))
            raise
        finally:
            self._watchdog.end(self.index, header)

    def again(self, partials: Partials, header: Header, merged: torch.Tensor, want_lse: bool) -> Again | None:
        """What makes calls like one of one chunk that went well; None in a group of one rank."""
        transport = self._carriers.get(header.tokens)
        if transport is None:
            return None
        fused = transport.fused is not None
        call = self._fused_call(transport, _layout(partials, header, len(merged))) if fused else None
        return Again(self, call, transport.name, partials, merged, want_lse)

    def launch(self, launch: Launch, stream: int, transport: str, header: Header) -> None:
        """A call that has been entered, in one launch.

        Raises:
            DCPCommError: the driver refused it; the channel is broken.
        """
        self._watchdog.begin(self.index, header)
        try:
            launch(stream)
        except Exception as error:
            raise self._failed(transport, header, error) from error

    def _failed(self, transport: str, header: Header, error: Exception) -> DCPCommError:
        return self._break(
            DCPCommError(
                f"rank {self._group.rank}: transport {transport!r} raised in {header} on channel {self.index}: "
                f"{type(error).__name__}: {error}"
            )
        )

    def _packed(
        self, transport: MergeTransport, layout: tuple[Any, ...], partials: Partials, start: int, header: Header,
        out: torch.Tensor, out_lse: torch.Tensor | None,
    ) -> None:  # fmt: skip
        call, send, recv = self._call(transport, layout, None)
        call.pack(partials, start, header)
        arrived = transport.exchange(send.blocks, self.index, recv=recv.blocks)
        if arrived is not recv.blocks:
            call, _, recv = self._call(transport, layout, arrived)
        if not call.combine(partials, start, header, out, out_lse):
            self._refuse(recv.words, header)

    def _fused_call(self, transport: MergeTransport, layout: tuple[Any, ...]) -> FusedCall:
        """What merges calls of this layout in one launch."""
        key = transport.name, layout
        found = self._fused_calls.get(key)
        if found is None:
            if len(self._fused_calls) >= _CALLS_KEPT:
                self._fused_calls.clear()
            found = self._fused_calls[key] = transport.fused.call(self._engine, self.index, Layout(*layout))
        return found

    def _combine(
        self, rows: torch.Tensor, lses: torch.Tensor, out: torch.Tensor | None, out_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert out is not None
        self._engine.combine(rows, lses, out, out_lse)
        return out, out_lse

    def _fused(
        self, transport: MergeTransport, partials: Partials, start: int, t: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand the chunk, as `[B, H, D]`, to a transport that merges by itself."""
        if not (transport.cleans and partials.counts is None and partials.lse.dtype == torch.float32):
            partials = partials.cleaned()
        if self._shape.scatter == "tokens":
            rows, lses = partials.part("tokens", self._group.size, start, t)
            whole, whole_lse = rows.flatten(0, 1), lses.flatten(0, 1)
        else:
            whole, whole_lse = partials.out[start : start + t], partials.lse[start : start + t]
        out, out_lse = transport.fused_merge(whole, whole_lse, self.index)
        return out, out_lse

    def _call(
        self, transport: MergeTransport, layout: tuple[Any, ...], arrived: torch.Tensor | None
    ) -> tuple[PackedCall, WireViews, WireViews]:
        """What packs and combines calls of this layout, the buffer it sends and the one it receives: the workspace's,
        or what a transport that has its own `arrived` in.

        Args:
            layout: a `Layout`, or its fields: making one costs more than finding the call.
        """
        key: tuple[Any, ...] = transport.name, layout
        calls = self._calls
        if arrived is not None:
            calls, key = self._calls_elsewhere, (*key, arrived.data_ptr(), arrived.stride())
        found = calls.get(key)
        if found is None:
            if len(calls) >= (_CALLS_KEPT if arrived is None else _CALLS_KEPT_ELSEWHERE):
                calls.clear()
            like = Layout(*layout)
            send, recv = self._buffers(transport, like.t, self._heads, like.width)
            if arrived is not None:
                recv = WireViews(arrived, like.t, self._heads, like.width, self._shape.dtype)
            found = calls[key] = self._engine.packed_call(self.index, like, send, recv), send, recv
        return found

    def _buffers(self, transport: MergeTransport, t: int, h: int, width: int) -> tuple[WireViews, WireViews]:
        """Views of the send and receive regions for `t * h` rows of `width` per destination."""
        assert self._send is not None
        assert self._recv is not None
        n, dtype, ragged = self._group.size, self._shape.dtype, transport.capabilities.ragged
        return wire_views(self._send, self._recv, n, t, h, width, dtype, ragged)

    def _refuse(self, words: np.ndarray, mine: Header) -> None:
        """Raise for headers that aren't this rank's."""
        error, breaks = self._blame.mismatch(words, mine)
        raise self._break(error) if breaks else error

    def _break(self, error: DCPCommError) -> DCPCommError:
        self.broken = error
        return error


def _layout(partials: Partials, header: Header, t: int) -> tuple[Any, ...]:
    """The fields of a `Layout`, for `t` rows of the result."""
    return header.tokens, t, header.width, partials.out.stride(), partials.lse.stride(), partials.lse.dtype
