"""What no merge can be faster than, measured: the smallest exchange, and the bandwidth of stores to peers' memory.

    limit_us(bytes) = smallest exchange + bytes / bandwidth

The peers' memory is a list of device addresses. Whether it is another GPU's or, under loopback, this one's, the code is
the same; the figures are those of what it runs on.
"""

from __future__ import annotations

import ctypes
import functools
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from dcpcomm.bench.checked import Checked
from dcpcomm.bench.kernels import KernelFile
from dcpcomm.bench.peers import Peers
from dcpcomm.bench.ranks import Ranks
from dcpcomm.bench.timing import Summary, Times, settle, slowest, time_graph
from dcpcomm.combine.driver import Launch
from dcpcomm.errors import DCPCommError

__all__ = [
    "SIZES",
    "CopyParams",
    "ExchangeParams",
    "Gate",
    "Limits",
    "Probe",
    "SpinParams",
    "defines",
    "measure_limits",
]

SIZES = tuple(half_mib << 19 for half_mib in (1, 2, 8, 32, 128))  # bytes that each rank sends: 0.5 to 64 MiB
_MOST_RANKS = 32
_LINE = 128
_CHANNELS = {"plain": 0, "programmatic": 1, "gate": 2}
_MOST_POLLS = 1 << 24  # some ten seconds
_COPY_THREADS = 512
_COPY_BLOCKS_PER_SM = (1, 2, 4)
_GATE_NS = 200_000
_U32, _U64, _I64 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64


class ExchangeParams(ctypes.Structure):
    """As in cuda/limits.cu."""

    _fields_ = [
        ("peers", _U64 * _MOST_RANKS), ("state", _U64), ("words", _I64),
        ("ranks", _U32), ("rank", _U32), ("most_polls", _U32), ("unused", _U32),
    ]  # fmt: skip


class CopyParams(ctypes.Structure):
    """As in cuda/limits.cu."""

    _fields_ = [
        ("peers", _U64 * _MOST_RANKS), ("from_", _U64), ("block_stride", _I64), ("offset", _I64), ("nbytes", _I64),
        ("ranks", _U32), ("rank", _U32),
    ]  # fmt: skip


class SpinParams(ctypes.Structure):
    """As in cuda/limits.cu."""

    _fields_ = [("duration", _U64)]


def defines() -> dict[str, int]:
    """What limits.cu is compiled with."""
    return {
        "KERNEL_EXCHANGE_PARAMS_BYTES": ctypes.sizeof(ExchangeParams),
        "KERNEL_COPY_PARAMS_BYTES": ctypes.sizeof(CopyParams),
        "KERNEL_SPIN_PARAMS_BYTES": ctypes.sizeof(SpinParams),
    }


@dataclass(frozen=True)
class Limits:
    """Microseconds and GB/s (1e9 bytes a second, sent by each rank while all send), the slowest rank's medians.

    Attributes:
        kernel_us, exchange_us: a kernel that does nothing, and one that exchanges a word with each peer, in a graph.
        programmatic_kernel_us, programmatic_exchange_us: the same under programmatic dependent launch; None where the
            GPU has none.
        gb_s: by bytes sent, the copy kernel's.
        spread_us: median absolute deviation of `exchange_us`.
    """

    kernel_us: float
    exchange_us: float
    programmatic_kernel_us: float | None
    programmatic_exchange_us: float | None
    gb_s: dict[int, float] = field(default_factory=dict)
    spread_us: float = 0.0

    @property
    def bandwidth(self) -> float:
        """GB/s: the best of all sizes."""
        return max(self.gb_s.values())

    def limit_us(self, nbytes: float, *, programmatic: bool = False) -> float:
        """Microseconds below which nobody sends `nbytes` to the peers, receives as much, and knows that it has.

        Args:
            programmatic: hold against the exchange under programmatic dependent launch.
        """
        exchange = self.programmatic_exchange_us if programmatic else self.exchange_us
        assert exchange is not None, "this GPU has no programmatic dependent launch"
        return exchange + nbytes / self.bandwidth / 1e3

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "gb_s": {str(size): figure for size, figure in self.gb_s.items()}}


