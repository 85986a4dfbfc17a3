"""One channel: its buffers, its ordered stream of calls, and what became of them.

Every call of a channel has an ordinal, and every message carries it in a header with the call's tag and B. Ranks whose
headers differ never merge: they raise `CallMismatch`, and the channel carries no call until `DCPMerger.reset()`. A
rank whose call raised before it sent sends a header alone, so that its peers raise with its reason and all stay in
step.
"""

from __future__ import annotations

import threading

import numpy as np
import torch

from dcpcomm.combine.cpu import combine, pack
from dcpcomm.combine.torch_engine import clean_lse
from dcpcomm.combine.wire import KIND_CANCELLED, Header, WireViews, wire_views
from dcpcomm.decision import Decision
from dcpcomm.errors import CallMismatch, DCPCommError, TransportTimeout
from dcpcomm.group import Group
from dcpcomm.transport import MergeShape, MergeTransport
from dcpcomm.watchdog import Watchdog

__all__ = ["Channel"]

_VIEWS_KEPT = 1024


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
        send: torch.Tensor | None,
        recv: torch.Tensor | None,
    ) -> None:
        self.index = index
        self.broken: DCPCommError | None = None
        self._group, self._shape, self._watchdog = group, shape, watchdog
        self._decision, self._transports = decision, transports
        self._send, self._recv = send, recv
        self._ordinal = 0
        self._busy = threading.Lock()
        self._views: dict[tuple[str, int, int, int], tuple[WireViews, WireViews]] = {}

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
        if self.broken is not None:
            self._busy.release()
            raise self.refusal(self.broken)
        ordinal, self._ordinal = self._ordinal, self._ordinal + 1
        return ordinal

    def refusal(self, broken: DCPCommError) -> DCPCommError:
        """What a broken channel raises: the error that broke it, and how to go on."""
        message = (
            f"rank {self._group.rank}: channel {self.index} carries no call until reset() on all ranks, because of an "
            f"earlier error: {broken}"
        )
        if isinstance(broken, TransportTimeout):
            return TransportTimeout(message, broken.ranks)
        return type(broken)(message)

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return self._busy.locked()

    def leave(self) -> None:
        """End the call that `enter` began."""
        self._busy.release()

    def cancel(self, ordinal: int, tokens: int, error: Exception) -> None:
        """This rank's call, of `tokens` rows as far as it can be told, raised before it sent: let the peers raise too
        instead of waiting.
        """
        if not self._transports or tokens == 0:
            return  # of no rows, the peers send none either
        self._group.control.note(self._cancel_key(ordinal), f"{type(error).__name__}: {error}")
        transport = self._transports[self._decision.transport_for(tokens)]
        if not transport.capabilities.ragged or self._send is None:
            return  # they find the note when their deadline passes
        header = Header(ordinal=ordinal, tag=0, tokens=0, chunk=0, width=0, kind=KIND_CANCELLED)
        views = self._buffers(transport, 0, 0, self._shape.head_dim)[0]
        views.words[:] = header.words()
        try:
            transport.cancel(views.blocks, self.index)
        except Exception as second:
            self._break(DCPCommError(f"telling the peers about {error} failed: {second}"))

    def merge(
        self, partial_out: torch.Tensor, lse: torch.Tensor, header: Header, want_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Exchange and combine one chunk.

        Args:
            partial_out: `[N, t, h, D]`, destination first, any strides.
            lse: `[N, t, h]`, any float dtype; -inf, NaN or +inf where the row is empty here.

        Returns:
            out `[t, h, D]`, freshly allocated, and the LSE `[t, h]` float32 or None.

        Raises:
            CallMismatch: a peer is in another call, or raised instead of sending.
            TransportTimeout: a peer did not arrive.
        """
        base, dtype = self._shape.lse_base, self._shape.dtype
        if not self._transports:
            return combine(list(partial_out), list(lse), base, dtype, want_lse)

        transport = self._transports[self._decision.transport_for(header.tokens)]
        self._watchdog.begin(self.index, header)
        try:
            if transport.fused_merge is not None:
                return self._fused(transport, partial_out, clean_lse(lse, None))
            if transport.capabilities.layout == "view":
                views = (partial_out.transpose(0, 1), clean_lse(lse, None).transpose(0, 1))
                arrived, lses = transport.exchange(views, self.index)
                return combine(arrived.unbind(1), lses.unbind(1), base, dtype, want_lse)
            rows, lses = self._exchange_packed(transport, partial_out, lse, header)
            return combine(rows, lses, base, dtype, want_lse)
        except TransportTimeout as error:
            raise self._break(self._timed_out(transport, error, header)) from error
        except CallMismatch:
            raise
        except Exception as error:
            raise self._break(
                DCPCommError(
                    f"rank {self._group.rank}: transport {transport.name!r} raised in {header} on channel "
                    f"{self.index}: {type(error).__name__}: {error}"
                )
            ) from error
        except BaseException as error:  # an interrupt in mid-exchange: half of the messages may be under way
            self._break(DCPCommError(f"{type(error).__name__} interrupted {header}"))
            raise
        finally:
            self._watchdog.end(self.index, header)

    def _exchange_packed(
        self, transport: MergeTransport, partial_out: torch.Tensor, lse: torch.Tensor, header: Header
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """By source: rows `[t, h, D]` and LSEs `[t, h]`, this rank's own straight from its partials."""
        rank = self._group.rank
        _, t, h, _ = partial_out.shape
        send, recv = self._buffers(transport, t, h, header.width)
        pack(send, partial_out, lse, rank, header)
        arrived = transport.exchange(send.blocks, self.index, recv=recv.blocks)
        if arrived is not recv.blocks:
            recv = WireViews(arrived, t, h, header.width, self._shape.dtype)
        words = header.words()
        if any(tuple(theirs) != words for source, theirs in enumerate(recv.words.tolist()) if source != rank):
            self._refuse(recv.words, header)
        rows, lses = list(recv.payload), list(recv.lse)
        rows[rank], lses[rank] = partial_out[rank], lse[rank]
        return rows, lses

    def _fused(
        self, transport: MergeTransport, partial_out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand the chunk, as `[B, H, D]`, to a transport that merges by itself."""
        if self._shape.scatter == "heads":
            whole, whole_lse = partial_out.transpose(0, 1).flatten(1, 2), lse.transpose(0, 1).flatten(1, 2)
        elif self._shape.scatter == "tokens":
            whole, whole_lse = partial_out.flatten(0, 1), lse.flatten(0, 1)
        else:
            whole, whole_lse = partial_out[0], lse[0]
        out, out_lse = transport.fused_merge(whole, whole_lse, self.index)
        return out, out_lse

    def _buffers(self, transport: MergeTransport, t: int, h: int, width: int) -> tuple[WireViews, WireViews]:
        """Views of the send and receive regions for `t * h` rows of `width` per destination."""
        key = (transport.name, t, h, width)
        found = self._views.get(key)
        if found is None:
            assert self._send is not None
            assert self._recv is not None
            if len(self._views) >= _VIEWS_KEPT:
                self._views.clear()
            n, dtype, ragged = self._group.size, self._shape.dtype, transport.capabilities.ragged
            found = self._views[key] = wire_views(self._send, self._recv, n, t, h, width, dtype, ragged)
        return found

    def _refuse(self, words: np.ndarray, mine: Header) -> None:
        """Raise for headers that aren't this rank's; break the channel unless the peers merely called this very call
        off.
        """
        rank = self._group.rank
        cancelled: list[str] = []
        other: list[str] = []
        for source in range(self._group.size):
            theirs = Header.from_words(words[source])
            if theirs == mine or source == rank:
                continue
            if theirs.kind == KIND_CANCELLED:
                reason = self._group.control.read_note(source, self._cancel_key(theirs.ordinal))
                said = (
                    f"rank {source} raised in call {theirs.ordinal} instead of sending its rows: "
                    f"{reason or 'reason not known'}"
                )
                (cancelled if theirs.ordinal == mine.ordinal else other).append(said)
            else:
                other.append(f"rank {source} came with {theirs}")
        if other:
            raise self._break(
                CallMismatch(
                    f"rank {rank}: ranks met in different calls on channel {self.index}: rank {rank} came with {mine}; "
                    f"{'; '.join(other + cancelled)}. Nothing was merged. Did a rank skip a merge, or was B different "
                    "there?"
                )
            )
        raise CallMismatch(
            f"rank {rank}: {mine} on channel {self.index} was called off: {'; '.join(cancelled)}. Nothing was merged; "
            "the next call may follow"
        )

    def _timed_out(self, transport: MergeTransport, error: TransportTimeout, call: Header) -> DCPCommError:
        rank = self._group.rank
        self._group.control.note("raised", f"raised in {call} on channel {self.index}: {error}")
        for late in error.ranks:
            reason = self._group.control.read_note(late, self._cancel_key(call.ordinal))
            if reason:  # over a transport that could not tell us sooner
                return CallMismatch(
                    f"rank {rank}: {call} on channel {self.index} was called off: rank {late} raised in call "
                    f"{call.ordinal} instead of sending its rows: {reason}. Nothing was merged"
                )
            # With another B it may be waiting over another transport, where its header can't be met.
            theirs = self._watchdog.call_of(late, self.index)
            if theirs is not None and theirs.ordinal == call.ordinal and theirs != call:
                return CallMismatch(
                    f"rank {rank}: ranks waited in different calls on channel {self.index}: rank {rank} in {call}; "
                    f"rank {late} in {theirs}. Nothing was merged"
                )
        return TransportTimeout(
            f"rank {rank}: {call} on channel {self.index} over {transport.name!r}: {error}. Last heard: "
            f"{self._watchdog.last_words(error.ranks)}",
            error.ranks,
        )

    def _cancel_key(self, ordinal: int) -> str:
        """Where the reason is noted. Ordinals begin again with a reset, so the generation is in it."""
        return f"cancel/{self._group.generation}/{self.index}/{ordinal}"

    def _break(self, error: DCPCommError) -> DCPCommError:
        self.broken = error
        return error
