"""A decision in words: every candidate, where and why it fell, its price, and what would change the outcome."""

from __future__ import annotations

from dcpcomm.config import MergeConfig
from dcpcomm.decision import Decision
from dcpcomm.group import Group
from dcpcomm.registry import try_load
from dcpcomm.transport import MergeShape

__all__ = ["describe"]


def describe(
    decision: Decision, shape: MergeShape, config: MergeConfig, group: Group, device_bytes: int, engine: str
) -> str:
    """The text of `DCPMerger.explain()`."""
    hosts = len(set(group.hosts)) or 1
    lines = [
        f"merge of [B<={shape.max_tokens}, H={shape.num_heads}, D={shape.head_dim}] {shape.dtype}, LSE base "
        f"{shape.lse_base}, scatter {shape.scatter}, {shape.channels} channel(s), {group.size} rank(s) on {hosts} "
        "host(s)"
    ]
    if not decision.transports:
        lines.append("transport: none; one rank has nobody to exchange with")
    else:
        lines.append(f"transport: {', '.join(decision.transports)}   (decided by rank 0 for all ranks)")
    for name in decision.candidates:
        fallen = decision.fallen.get(name)
        if name in decision.transports:
            lines.append(f"  {name}: in use, {_proof(name, config, group.places)}")
        elif fallen is None:
            asked_for = "was named" if decision.transports[0] == config.transport else "is preferred"
            lines.append(
                f"  {name}: not tried, {decision.transports[0]} {asked_for}; `transport: {name}` would take it"
            )
        else:
            remedy = f"; to change that: {fallen.remedy}" if fallen.remedy else ""
            lines.append(f"  {name}: fell at {fallen.stage} on rank {fallen.rank}: {fallen.reason}{remedy}")
    lines += [f"  {name}: forbidden by the configuration (forbid)" for name in config.forbid]
    if decision.prices and (group.size > 1 or shape.v_head_dim is not None):
        lines.append("predicted microseconds of a whole merge, by rows (model: assumed, not measured here):")
        for choice in decision.choices:
            row = []
            for price in decision.prices[choice.tokens]:
                order = f", project {price.projection}" if price.projection else ""
                mark = "*" if price.transport == choice.transport else ""
                row.append(f"{mark}{price.transport or 'local'} {price.us:.0f} ({price.origin}{order})")
            lines.append(f"  B<={choice.tokens}: {'; '.join(row)}")
        if len(decision.prices[choice.tokens]) > 1 or (shape.v_head_dim is not None and config.projection == "auto"):
            lines.append("  * is taken; `prefer`, `cost_table` and `projection` would change it")
    waits = "for ever, and logs who is late" if group.exchange_timeout_s is None else f"up to {group.timeout_s:g} s"
    lines.append(f"combined by {engine}")
    lines.append(f"device memory of this rank: {device_bytes} bytes; an exchange waits for peers {waits}")
    return "\n".join(lines)


def _proof(name: str, config: MergeConfig, places: list[str]) -> str:
    if config.options.get(name, {}).get("allow_unverified"):
        return "not verified (its option allow_unverified)"
    cls, _ = try_load(name)
    can = cls.capabilities if cls is not None else None
    owed = can is not None and can.soak_bytes and can.proven_on and not set(places) <= set(can.proven_on)
    if config.verify.level == "off" and not owed:
        return "not verified (verify.level is off)"
    merges = cls is not None and cls.fused_merge is not None
    return "verified against the oracle" if merges else "verified bit for bit"
