"""The memory of all ranks as one tuple of words, and which word is where."""

from __future__ import annotations

from typing import Any

from tests.protocol.setting import Call, Protocol, Scenario

__all__ = ["SENTINEL", "Cell", "Memory"]

SENTINEL: tuple[Any, ...] = ()
#: (kind, rank whose memory it is, buffers, ...). Kinds: "payload" (.., slot, source, row, word), "lse" (.., slot,
#: source, row), "header" (.., slot, source, word), "poison" (.., source), "epoch" (.., block)
Cell = tuple[Any, ...]

_FRESH: dict[str, Any] = {"payload": SENTINEL, "lse": (0, "", ()), "header": (0, ()), "poison": (), "epoch": 0}
#: A header is more than one word, and each word arrives by itself.
HEADER_WORDS = 2


class Memory:
    """Words by number, which is what the search's states hold."""

    def __init__(self, scenario: Scenario, protocol: Protocol) -> None:
        self.at: dict[Cell, int] = {}
        self._found: dict[Cell, list[int]] = {}
        ranks, words = range(scenario.ranks), range(scenario.words)
        for buffers in sorted({scenario.buffers[channel] for _, channel in scenario.programs}):
            calls = [
                item
                for (_, channel), items in scenario.programs.items()
                for item in items
                if scenario.buffers[channel] == buffers and isinstance(item, Call)
            ]
            rows, blocks = range(max(c.rows for c in calls)), range(max(c.grid for c in calls))
            for rank in ranks:
                for source in ranks:
                    if source == rank:  # a rank's own slice never travels
                        self._add("poison", rank, buffers, source)
                        continue
                    for slot in range(protocol.slots):
                        for word in range(HEADER_WORDS):
                            self._add("header", rank, buffers, slot, source, word)
                        for row in rows:
                            for word in words:
                                self._add("payload", rank, buffers, slot, source, row, word)
                            self._add("lse", rank, buffers, slot, source, row)
                    self._add("poison", rank, buffers, source)
                for block in blocks:
                    self._add("epoch", rank, buffers, block)
        self.cells = tuple(self.at)
        self.kinds = tuple(cell[0] for cell in self.cells)
        self.fresh = tuple(_FRESH[kind] for kind in self.kinds)

    def _add(self, *cell: Any) -> None:
        self.at[cell] = len(self.at)

    def of(self, kind: str, rank: int, buffers: int, *rest: int) -> list[int]:
        """All words of a kind that a rank has in its buffers, whose cells go on as `rest`."""
        start = (kind, rank, buffers, *rest)
        if start not in self._found:
            self._found[start] = [n for cell, n in self.at.items() if cell[: len(start)] == start]
        return self._found[start]

    def name(self, n: int) -> str:
        kind, rank, _, *rest = self.cells[n]
        what = {
            "payload": "payload[slot {0}, row {2}, word {3}] from rank {1}",
            "lse": "lse[slot {0}, row {2}] from rank {1}",
            "header": "header[slot {0}, word {2}] from rank {1}",
            "poison": "poison word from rank {0}",
            "epoch": "epoch word of block {0}",
        }[kind]
        return f"rank {rank}'s {what.format(*rest)}"
