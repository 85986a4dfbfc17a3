"""A machine as data: its GPUs, what lies between them, and who may reach whom. No torch, no driver: what was recorded
on one machine can be looked at on another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["Card", "Fabric", "Gpu", "LinkClass", "Machine", "Pair", "link_class", "link_of"]

LinkClass = Literal["process", "host", "network", "gpu", "nvlink", "pcie", "fabric"]
_PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS")


@dataclass(frozen=True)
class Fabric:
    """NVLink between hosts, as the driver of one GPU sees it.

    Attributes:
        state: "completed" where the GPU has joined; "none" where it can't; else how far it came.
        cluster, clique: GPUs reach each other where both are equal.
    """

    state: str
    cluster: str = ""
    clique: int = 0

    @property
    def domain(self) -> str:
        """What GPUs that reach each other over it have in common; "" outside of it."""
        return f"{self.cluster}/{self.clique}" if self.state == "completed" and self.cluster else ""


@dataclass(frozen=True)
class Gpu:
    """One GPU. `index` is the driver's, which CUDA_VISIBLE_DEVICES doesn't change; `uuid` is what tells GPUs apart."""

    index: int
    name: str
    uuid: str
    architecture: str
    pci: str = ""
    fabric: Fabric | None = None


@dataclass(frozen=True)
class Pair:
    """What lies between two GPUs of a host, by their UUIDs.

    Attributes:
        link: as `nvidia-smi topo -m` prints it: "NV18" (NVLink, lanes), "PIX", "PXB", "PHB", "NODE", "SYS" (PCIe, from
            near to far), "?" where it isn't known.
        access: whether one can load from and store to the other's memory; None where it isn't known.
        reason: of the driver, why it can't.
    """

    a: str
    b: str
    link: str
    access: bool | None = None
    reason: str = ""


@dataclass(frozen=True)
class Card:
    """What a rank tells the others of where it is: `host`, and of its GPU uuid and name, with its fabric's domain; all
    "" on CPU.
    """

    host: str
    gpu: str = ""
    name: str = ""
    fabric: str = ""


@dataclass(frozen=True)
class Machine:
    """One host.

    Attributes:
        host: its identity.
        device: what merges run on where there is no GPU: "cpu AMD EPYC x2" (processor, cores).
        driver, driver_cuda: of the GPUs, and the CUDA version that it knows.
        pairs: of GPUs, each once.
        imex: channels through which memory can be shared between hosts, by name.
        gaps: what could not be found out, and why.
    """

    host: str
    device: str = "cpu"
    driver: str = ""
    driver_cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[Pair, ...] = ()
    imex: tuple[str, ...] = ()
    gaps: tuple[str, ...] = field(default=())

    def gpu(self, uuid: str) -> Gpu | None:
        """The GPU of that UUID, or None."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)

    def pair(self, a: str, b: str) -> Pair | None:
        """What lies between two GPUs, in either order; None where it isn't known."""
        return next((pair for pair in self.pairs if {pair.a, pair.b} == {a, b}), None)

    def card(self, uuid: str) -> Card:
        """Of a rank on that GPU; on CPU for ""."""
        gpu = self.gpu(uuid)
        if gpu is None:
            return Card(self.host, uuid)
        return Card(self.host, uuid, gpu.name, gpu.fabric.domain if gpu.fabric else "")

    def cut_off(self, uuids: Sequence[str]) -> tuple[Gpu, Gpu, Pair] | None:
        """The first two of these GPUs that can't reach each other's memory; None where all can, or it isn't known."""
        for place, a in enumerate(uuids):
            for b in uuids[place + 1 :]:
                pair, first, second = self.pair(a, b), self.gpu(a), self.gpu(b)
                if pair is not None and pair.access is False and first is not None and second is not None:
                    return first, second, pair
        return None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Machine:
        """What `as_dict` made."""
        gpus = (
            Gpu(**{**gpu, "fabric": Fabric(**gpu["fabric"]) if gpu.get("fabric") else None}) for gpu in value["gpus"]
        )
        pairs = (Pair(**pair) for pair in value["pairs"])
        rest = {key: tuple(value.get(key, ())) for key in ("imex", "gaps")}
        return cls(**{**value, "gpus": tuple(gpus), "pairs": tuple(pairs), **rest})


def link_of(machine: Machine, ranks: Sequence[Card]) -> str:
    """What the slowest pair of ranks has between it, in one word.

    Returns:
        "host" between CPUs, "network" between hosts, "fabric" between hosts whose GPUs share an NVLink domain, "gpu"
        where all ranks share one; between GPUs of a host what `Pair.link` says, "?" if it isn't known of one of them.
    """
    if len({rank.host for rank in ranks}) > 1:
        domains = {rank.fabric for rank in ranks}
        return "fabric" if len(domains) == 1 and "" not in domains else "network"
    uuids = sorted({rank.gpu for rank in ranks})
    if uuids == [""]:
        return "host"
    pairs = [machine.pair(a, b) for place, a in enumerate(uuids) for b in uuids[place + 1 :]]
    links = [pair.link if pair is not None else "?" for pair in pairs]
    return min(links, key=_speed) if links else "gpu"


def _speed(link: str) -> tuple[int, int]:
    if link.startswith("NV"):
        return 2, int(link[2:])
    return (1, -_PCIE.index(link)) if link in _PCIE else (0, 0)


def link_class(link: str) -> LinkClass:
    """The class that a model has figures for."""
    if link in ("process", "host", "network", "fabric"):
        return link  # type: ignore[return-value]
    return "nvlink" if link.startswith("NV") else "pcie" if link in _PCIE else "gpu"
