"""What a measurement holds for: the machine it was made on, the group's size, and the versions it was made with."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from dcpcomm.machine import Card, Machine, link_of

__all__ = ["CostKey", "key_of", "machine_id"]


class CostKey(BaseModel):
    """The key of a cost table.

    Attributes:
        device: the GPUs' name, or processor and cores ("cpu AMD EPYC x2").
        ranks: N of the group.
        hosts: how many it spans.
        link: of its slowest pair: "NV18", "PIX", ..., "network", "fabric", or on CPU "host".
        driver: of the GPUs; "" on CPU.
        versions: of the libraries that times depend on, by name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str
    ranks: int
    hosts: int = 1
    link: str
    driver: str = ""
    versions: dict[str, str] = {}

    def elsewhere(self, other: CostKey) -> list[str]:
        """In what `other` is another machine or group, for which this table says nothing; in words."""
        return [
            f"{part} {getattr(self, part)}, not {getattr(other, part)}"
            for part in ("device", "ranks", "hosts", "link")
            if getattr(self, part) != getattr(other, part)
        ]

    def changed(self, now: CostKey) -> list[str]:
        """What has changed on the same machine since, so that the table may be stale; in words."""
        mine = {"driver": self.driver, **self.versions}
        theirs = {"driver": now.driver, **now.versions}
        return [
            f"{part} {was or 'absent'} -> {theirs[part] or 'absent'}"
            for part, was in mine.items()
            if part in theirs and was != theirs[part]
        ]

    @property
    def slug(self) -> str:
        """A name for files: one for each machine and group, whatever the versions."""
        text = f"{self.device}-x{self.ranks}-{self.link}" + (f"-{self.hosts}hosts" if self.hosts > 1 else "")
        return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def key_of(machine: Machine, ranks: Sequence[Card], versions: dict[str, str], *, threads: bool = False) -> CostKey:
    """The key of a group.

    Args:
        machine: that of the rank that decides.
        ranks: all of them.
        threads: they are threads of one process.
    """
    names = sorted({rank.name or "an unknown GPU" for rank in ranks if rank.gpu})
    return CostKey(
        device=" + ".join(names) or machine.device,
        ranks=len(ranks),
        hosts=len({rank.host for rank in ranks}),
        link="process" if threads else link_of(machine, ranks),
        driver=machine.driver if names else "",
        versions=versions,
    )


def machine_id(machine: Machine, ranks: Sequence[Card]) -> str:
    """Tells this very machine from others of its kind, without telling what it is. "" where nothing tells it."""
    known = sorted({rank.gpu for rank in ranks if rank.gpu})
    if not known:
        try:
            known = [Path("/etc/machine-id").read_text(encoding="utf-8").strip()]
        except OSError:
            return ""
    return "machine-" + hashlib.sha256("\n".join([machine.device, *known]).encode()).hexdigest()[:16]
