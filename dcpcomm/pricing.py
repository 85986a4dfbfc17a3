"""From prices to a decision: which transport carries how many rows, and which few stay connected for that."""

from __future__ import annotations

from collections.abc import Sequence

from dcpcomm.config import MergeConfig
from dcpcomm.cost import Costs, Price, buckets
from dcpcomm.decision import Choice, Decision, Fallen
from dcpcomm.transport import MergeShape

__all__ = ["live_ones", "priced"]

Rows = dict[int, list[Price]]


def priced(
    shape: MergeShape,
    config: MergeConfig,
    costs: Costs,
    candidates: list[str],
    fallen: dict[str, Fallen],
    standing: Sequence[str],
) -> Decision:
    """The decision: for each bucket of B the cheapest transport, of at most `max_live` that stay connected.

    What lies within the spread of the cheapest counts as equal to it: then the earlier in canonical order is taken.

    Args:
        standing: those that can carry merges, in canonical order.
    """
    orders = _orders(shape, config)
    names = list(standing) or ([""] if costs.key.ranks == 1 else [])
    if not names:
        return Decision(candidates, fallen)
    ways = {
        tokens: [costs.price(name, shape, tokens, order) for name in names for order in orders]
        for tokens in buckets(shape.max_tokens)
    }
    if config.deterministic and len(orders) > 1:
        # One order for every B: the one whose best merges cost least in sum.
        order = min(orders, key=lambda order: sum(min(_us(row, order)) for row in ways.values()))
        ways = {tokens: [price for price in row if price.projection == order] for tokens, row in ways.items()}
    prices = {
        tokens: [_cheapest([p for p in row if p.transport == name]) for name in names] for tokens, row in ways.items()
    }
    live = live_ones(names, prices, config)
    for name in names:
        if name not in live:
            others = " and ".join(live)
            reason = f"at no B predicted to be cheaper than {others} by more than the spread"
            if len(live) == config.max_live:
                reason = f"not among the max_live={config.max_live} that together are cheapest over all B ({others})"
            fallen[name] = Fallen("price", 0, reason, f"transport: {name}, or prefer it")
    choices = []
    for tokens, row in prices.items():
        price = _cheapest([price for price in row if price.transport in live])
        choices.append(Choice(tokens, price.transport, price.projection))
    shown = {tokens: sorted(row, key=lambda price: price.us) for tokens, row in prices.items()}
    return Decision(candidates, fallen, choices, shown, list(costs.notes))


def live_ones(names: list[str], prices: Rows, config: MergeConfig) -> list[str]:
    """At most `max_live` names: greedily those that lower the sum over buckets most, ties to the earlier one.

    A transport that was named or preferred is taken without asking its price.
    """
    asked_for = [name for name in names if name == config.transport or name in config.prefer]
    if asked_for:
        return asked_for[:1]
    by_bucket = [{price.transport: price for price in row} for row in prices.values()]
    live: list[str] = []
    while len(live) < min(config.max_live, len(names)):
        rest = [name for name in names if name not in live]
        best = _cheapest([_sum(name, [_better(live, name, row) for row in by_bucket]) for name in rest]).transport
        if live and not any(_better(live, best, row).transport == best for row in by_bucket):
            break  # one more connection would never be the cheaper one, or not by more than the spread
        live.append(best)
    return live


def _better(live: list[str], name: str, row: dict[str, Price]) -> Price:
    """What a bucket costs with `name` beside those that are live: it is used only where it is cheaper by more than the
    spread.
    """
    mine = row[name]
    if not live:
        return mine
    there = _cheapest([row[one] for one in live])
    return mine if mine.us < there.us and not mine.equals(there) else there


def _sum(name: str, prices: list[Price]) -> Price:
    """Of all buckets together, as the price of having `name`."""
    first = prices[0]
    return Price(name, first.projection, sum(p.us for p in prices), first.origin, sum(p.mad_us for p in prices))


def _cheapest(prices: list[Price]) -> Price:
    """The first in order that isn't dearer than the cheapest by more than the spread."""
    least = min(prices, key=lambda price: price.us)
    return next(price for price in prices if price is least or price.equals(least))


def _us(row: list[Price], order: str) -> list[float]:
    return [price.us for price in row if price.projection == order]


def _orders(shape: MergeShape, config: MergeConfig) -> tuple[str, ...]:
    """Of equal ones the first: projecting after the merge needs the weights of this rank's heads alone."""
    if shape.v_head_dim is None:
        return ("",)
    return ("after", "before") if config.projection == "auto" else (config.projection,)
