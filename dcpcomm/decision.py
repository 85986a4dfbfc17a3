"""What the ranks of a merger agreed on, and why: made by rank 0, published, and read the same by all."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from dcpcomm.cost import Price

__all__ = ["STAGES", "Choice", "Decision", "Fallen"]

#: Where a candidate can fall, in order. `price` comes last: it was sound, but not among the `max_live` cheapest.
STAGES = ("import", "declared", "check", "prepare", "connect", "verify", "price")


@dataclass(frozen=True)
class Fallen:
    """Where a candidate fell: in which stage, on which rank first, why, and what would change that.

    `wrong` tells a transport that delivered wrong bits from one that could not be tried.
    """

    stage: str
    rank: int
    reason: str
    remedy: str = ""
    wrong: bool = False


@dataclass(frozen=True)
class Choice:
    """What carries a merge of up to `tokens` rows, and in which order it projects ("" where nothing is projected)."""

    tokens: int
    transport: str
    projection: str = ""


@dataclass(frozen=True)
class Decision:
    """The decision of one merger.

    Attributes:
        candidates: names, in the order in which they were considered.
        fallen: candidate -> where it fell.
        choices: by bucket of B, ascending.
        prices: bucket of B -> the predicted price of each candidate that could have carried it, cheapest first.
        notes: of the cost tables, in words.
    """

    candidates: list[str] = field(default_factory=list)
    fallen: dict[str, Fallen] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    prices: dict[int, list[Price]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def transports(self) -> list[str]:
        """Those in use, in the order in which they were considered."""
        used = {choice.transport for choice in self.choices}
        return [name for name in self.candidates if name in used]

    def choice(self, tokens: int) -> Choice:
        """The choice for a merge of `tokens` rows; the largest bucket's beyond it."""
        for choice in self.choices:
            if tokens <= choice.tokens:
                return choice
        return self.choices[-1]

    def transport_for(self, tokens: int) -> str:
        """The name of what carries a merge of `tokens` rows."""
        return self.choice(tokens).transport

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Decision:
        value = json.loads(raw)
        return cls(
            candidates=value["candidates"],
            fallen={name: Fallen(**fallen) for name, fallen in value["fallen"].items()},
            choices=[Choice(**choice) for choice in value["choices"]],
            prices={int(tokens): [Price(**price) for price in prices] for tokens, prices in value["prices"].items()},
            notes=value["notes"],
        )
