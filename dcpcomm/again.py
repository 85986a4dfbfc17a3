"""A merge whose tensors lie as those of a call that went well: what was found right then isn't looked at again.

It is what an engine's step calls eagerly, layer by layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from dcpcomm.aliasing import reach
from dcpcomm.alike import Seen
from dcpcomm.combine.engine import Partials
from dcpcomm.combine.params import counts_of
from dcpcomm.combine.wire import KIND_ROWS, Header
from dcpcomm.rows import RowCounts

if TYPE_CHECKING:
    from dcpcomm.channel import Channel
    from dcpcomm.combine.driver import Launch
    from dcpcomm.combine.fused import FusedCall
    from dcpcomm.combine.structs import FusedParams

__all__ = ["Again", "Known", "layout_of"]

Entry = TypeVar("Entry", bound=Seen)
_TAGS_END = 2**31
_LAYOUTS_KEPT = 1024
_BOUND_KEPT = 16  # one for each alignment, of which there are few


def layout_of(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    valid_counts: torch.Tensor | None,
    seq_lens: Any,
    query_start_loc: Any,
    out: torch.Tensor | None,
    return_lse: bool,
    channel: int,
) -> Any:
    """A key that differs where a check could end otherwise, but for what `Again.merge` looks at itself. Whatever is no
    tensor raises, and so does one of `seq_lens` and `query_start_loc` without the other.
    """
    # Written out: a helper for each tensor costs as much as the lookup.
    return (
        channel, return_lse,
        partial_out.shape, partial_out.stride(), partial_out.dtype, partial_out.device,
        partial_lse.shape, partial_lse.stride(), partial_lse.dtype, partial_lse.device,
        None if out is None else (out.shape, out.stride(), out.dtype, out.device),
        None if valid_counts is None else (
            valid_counts.shape, valid_counts.stride(), valid_counts.dtype, valid_counts.device
        ),
        None if seq_lens is None and query_start_loc is None else (
            seq_lens.shape, seq_lens.stride(), seq_lens.dtype, seq_lens.device,
            query_start_loc.shape, query_start_loc.stride(), query_start_loc.dtype, query_start_loc.device,
        ),
    )  # fmt: skip


class Again(Seen):
    """Merges of one channel, all of one layout.

    Args:
        channel: where the call that went well was made.
        call: what merges calls of its layout in one launch, where that is how its transport does.
        transport: the name.
        partials: what it brought.
        merged: its result.
    """

    def __init__(
        self,
        channel: Channel,
        call: FusedCall | None,
        transport: str,
        partials: Partials,
        merged: torch.Tensor,
        want_lse: bool,
    ) -> None:
        super().__init__(want_lse)
        self._channel, self._call, self._transport = channel, call, transport
        self._tokens, self._width = len(partials.out), int(partials.out.shape[2])
        self._result, self._dtype, self._device = merged.shape, merged.dtype, merged.device
        self._rows_reach, self._lse_reach, self._out_reach = reach(partials.out), reach(partials.lse), reach(merged)
        valid, lens, starts = partials.counts or (None, None, None)
        first = valid if valid is not None else lens
        self._counts_reach = 0 if first is None else reach(first)
        self._starts_reach = 0 if starts is None else reach(starts)
        self._bound: dict[Any, tuple[Launch, FusedParams]] = {}

    def merge(
        self,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        valid_counts: torch.Tensor | None,
        seq_lens: torch.Tensor | None,
        query_start_loc: torch.Tensor | None,
        out: torch.Tensor | None,
        tag: Any,
        own: tuple[int, int],
        looked_at: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
        """As `DCPMerger.merge`. None, and nothing is done, where there is something to tell or to look at: that takes
        the long way.

        Args:
            own: where the library's own memory begins and ends.
            looked_at: by `is_like`.
        """
        try:
            rows, lse = partial_out.data_ptr(), partial_lse.data_ptr()
            counts = starts = 0
            if valid_counts is not None:
                counts = valid_counts.data_ptr()
                if not counts:
                    return None
            elif query_start_loc is not None and seq_lens is not None:
                counts, starts = seq_lens.data_ptr(), query_start_loc.data_ptr()
                if not (counts and starts):
                    return None
            if out is None:
                out = torch.empty(self._result, dtype=self._dtype, device=self._device)
                to = out.data_ptr()
            else:
                to = out.data_ptr()
                end = to + self._out_reach
                if (
                    (rows < end and to < rows + self._rows_reach)
                    or (lse < end and to < lse + self._lse_reach)
                    or (counts < end and to < counts + self._counts_reach)
                    or (starts < end and to < starts + self._starts_reach)
                    or (own[0] < end and to < own[1])
                ):
                    return None
            if not (rows and lse and to) or (not looked_at and self.tells(partial_out, partial_lse, out)):
                return None
            if own[1] and (
                (own[0] < rows + self._rows_reach and rows < own[1])
                or (own[0] < lse + self._lse_reach and lse < own[1])
            ):
                return None
            if type(tag) is not int or not -_TAGS_END <= tag < _TAGS_END:
                return None
            lse_out = (
                torch.empty(self._result[:2], dtype=torch.float32, device=self._device) if self._want_lse else None
            )
        except Exception:  # no room for the result, say: raised from here, the peers would meet this rank's next call
            return None
        if self._call is not None:
            given = valid_counts, seq_lens, query_start_loc
            return self._in_one_launch(
                partial_out, partial_lse, given, out, lse_out, tag, rows, lse, counts, starts, to
            )
        ordinal = self._channel.enter_quietly()
        if ordinal is None:
            return None
        try:
            of_rows = RowCounts(valid_counts, seq_lens, query_start_loc) if counts else None
            partials = Partials(partial_out, partial_lse, of_rows)
            header = Header(ordinal, tag, self._tokens, 0, self._width)
            merged, merged_lse = self._channel.merge(partials, 0, self._result[0], header, out, lse_out, self._want_lse)
        finally:
            self._channel.leave()
        return merged if merged_lse is None else (merged, merged_lse)

    @staticmethod
    def tells(partial_out: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor) -> bool:
        """Whether there is something to tell of them that no layout shows."""
        if torch.is_grad_enabled() and (partial_out.requires_grad or partial_lse.requires_grad or out.requires_grad):
            return True
        if not torch.is_inference_mode_enabled() and out.is_inference():
            return True
        return partial_out.is_neg() or partial_lse.is_neg() or out.is_neg()

    def _in_one_launch(
        self,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        given: tuple[torch.Tensor | None, ...],
        out: torch.Tensor,
        lse_out: torch.Tensor | None,
        tag: int,
        rows: int,
        lse: int,
        counts: int,
        starts: int,
        to: int,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
        call = self._call
        assert call is not None
        try:
            key = rows & 15, lse & 3, to & 15
            found = self._bound.get(key)
            if found is None:
                found = self._bind(key, partial_out, partial_lse, RowCounts(*given) if counts else None, out)
            launch, params = found
            deadline, stream = call.deadline(), call.stream()
        except Exception:  # as in `merge`
            return None
        channel = self._channel
        ordinal = channel.enter_quietly()
        if ordinal is None:
            return None
        try:
            params.rows, params.lse, params.out, params.tag = rows, lse, to, tag & 0xFFFFFFFF
            if lse_out is not None:
                params.out_lse = lse_out.data_ptr()
            if counts:
                params.counts.counts = counts
                params.counts.starts = starts
            params.deadline = deadline
            # Half the time of Header(...).
            header = tuple.__new__(Header, (ordinal, tag, self._tokens, 0, self._width, KIND_ROWS))
            channel.launch(launch, stream, self._transport, header)
        finally:
            channel.leave()
        return out if lse_out is None else (out, lse_out)

    def _bind(
        self,
        key: Any,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        counts: RowCounts | None,
        out: torch.Tensor,
    ) -> tuple[Launch, FusedParams]:
        assert self._call is not None
        found = self._call.bind(Partials(partial_out, partial_lse, counts), 0, out)
        found[1].counts = counts_of(counts, 0, self._call.token_n)
        if len(self._bound) >= _BOUND_KEPT:
            self._bound.clear()
        self._bound[key] = found
        return found


class Known(dict[Any, Entry], Generic[Entry]):
    """One merger's, by `layout_of`: `Again`, or what has one in it.

    Attributes:
        latest: by channel, the one that was taken last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.latest: dict[int, Entry] = {}

    def clear(self) -> None:
        super().clear()
        self.latest.clear()

    def find(
        self,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        valid_counts: torch.Tensor | None,
        seq_lens: Any,
        query_start_loc: Any,
        out: torch.Tensor | None,
        return_lse: bool,
        channel: int,
    ) -> tuple[Entry | None, bool, Any]:
        """What takes a call with these, if any; whether its tensors were `looked_at`; else the key to `learn` it by,
        None where it has none.
        """
        if type(channel) is not int:
            return None, False, None
        try:
            found = self.latest.get(channel)
            if (
                found is not None
                and seq_lens is None
                and query_start_loc is None
                and found.is_like(partial_out, partial_lse, valid_counts, out, return_lse)
            ):
                return found, True, None
            like = layout_of(
                partial_out, partial_lse, valid_counts, seq_lens, query_start_loc, out, return_lse, channel
            )
            return self.get(like), False, like
        except Exception:  # something is no tensor: told by the long way
            return None, False, None

    def took(
        self,
        entry: Entry,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        valid_counts: torch.Tensor | None,
        seq_lens: Any,
        out: torch.Tensor | None,
        channel: int,
    ) -> None:
        """A call that was not `looked_at` went well by `entry`: the next one may be like it."""
        if seq_lens is None:
            entry.expect(partial_out, partial_lse, valid_counts, out)
            self.latest[channel] = entry

    def learn(self, like: Any, entry: Entry) -> None:
        """A call in one chunk went well, and `entry` takes others like it."""
        if len(self) >= _LAYOUTS_KEPT:
            self.clear()
        self[like] = entry
