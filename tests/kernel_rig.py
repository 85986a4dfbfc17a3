"""What the checks of the CUDA kernels share: where they run, odd layouts, wire buffers, and all findings at once."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dcpcomm.combine.engine import by_destination
from dcpcomm.combine.params import WireAt
from dcpcomm.combine.wire import Header, WireViews, payload_bytes, row_bytes
from dcpcomm.rows import clean_lse

POISON = 0xA5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BITS = {2: torch.int16, 4: torch.int32}


class Findings:
    """Collects what fails in many cases, so that one run tells all of it."""

    def __init__(self) -> None:
        self.cases, self.failed = 0, list[str]()

    @contextlib.contextmanager
    def case(self, *names: object) -> Iterator[None]:
        self.cases += 1
        try:
            yield
        except AssertionError as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            said = str(error).split("\n")[0][:300] or str(line.line)
            self.failed.append(f"{' '.join(map(str, names))}: line {line.lineno}: {said}")

    def report(self) -> None:
        shown = "\n".join(self.failed[:30])
        assert not self.failed, f"{len(self.failed)} of {self.cases} cases failed:\n{shown}"


@dataclass
class Rig:
    """A place to run kernels: a GPU, or the emulation. `make(dtype, n, generic)` gives kernels, made once."""

    device: torch.device
    make: Callable[[torch.dtype, int, bool], Any]
    rng: torch.Generator
    _made: dict[Any, Any] = field(default_factory=dict)

    def kernels(self, dtype: torch.dtype, n: int, generic: bool = False) -> Any:
        key = dtype, n, generic
        if key not in self._made:
            self._made[key] = self.make(*key)
        return self._made[key]

    @property
    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else 0

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def pinned(self, words: int) -> torch.Tensor:
        """int64 zeros that a kernel can write and the host can read."""
        return torch.zeros(words, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def poisoned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        return torch.full((nbytes,), POISON, dtype=torch.uint8, device=self.device).view(dtype).view(shape)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """On CPU."""
        return torch.randn(shape, generator=self.rng).to(dtype)

    def randint(self, low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.rng)


def layouts(values: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
    """`[A, B, D]` on `device` in every layout that an engine may come with; the same values."""
    a, b, d = values.shape
    dtype = values.dtype

    def strided(elements: int, strides: tuple[int, int, int], offset: int) -> torch.Tensor:
        whole = torch.full((offset + elements,), 1, dtype=dtype, device=device)
        view = whole.as_strided(values.shape, strides, offset)
        view.copy_(values)
        return view

    return {
        "contiguous": values.to(device),
        "padded heads": strided(a * (b + 2) * d, ((b + 2) * d, d, 1), 0),
        "head-major": strided(a * b * d, (d, a * d, 1), 0),
        "odd row pitch": strided(a * b * (d + 1), (b * (d + 1), d + 1, 1), 0),
        "offset 1": strided(a * b * d, (b * d, d, 1), 1),
        "offset 2": strided(a * b * d, (b * d, d, 1), 2),
        "offset 4": strided(a * b * d, (b * d, d, 1), 4),
        "last stride 2": strided(2 * a * b * d, (2 * b * d, 2 * d, 2), 0),
        "transposed": strided(a * b * d, (b, 1, a * b), 0),
    }


def lse_layouts(values: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
    """`[A, B]` likewise."""
    return {name: view[..., 0] for name, view in layouts(values.unsqueeze(-1), device).items()} | {
        "transposed": values.t().contiguous().to(device).t(),
    }


class Blocks:
    """A wire buffer on the rig's device, full of poison, with 0xA5 on both sides of it too."""

    def __init__(self, rig: Rig, n: int, t: int, h: int, d: int, dtype: torch.dtype, gap: int = 0) -> None:
        self.shape = n, t, h, d
        self.dtype = dtype
        self.pitch = row_bytes(d, dtype.itemsize)
        self.nbytes = (1 + t * h) * self.pitch
        self.stride = self.nbytes + gap
        self.whole = torch.full((n * self.stride + 256,), POISON, dtype=torch.uint8, device=rig.device)
        self.inner = self.whole[128 : 128 + n * self.stride]

    @property
    def wire(self) -> WireAt:
        lse_at = payload_bytes(self.shape[3], self.dtype.itemsize)
        return WireAt(self.inner.data_ptr(), self.stride, self.pitch, lse_at)

    def blocks_of(self, region: torch.Tensor) -> torch.Tensor:
        n, t, h, _ = self.shape
        return region.as_strided((n, 1 + t * h, self.pitch), (self.stride, self.pitch, 1))

    @property
    def payload(self) -> torch.Tensor:
        _, t, h, d = self.shape
        rows = self.blocks_of(self.inner)[:, 1:, : d * self.dtype.itemsize]
        return rows.view(self.dtype).unflatten(1, (t, h))

    @property
    def lse(self) -> torch.Tensor:
        _, t, h, _ = self.shape
        at = self.wire.lse_at
        return self.blocks_of(self.inner)[:, 1:, at : at + 4].view(torch.float32).squeeze(-1).unflatten(1, (t, h))

    def on_cpu(self) -> WireViews:
        """A copy."""
        _, t, h, d = self.shape
        return WireViews(self.blocks_of(self.inner.cpu().clone()), t, h, d, self.dtype)

    def fill(self, views: WireViews) -> None:
        self.blocks_of(self.inner).copy_(views.blocks)

    def assert_untouched_around(self) -> None:
        whole = self.whole.cpu()
        inner = len(whole) - 128
        assert bool((whole[:128] == POISON).all()), "bytes before the buffer were written"
        assert bool((whole[inner:] == POISON).all()), "bytes after the buffer were written"


def any_lse(rig: Rig, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """LSEs with every kind of emptiness, some far below the rest."""
    lse = rig.randn(*shape) * 4
    kind = rig.randint(0, 12, shape)
    for value, which in ((torch.nan, 0), (torch.inf, 1), (-torch.inf, 2), (-200.0, 3)):
        lse[kind == which] = value
    return lse.to(dtype)


def header_for(b: int, d: int, ordinal: int = 0, **other: Any) -> Header:
    return Header(ordinal=ordinal, tag=other.pop("tag", -7), tokens=b, chunk=other.pop("chunk", 3), width=d, **other)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(BITS[tensor.element_size()])


def ordinal_on(rig: Rig, value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64, device=rig.device)


def expected_pack(blocks: Blocks, partial: Any, lse: Any, empty: Any, rank: int, header: Any, scatter: str) -> Any:
    """The bytes of `blocks` once packed, on CPU: torch_engine's, with zeros where a row is empty. What a pack must not
    write is as it is now.
    """
    n = blocks.shape[0]
    want = blocks.on_cpu()
    clean = by_destination(clean_lse(lse, empty), scatter, n)
    rows = by_destination(partial, scatter, n)
    keep = (clean > -torch.inf).unsqueeze(-1)
    want.blocks[:, 1:, want.lse_at :] = 0
    for other in range(n):
        if other != rank:
            want.blocks[other, 1:, : want.lse_at] = 0
            kept = torch.where(keep[other], bits(rows[other]), 0).to(bits(rows[other]).dtype)
            want.payload[other].copy_(kept.view(partial.dtype))
    want.lse.copy_(clean)
    want.words[:] = header.words()
    return want.blocks
