"""`DCPMerger`: what an engine holds and calls. The hot path is `merge`, top to bottom."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch

from dcpcomm.again import Again, Known
from dcpcomm.again_projected import AgainProjected
from dcpcomm.arguments import Arguments, check_tag, rows_of
from dcpcomm.channel import Channel
from dcpcomm.combine.engine import Partials
from dcpcomm.combine.wire import Header
from dcpcomm.decision import Decision
from dcpcomm.errors import ShapeError
from dcpcomm.log import log
from dcpcomm.projection import GatheredWUV, check_gathered, project
from dcpcomm.rows import row_counts
from dcpcomm.session import Session
from dcpcomm.transport import MergeShape
from dcpcomm.workspace import wire_bytes

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DCPMerger"]


class MergeKeywords(TypedDict, total=False):
    """What `merge` and `merge_and_project` take by name, next to `return_lse`."""

    valid_counts: torch.Tensor | None
    seq_lens: torch.Tensor | None
    query_start_loc: torch.Tensor | None
    channel: int
    out: torch.Tensor | None
    tag: int


class DCPMerger:
    """Merges decode-context-parallel attention partials over the ranks of a group.

    Constructing is collective over `group` only: the ranks agree on one transport and connect it. Also a context
    manager.

    Args:
        group: None (the default process group), a torch ProcessGroup, or an engine's coordinator (`rank_in_group`,
            `world_size`, `device_group`, perhaps `cpu_group`).
        shape: what all merges have in common; the same on every rank.
        config: a path, a mapping, a `MergeConfig`, or None (`DCPCOMM_CONFIG`, else auto).
        device: where the partials will be; None is the current CUDA device, or CPU where there is none.

    Raises:
        ShapeError: heads that don't divide over the group, or something that isn't a group.
        ConfigError: a configuration that can't be read.
        SelectionMismatch: the ranks came with different shapes or configs, or one of them raised; on every rank.
        TransportUnavailable: no transport can serve, with the reason of each; on every rank.
        TransportTimeout: naming the ranks that did not come.
    """

    def __init__(
        self,
        group: Any,
        shape: MergeShape,
        config: Any = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        with torch.device("cpu"):  # of tensors made without one: engines build their models under another default
            self._session = Session(group, shape, config, device)
        self.shape, self.group, self.device = shape, self._session.group, self._session.device
        # Of the result's token axis, so for token scatter within each rank's own slice.
        self._chunk = shape.tokens_per_exchange(self.group.size)
        if shape.scatter == "tokens":
            self._chunk //= self.group.size
        self._arguments = Arguments(shape, self.group.size, self.device)
        self._arguments.keep_off(self._session.workspace)
        self._known: Known[Again] = Known()
        self._known_projected: Known[AgainProjected] = Known()
        self._warned_of_chunks = False
        self._weights_gathered = 0

    @overload
    def merge(
        self,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        *,
        return_lse: Literal[False] = False,
        **keywords: Unpack[MergeKeywords],
    ) -> torch.Tensor: ...
    @overload
    def merge(
        self,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        *,
        return_lse: Literal[True],
        **keywords: Unpack[MergeKeywords],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def merge(
        self,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        *,
        valid_counts: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        query_start_loc: torch.Tensor | None = None,
        return_lse: bool = False,
        channel: int = 0,
        out: torch.Tensor | None = None,
        tag: int = 0,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Merge one step's partials; every rank of the group calls it, with the same B and tag.

        Args:
            partial_out: `[B, H, D]` in the shape's dtype, any strides.
            partial_lse: `[B, H]` float32, float16 or bfloat16, in the shape's base. NaN, +inf and -inf mean an empty
                row.
            valid_counts: `[B]` int32 or int64: KV entries that each row saw on this rank; 0: its partial is garbage.
            seq_lens, query_start_loc: `[S]` and `[S+1]`, instead: lengths of this rank's shard, and where each
                request's rows begin. Rows at or past `query_start_loc[-1]` are padding: empty.
            return_lse: also return the merged LSE, float32, in the shape's base.
            channel: which of the shape's channels; one ordered stream of calls each.
            out: where to write the result; any view of its shape and dtype, and what is then returned.
            tag: a small integer, the layer, say. Ranks that meet with different tags raise instead of merging.

        Returns:
            out `[B, H/N, D]` (scatter "heads"), `[B/N, H, D]` ("tokens") or `[B, H, D]` ("none"); with `return_lse` a
            pair of it and the LSE, the same without D. Rows empty on every rank are 0, and -inf.

        Raises:
            ShapeError: an argument of this rank is wrong. Its peers raise `CallMismatch` with the reason.
            CallMismatch: a peer came with another tag or B, or raised before it sent.
            TransportTimeout: a peer did not arrive within `watchdog.timeout_s`.
        """
        known = self._known
        again, looked_at, like = known.find(
            partial_out, partial_lse, valid_counts, seq_lens, query_start_loc, out, return_lse, channel
        )
        if again is not None:
            merged = again.merge(
                partial_out, partial_lse, valid_counts, seq_lens, query_start_loc, out, tag, self._arguments.own,
                looked_at,
            )  # fmt: skip
            if merged is not None:
                if not looked_at:
                    known.took(again, partial_out, partial_lse, valid_counts, seq_lens, out, channel)
                return merged
        return self._call(
            partial_out, partial_lse, False, None, valid_counts, seq_lens, query_start_loc, return_lse, channel, out,
            tag, like,
        )  # fmt: skip

    @overload
    def merge_and_project(
        self,
        partial_latent: torch.Tensor,
        partial_lse: torch.Tensor,
        w_uv: GatheredWUV,
        *,
        return_lse: Literal[False] = False,
        **keywords: Unpack[MergeKeywords],
    ) -> torch.Tensor: ...
    @overload
    def merge_and_project(
        self,
        partial_latent: torch.Tensor,
        partial_lse: torch.Tensor,
        w_uv: GatheredWUV,
        *,
        return_lse: Literal[True],
        **keywords: Unpack[MergeKeywords],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def merge_and_project(
        self,
        partial_latent: torch.Tensor,
        partial_lse: torch.Tensor,
        w_uv: GatheredWUV,
        *,
        valid_counts: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        query_start_loc: torch.Tensor | None = None,
        return_lse: bool = False,
        channel: int = 0,
        out: torch.Tensor | None = None,
        tag: int = 0,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As `merge`, for latent partials `[B, H, L]`, and multiplied by W_UV on the cheaper side of the exchange.

        Args:
            w_uv: this layer's weights, from `gather_w_uv`.

        Returns:
            as `merge`, with V in the place of D: `[B, H/N, V]`.
        """
        known = self._known_projected
        again, looked_at, like = known.find(
            partial_latent, partial_lse, valid_counts, seq_lens, query_start_loc, out, return_lse, channel
        )
        if again is not None and type(w_uv) is GatheredWUV and w_uv.passed(self):
            merged = again.merge(
                partial_latent, partial_lse, w_uv, valid_counts, seq_lens, query_start_loc, out, tag,
                self._arguments.own, looked_at,
            )  # fmt: skip
            if merged is not None:
                if not looked_at:
                    known.took(again, partial_latent, partial_lse, valid_counts, seq_lens, out, channel)
                return merged
        return self._call(
            partial_latent, partial_lse, True, w_uv, valid_counts, seq_lens, query_start_loc, return_lse, channel, out,
            tag, like,
        )  # fmt: skip

    def _call(
        self,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        projecting: bool,
        w_uv: GatheredWUV | None,
        valid_counts: torch.Tensor | None,
        seq_lens: torch.Tensor | None,
        query_start_loc: torch.Tensor | None,
        return_lse: bool,
        channel: int,
        out: torch.Tensor | None,
        tag: int,
        like: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`like`: by what the next call of this layout is looked up; None: it isn't."""
        stream = self._channel(channel)
        ordinal = stream.enter()
        given, again = partial_out, None
        try:
            # Everything that can be wrong with this rank's call is found in here, before anything is sent.
            try:
                checked = self._arguments.partials(partial_out, partial_lse)
                tokens, rows = checked.tokens, checked.rows
                if projecting:
                    check_gathered(w_uv, self)
                check_tag(tag)
                width = self.shape.head_dim if w_uv is None else self.shape.v_head_dim or 0
                if out is not None:
                    inputs = partial_out, partial_lse, valid_counts, seq_lens, query_start_loc
                    weights = (w_uv.local, w_uv.full) if w_uv is not None else ()
                    self._arguments.out(out, (*rows, width), checked, (*inputs, *weights))
                counts = row_counts(tokens, self.device, valid_counts, seq_lens, query_start_loc)
                if tokens == 0:
                    return self._nothing(out, rows, width, return_lse)
                before = w_uv is not None and self._session.decision.choice(tokens).projection == "before"
                all_heads = before or self.shape.scatter != "heads"
                if before:
                    assert w_uv is not None
                    partial_out = project(partial_out, w_uv.whole)
                # What torch negates when it is read must be so in memory, where kernels read it.
                if partial_out.is_neg() or partial_lse.is_neg():
                    partial_out, partial_lse, like = partial_out.resolve_neg(), partial_lse.resolve_neg(), None
                partials = self._session.partials(partial_out, partial_lse, counts)
                into = out if w_uv is None or before else None
                held, out_lse = stream.room(tokens, rows[0], int(partials.out.shape[2]), into, return_lse)
            except Exception as error:
                tokens = rows_of(partial_out, partial_lse)
                stream.cancel(ordinal, tokens, self._session.wire_width(tokens, projecting), error)
                if isinstance(error, ShapeError):
                    raise ShapeError(f"rank {self.group.rank}: {error}") from None
                raise
            header = Header(ordinal, tag, tokens, 0, int(partials.out.shape[2]))
            merged, merged_lse = self._merge_chunks(stream, partials, rows[0], header, held, out_lse, return_lse)
            known = self._known if w_uv is None else self._known_projected
            if (
                like is not None and like not in known and rows[0] <= self._chunk
                and (counts is None or partials.counts is counts)
            ):  # fmt: skip
                again = stream.again(partials, header, merged, return_lse)
        finally:
            stream.leave()
        if w_uv is not None and not before:
            merged = project(merged, w_uv.whole if all_heads else w_uv.local, out)
        if again is not None and w_uv is None:
            self._known.learn(like, again)
        elif again is not None and w_uv is not None:
            others = partial_lse, valid_counts, seq_lens, query_start_loc
            entry = AgainProjected(again, before, all_heads, return_lse, given, others, w_uv, merged)
            self._known_projected.learn(like, entry)
        return (merged, merged_lse) if merged_lse is not None else merged

    def _merge_chunks(
        self,
        stream: Channel,
        partials: Partials,
        t: int,
        header: Header,
        out: torch.Tensor | None,
        out_lse: torch.Tensor | None,
        want_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The result's `t` rows of tokens, and their LSE if it is wanted, in as many exchanges as it takes."""
        if t <= self._chunk:
            return stream.merge(partials, 0, t, header, out, out_lse, want_lse)
        if not self._warned_of_chunks:
            self._warned_of_chunks = True
            text = "rank %d: a merge of B=%d rows runs in chunks, because max_tokens=%d; said once per merger"
            log.warning(text, self.group.rank, header.tokens, self.shape.max_tokens)
        h = self.shape.result_rows(header.tokens, self.group.size)[1]
        if out is None:  # each chunk's comes from the transport
            out = torch.empty((t, h, header.width), dtype=self.shape.dtype, device=self.device)
        lse = out_lse
        if lse is None and want_lse:
            lse = torch.empty((t, h), dtype=torch.float32, device=self.device)
        for chunk, start in enumerate(range(0, t, self._chunk)):
            part = slice(start, min(t, start + self._chunk))
            one = header._replace(chunk=chunk)
            of_lse = None if out_lse is None else out_lse[part]
            _, brought = stream.merge(partials, start, part.stop - start, one, out[part], of_lse, want_lse)
            if lse is not None and brought is not None and brought is not of_lse:
                lse[part].copy_(brought)
        return out, lse

    def gather_w_uv(self, w_uv_local: torch.Tensor) -> GatheredWUV:
        """Make one layer's W_UV ready for `merge_and_project`. Collective over the group; once per layer.

        Args:
            w_uv_local: `[H/N, L, V]` of this rank's heads, in the shape's dtype. Copied; `refresh` takes new values in
                place.

        Raises:
            ShapeError: wrong shape, dtype or device here, or different ones between ranks.
            SelectionMismatch: another rank raised.
        """
        self._session.check_open()
        return GatheredWUV(self, w_uv_local, needs_full=self.projects_all_heads)

    def count_weights(self) -> int:
        """A number for the next weights, the same on all ranks that gather in the same order."""
        self._weights_gathered += 1
        return self._weights_gathered - 1

    @property
    def projects_all_heads(self) -> bool:
        """Whether `merge_and_project` needs W_UV of all heads, for some number of rows, and not just this rank's."""
        before = any(choice.projection == "before" for choice in self.decision.choices)
        return before or self.shape.scatter != "heads"

    def wire_bytes(self, tokens: int, width: int) -> int:
        """Bytes that this rank sends to its peers in one merge of `tokens` rows of `width` columns."""
        return wire_bytes(self.shape, self.group.size, tokens, width)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that this merger and its transport hold; what `plan_bytes` predicted."""
        return self._session.device_bytes

    @property
    def decision(self) -> Decision:
        """What all ranks agreed on, as data; `explain` puts it in words."""
        return self._session.decision

    @property
    def transports(self) -> list[str]:
        """Names of the transports in use; none in a group of one rank."""
        return self._session.decision.transports

    def transport_for(self, tokens: int) -> str | None:
        """The name of what carries a merge of `tokens` rows; None in a group of one rank."""
        return self._session.decision.transport_for(tokens) or None

    def projection_order(self, tokens: int) -> str:
        """ "before" or "after": where `merge_and_project` projects, for a merge of `tokens` rows."""
        if self.shape.v_head_dim is None:
            raise ShapeError("the merger's shape has no v_head_dim: it projects nothing")
        return self._session.decision.choice(tokens).projection

    def check(self) -> None:
        """Raise what went wrong since the merger was made or reset. Cheap; call it once per step, before sampling."""
        self._session.check_open()
        for channel in self._session.channels:
            channel.check()

    def reset(self) -> None:
        """Make every channel usable again after an error. Collective over the group, with no call in flight on any
        rank.

        The transport is closed and connected anew on all ranks, so nothing that was under way can arrive later. CUDA
        graphs captured before are void: capture again.

        Raises:
            TransportTimeout: naming the ranks that did not come.
            TransportUnavailable: it can't be connected again; the merger is then closed.
        """
        self._known.clear()
        self._known_projected.clear()
        with torch.device("cpu"):
            self._session.reset()

    def explain(self) -> str:
        """What was decided and why, in words."""
        return self._session.explain()

    def close(self) -> None:
        """Give everything back. Local, safe twice; no merge may be under way on this rank."""
        self._known.clear()
        self._known_projected.clear()
        self._session.close()

    def __enter__(self) -> DCPMerger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _channel(self, channel: Any) -> Channel:
        self._session.check_open()
        if isinstance(channel, bool) or not isinstance(channel, int) or not 0 <= channel < self.shape.channels:
            error = ShapeError(
                f"rank {self.group.rank}: channel is {channel!r}; expected 0 to {self.shape.channels - 1} "
                "(MergeShape.channels)"
            )
            self._session.disown(error)
            raise error
        return self._session.channels[channel]

    def _nothing(
        self, out: torch.Tensor | None, rows: tuple[int, int], width: int, return_lse: bool
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The result of a merge of no rows."""
        if out is None:
            out = torch.empty((*rows, width), dtype=self.shape.dtype, device=self.device)
        return (out, torch.empty(rows, dtype=torch.float32, device=self.device)) if return_lse else out
