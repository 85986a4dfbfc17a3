"""A decision in words: every candidate, where and why it fell, and which setting would change the outcome."""

from __future__ import annotations

from dcpcomm.config import MergeConfig
from dcpcomm.group import Group
from dcpcomm.select import Decision
from dcpcomm.transport import MergeShape

__all__ = ["describe"]


def describe(decision: Decision, shape: MergeShape, config: MergeConfig, group: Group, device_bytes: int) -> str:
    """The text of `DCPMerger.explain()`."""
    hosts = len(set(group.hosts)) or 1
    lines = [
        f"merge of [B<={shape.max_tokens}, H={shape.num_heads}, D={shape.head_dim}] {shape.dtype}, LSE "
        f"base {shape.lse_base}, "
        f"scatter {shape.scatter}, {shape.channels} channel(s), {group.size} rank(s) on {hosts} host(s)"
    ]
    if decision.transport is None:
        lines.append("transport: none; one rank has nobody to exchange with")
    else:
        lines.append(f"transport: {decision.transport}   (decided by rank 0 for all ranks)")
    for name in decision.candidates:
        fallen = decision.fallen.get(name)
        if name == decision.transport:
            lines.append(f"  {name}: in use")
        elif fallen is None:
            lines.append(f"  {name}: not tried, {decision.transport} comes first; `transport: {name}` would take it")
        else:
            remedy = f"; {fallen.remedy}" if fallen.remedy else ""
            lines.append(f"  {name}: fell at {fallen.stage} on rank {fallen.rank}: {fallen.reason}{remedy}")
    lines += [f"  {name}: forbidden by the configuration" for name in config.forbid]
    if decision.projection:
        ranges = ", ".join(f"B<={bucket}: {order}" for bucket, order in decision.projection.items())
        lines.append(f"projection by W_UV relative to the merge ({decision.projection_origin}): {ranges}")
    lines.append(
        f"device memory of this rank: {device_bytes} bytes; an exchange waits for peers up to {group.timeout_s:g} s"
    )
    return "\n".join(lines)