class Probe:
    """The kernels of limits.cu, with the memory that they need, on one rank. Making and closing it is collective.

    Args:
        copy_bytes: the most that `copy` sends.
    """

    def __init__(self, ranks: Ranks, device: torch.device, copy_bytes: int = max(SIZES)) -> None:
        if not 2 <= ranks.size <= _MOST_RANKS:
            raise DCPCommError(f"{ranks.size} ranks; the limits are measured for 2 to {_MOST_RANKS}")
        self.ranks, self.device = ranks, device
        n = ranks.size
        self._capacity = self.share_of(copy_bytes)
        self._data = len(_CHANNELS) * n * _LINE
        self.peers: Peers = ranks.share(self._data + n * self._capacity, device)
        self._file = KernelFile("limits.cu", defines(), device)
        self._states = torch.zeros((len(_CHANNELS), 2), dtype=torch.int64, device=device)
        self._seed: int = ranks.gather(secrets.randbelow(2**30))[0]
        self._source = torch.stack([self._pattern(ranks.rank, other, self._capacity // 4) for other in range(n)])
        properties = torch.cuda.get_device_properties(device)
        self.processors = properties.multi_processor_count
        self.has_programmatic = properties.major >= 9
        settle(device)
        ranks.meet()
        self._warm()
        ranks.meet()

    def _pattern(self, source: int, destination: int, words: int) -> torch.Tensor:
        """int32 `[words]`: what `source` copies to `destination`, other words in every run."""
        place = torch.arange(words, dtype=torch.int32, device=self.device)
        mixed = place * 0x2545F491 + (self._seed + source * _MOST_RANKS + destination)
        return mixed * 0x27D4EB2F ^ mixed >> 15

    def share_of(self, nbytes: int) -> int:
        """Bytes to each peer, of `nbytes` to all of them."""
        return max(16, nbytes // (self.ranks.size - 1) // 16 * 16)

    def _warm(self) -> None:
        """Run every kernel once, without a peer: none is then first loaded where another rank waits."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        nobody = ExchangeParams(state=self._states[0].data_ptr(), ranks=0)
        for name in ("exchange", "exchange_programmatic"):
            self._file.bind(name, (1, 1, 32, 1), nobody)(stream)
        settle(self.device)
        self._states.zero_()
        self.kernel()(stream)
        self._file.bind("nothing_programmatic", (1, 1, 32, 1), SpinParams())(stream)
        self._file.bind("copy", (1, 1, 32, 1), CopyParams())(stream)
        self.spin(0)(stream)
        settle(self.device)

    def kernel(self, programmatic: bool = False) -> Launch:
        """One that does nothing."""
        name = "nothing_programmatic" if programmatic else "nothing"
        return self._file.bind(name, (1, 1, 32, 1), SpinParams(), programmatic=programmatic)

    def exchange(self, channel: str = "plain") -> Launch:
        """A word to each peer and one from each."""
        at, n = _CHANNELS[channel], self.ranks.size
        params = ExchangeParams(
            (_U64 * _MOST_RANKS)(*self.peers.addresses), self._states[at].data_ptr(), at * n * _LINE,
            n, self.ranks.rank, _MOST_POLLS, 0,
        )  # fmt: skip
        programmatic = channel == "programmatic"
        name = "exchange_programmatic" if programmatic else "exchange"
        return self._file.bind(name, (1, 1, 32, 1), params, programmatic=programmatic)

    def copy(self, nbytes: int, blocks: int) -> Launch:
        """`nbytes` in all, to the peers in equal parts, by at most `blocks` blocks."""
        n, share = self.ranks.size, self.share_of(nbytes)
        assert share <= self._capacity
        params = CopyParams(
            (_U64 * _MOST_RANKS)(*self.peers.addresses), self._source.data_ptr(), self._capacity,
            self._data + self.ranks.rank * self._capacity, share, n, self.ranks.rank,
        )  # fmt: skip
        across = max(1, min(blocks // (n - 1), -(-share // (16 * _COPY_THREADS))))
        return self._file.bind("copy", (across, n - 1, _COPY_THREADS, 1), params)

    def spin(self, nanoseconds: int) -> Launch:
        """Nothing, for a while."""
        return self._file.bind("spin", (1, 1, 32, 1), SpinParams(nanoseconds))

    def exchanged(self, channel: str) -> torch.Tensor:
        """int64 `[N + 1]`: the words that came, the own place being this rank's own number, and whether one did not."""
        at, n = _CHANNELS[channel], self.ranks.size
        words = self.peers.own[at * n * _LINE : (at + 1) * n * _LINE].view(torch.int64)[:: _LINE // 8].clone()
        words[self.ranks.rank] = self._states[at, 0]
        return torch.cat([words, self._states[at, 1:]])

    def wrong_words(self, channel: str) -> int:
        """How many words are not what they must be after the same number of exchanges on all ranks."""
        words = self.exchanged(channel).cpu()
        number = int(words[self.ranks.rank])
        return int((words[:-1] != number).sum()) + int(words[-1]) + (number == 0)

    def came(self) -> torch.Tensor:
        """int32 `[N, words]`: what the peers have copied here, by source."""
        return self.peers.own[self._data :].view(torch.int32).view(self.ranks.size, -1)

    def wrong_copies(self, nbytes: int) -> int:
        """Of the words that the peers sent in a copy of `nbytes`, how many are wrong."""
        words, wrong = self.share_of(nbytes) // 4, 0
        for source in range(self.ranks.size):
            if source != self.ranks.rank:
                wrong += int((self.came()[source, :words] != self._pattern(source, self.ranks.rank, words)).sum())
        return wrong

    def close(self) -> None:
        """With nothing in flight on any rank."""
        settle(self.device)
        self.ranks.meet()
        self._file.close()
        self.peers.close()


class Gate:
    """Has all ranks begin together: on the host, then on the device, where what follows is already in the queue."""

    def __init__(self, probe: Probe, delay_ns: int = _GATE_NS) -> None:
        self._probe = probe
        self._spin, self._exchange = probe.spin(delay_ns), probe.exchange("gate")

    def __call__(self) -> None:
        self._probe.ranks.meet()
        stream = torch.cuda.current_stream(self._probe.device).cuda_stream
        self._spin(stream)
        self._exchange(stream)

    def check(self) -> None:
        """Raise if a rank ever began without the others. Waits for the current stream."""
        settle(self._probe.device)
        if int(self._probe.exchanged("gate")[-1]):
            raise DCPCommError(f"rank {self._probe.ranks.rank}: a rank did not come to the start of a timing")


def measure_limits(
    probe: Probe,
    gate: Gate,
    *,
    sizes: tuple[int, ...] = SIZES,
    per_graph: int = 20,
    replays: int = 30,
    say: Callable[[str], object] = lambda text: None,
) -> Limits:
    """Measure. Collective, and the same on all ranks.

    Args:
        sizes: bytes that each rank sends to its peers together, for the bandwidth.
        say: told what is measured next.

    Raises:
        DCPCommError: a word, or a copied byte, was not what it must be.
    """
    device, ranks = probe.device, probe.ranks

    def timed(launch: Launch, result: Callable[[], torch.Tensor], wrong: Callable[[], int], name: str) -> Summary:
        def step() -> torch.Tensor:
            launch(torch.cuda.current_stream(device).cuda_stream)
            return result()

        checked = _InPlace(step, lambda _: wrong(), name)
        checked.check(ranks.meet, lambda: settle(device))
        _agree(ranks, checked.wrong, name)
        times = time_graph(checked, device, gate, per_graph=per_graph, replays=replays)
        gate.check()
        everybody: list[Times] = ranks.gather(times)
        found = slowest(everybody)
        _agree(ranks, found.wrong, name)
        return found

    nothing = torch.ones(1, dtype=torch.int32, device=device)
    figures: dict[str, Summary | None] = {"kernel programmatic": None, "exchange programmatic": None}
    for channel in ("plain", "programmatic") if probe.has_programmatic else ("plain",):
        say(f"smallest kernel and exchange, {channel} launches")
        kernel, exchange = probe.kernel(channel == "programmatic"), probe.exchange(channel)
        wrong_words = functools.partial(probe.wrong_words, channel)
        figures[f"kernel {channel}"] = timed(kernel, lambda: nothing, lambda: 0, "an empty kernel")
        figures[f"exchange {channel}"] = timed(exchange, lambda: nothing, wrong_words, "the smallest exchange")
    gb_s = {}
    for nbytes in sizes:
        say(f"stores to peers, {nbytes / 2**20:g} MiB")
        wrong_copies = functools.partial(probe.wrong_copies, nbytes)
        copies = [probe.copy(nbytes, blocks * probe.processors // ranks.on_this_gpu) for blocks in _COPY_BLOCKS_PER_SM]
        best = min(timed(copy, probe.came, wrong_copies, f"a copy of {nbytes} bytes").p50 for copy in copies)
        gb_s[nbytes] = probe.share_of(nbytes) * (ranks.size - 1) / best / 1e3
    plain, smallest = figures["kernel plain"], figures["exchange plain"]
    assert plain is not None
    assert smallest is not None
    return Limits(
        plain.p50,
        smallest.p50,
        _p50(figures["kernel programmatic"]),
        _p50(figures["exchange programmatic"]),
        gb_s,
        smallest.mad,
    )


class _InPlace(Checked):
    """A step whose result lies in memory that peers write. What is copied is poisoned before; a counter never is."""

    def poison(self) -> None:
        if self.result is not None and self.result.dim() == 2:
            super().poison()


def _agree(ranks: Ranks, wrong: int, name: str) -> None:
    found = ranks.gather(wrong)
    if any(found):
        raise DCPCommError(f"{name}: wrong words by rank {found}: nothing that it says would be worth anything")


def _p50(summary: Summary | None) -> float | None:
    return None if summary is None else summary.p50
