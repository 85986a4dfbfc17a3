"""From prices to a decision: which transport carries how many rows, and which few stay connected for that."""

from __future__ import annotations

from dcpcomm.config import MergeConfig
from dcpcomm.cost import CostTable, LinkClass, Price, buckets
from dcpcomm.decision import Choice, Decision, Fallen
from dcpcomm.group import Group
from dcpcomm.topology import Facts
from dcpcomm.transport import MergeShape

__all__ = ["live_ones", "priced"]


def priced(
    group: Group,
    shape: MergeShape,
    config: MergeConfig,
    table: CostTable,
    candidates: list[str],
    fallen: dict[str, Fallen],
    standing: list[str],
    facts: Facts,
) -> Decision:
    """The decision: for each bucket of B the cheapest transport, of at most `max_live` that stay connected."""
    orders = _orders(shape, config)
    link = _link(group, facts)

    def prices_of(names: list[str], orders: tuple[str, ...]) -> dict[int, list[Price]]:
        return {
            tokens: sorted(
                (table.price(name, shape, group.size, tokens, link, facts.device, orders) for name in names),
                key=lambda price: price.us,
            )
            for tokens in buckets(shape.max_tokens)
        }

    names = standing or ([""] if group.size == 1 else [])
    if not names:
        return Decision(candidates, fallen)
    prices = prices_of(names, orders)
    if config.deterministic and len(orders) > 1:
        # One order for every B: the one whose best merges cost least in sum.
        alone = {order: prices_of(names, (order,)) for order in orders}
        best = min(alone, key=lambda order: sum(row[0].us for row in alone[order].values()))
        prices = alone[best]
    live = live_ones(names, prices, config)
    for name in names:
        if name not in live:
            others = " and ".join(live)
            reason = f"at no B predicted to be cheaper than {others}"
            if len(live) == config.max_live:
                reason = f"not among the max_live={config.max_live} that together are cheapest over all B ({others})"
            fallen[name] = Fallen("price", 0, reason, f"transport: {name}, or prefer it")
    choices = []
    for tokens, row in prices.items():
        price = next(price for price in row if price.transport in live)
        choices.append(Choice(tokens, price.transport, price.projection))
    return Decision(candidates, fallen, choices, prices)


def live_ones(names: list[str], prices: dict[int, list[Price]], config: MergeConfig) -> list[str]:
    """At most `max_live` names: greedily those that lower the sum over buckets most, ties to the earlier one.

    A transport that was named or preferred is taken without asking its price.
    """
    asked_for = [name for name in names if name == config.transport or name in config.prefer]
    if asked_for:
        return asked_for[:1]
    by_bucket = [{price.transport: price.us for price in row} for row in prices.values()]
    live: list[str] = []
    while len(live) < min(config.max_live, len(names)):
        rest = [name for name in names if name not in live]
        sums = {name: sum(min(row[one] for one in [*live, name]) for row in by_bucket) for name in rest}
        best = min(rest, key=lambda name: sums[name])
        if live and sums[best] >= sum(min(row[one] for one in live) for row in by_bucket):
            break  # one more connection would never be the cheaper one
        live.append(best)
    return live


def _orders(shape: MergeShape, config: MergeConfig) -> tuple[str, ...]:
    if shape.v_head_dim is None:
        return ()
    return ("before", "after") if config.projection == "auto" else (config.projection,)


def _link(group: Group, facts: Facts) -> LinkClass:
    if facts.place == "loopback":
        return "process"
    if len(set(group.hosts)) > 1:
        return "network"
    return "gpu" if facts.device == "cuda" else "host"
