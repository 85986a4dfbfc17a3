"""A decision in words: every candidate, where and why it fell, its price, and what would change the outcome."""

from __future__ import annotations

import contextlib
import os
import sys
import time

from dcpcomm.cachefolder import cache_dir, write_whole
from dcpcomm.config import MergeConfig
from dcpcomm.cost import MODEL, Price
from dcpcomm.decision import Decision
from dcpcomm.group import Group
from dcpcomm.registry import try_load
from dcpcomm.transport import MergeShape

__all__ = ["describe", "last_decision", "remember"]

_LAST = "last_decision.txt"


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
        lines += _prices(decision, shape, config)
    waits = "for ever, and logs who is late" if group.exchange_timeout_s is None else f"up to {group.timeout_s:g} s"
    lines.append(f"combined by {engine}")
    lines.append(f"device memory of this rank: {device_bytes} bytes; an exchange waits for peers {waits}")
    return "\n".join(lines)


def remember(text: str) -> None:
    """Keep the last decision for `dcpcomm doctor`; where the cache can't be written, it has none."""
    with contextlib.suppress(OSError):
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        program = os.path.basename(sys.argv[0]) or "an interactive Python"
        write_whole(cache_dir() / _LAST, f"made {stamp} by {program}\n{text}\n")


def last_decision() -> str:
    """What rank 0 last decided on this machine for this user, and when; "" where nothing is kept."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (cache_dir() / _LAST).read_text(encoding="utf-8")
    return ""


def _prices(decision: Decision, shape: MergeShape, config: MergeConfig) -> list[str]:
    """The prices by bucket, where they come from, and what would change them."""
    shown = [price for row in decision.prices.values() for price in row]
    lines, tied = ["predicted microseconds of a whole merge, by rows:"], False
    for choice in decision.choices:
        priced = decision.prices[choice.tokens]
        row = [_price(price, price.transport == choice.transport) for price in priced]
        cheapest = next(price for price in priced if price.transport in decision.transports or not price.transport)
        tied = tied or cheapest.transport != choice.transport
        lines.append(f"  B<={choice.tokens}: {'; '.join(row)}")
    if len(decision.prices[choice.tokens]) > 1 or (shape.v_head_dim is not None and config.projection == "auto"):
        lines.append("  * is taken; `prefer`, `cost_table` and `projection` would change it")
    if tied:
        lines.append("  a cheaper one beside * is cheaper by less than the spread: the earlier candidate is taken")
    if any(price.extrapolated for price in shown):
        lines.append("  ~ lies outside of what was measured")
    if any(price.origin == MODEL for price in shown):
        lines.append("  model: assumed (latency, bandwidth), not measured; `dcpcomm tune` measures this machine")
    return lines + [f"  {note}" for note in decision.notes]


def _price(price: Price, taken: bool) -> str:
    about = "~" if price.extrapolated else ""
    us = f"{price.us:.0f}" if price.us >= 100 else f"{price.us:.1f}"
    order = f", project {price.projection}" if price.projection else ""
    return f"{'*' if taken else ''}{price.transport or 'local'} {about}{us} ({price.origin}{order})"


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
