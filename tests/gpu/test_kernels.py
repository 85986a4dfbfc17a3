"""The CUDA kernels on a GPU: pack and combine against torch_engine and the oracle, put and take between virtual ranks.

One GPU is enough: the memory of all virtual ranks is plain memory of the same device. Times are printed, not judged.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
import torch

from dcpcomm.combine.kernels import Kernels
from dcpcomm.combine.params import combine_params, pack_params
from dcpcomm.combine.wire import block_bytes
from tests import kernel_checks as checks
from tests.kernel_rig import DTYPES, Blocks, Rig, header_for
from tests.oracle import same_bits

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
    pytest.mark.timeout(300),
]
WIDTHS = (64, 80, 96, 128, 192, 512, 576, 72, 17)
RANKS = (1, 2, 3, 4, 8, 16, 17)
_MADE: dict[Any, Any] = {}


@pytest.fixture
def rig(rng: torch.Generator) -> Rig:
    device = torch.device("cuda", torch.cuda.current_device())

    def make(dtype: torch.dtype, n: int, generic: bool) -> Kernels:
        kernels = Kernels(device, dtype, n, generic=generic)
        kernels.warm()
        return kernels

    return Rig(device, make, rng, _MADE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_compile_load_and_warm(rig: Rig, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    for n in RANKS:
        started = time.perf_counter()
        kernels = rig.kernels(dtype, n)
        seconds = time.perf_counter() - started
        with capsys.disabled():
            print(f"\n{dtype} N={n}: {seconds:.2f} s; {kernels.origin}", end="")


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pack_writes_what_the_torch_engine_writes(rig: Rig, dtype: torch.dtype, n: int) -> None:
    checks.check_pack_layouts(rig, dtype, (n,), WIDTHS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pack_knows_every_form_of_counts(rig: Rig, dtype: torch.dtype) -> None:
    for n in (1, 2, 4):
        checks.check_pack_counts(rig, dtype, n)


def test_a_cancelled_call_sends_headers_alone(rig: Rig) -> None:
    for dtype, n in itertools.product(DTYPES, (2, 3, 17)):
        checks.check_cancelled(rig, dtype, n)


@pytest.mark.parametrize("d", [128, 512])
def test_pack_loops_where_the_grid_is_smaller_than_the_work(rig: Rig, d: int) -> None:
    checks.check_big_pack(rig, torch.bfloat16, 8, 300, d)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_combine_is_the_oracle(rig: Rig, dtype: torch.dtype, n: int) -> None:
    checks.check_combine(rig, dtype, n, WIDTHS)


@pytest.mark.parametrize("n", [5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 32])
def test_combine_of_every_other_number_of_ranks(rig: Rig, n: int) -> None:
    checks.check_combine(rig, torch.bfloat16, n, (128,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_combine_of_one_rank_knows_counts(rig: Rig, dtype: torch.dtype) -> None:
    checks.check_combine_counts(rig, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_survives_and_rounding_is_to_the_nearest_even(rig: Rig, dtype: torch.dtype) -> None:
    checks.check_halves(rig, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_combine_loops_where_the_grid_is_smaller_than_the_work(rig: Rig, dtype: torch.dtype) -> None:
    checks.check_big_combine(rig, dtype, 2, 400, 16, 512)
    checks.check_big_combine(rig, dtype, 8, 400, 16, 72)


def test_extremes(rig: Rig) -> None:
    checks.check_extremes(rig)


def test_float32_at_odd_addresses(rig: Rig) -> None:
    checks.check_halved_float32(rig)


@pytest.mark.parametrize("n", [2, 3, 8, 17])
def test_a_header_that_differs_makes_all_of_it_nan(rig: Rig, n: int) -> None:
    checks.check_headers(rig, torch.bfloat16, n)
    checks.check_headers(rig, torch.float32, n, 300)  # in blocks that see none of the others


# ---------------------------------------------------------------- streams, captures, threads


class Loop:
    """Pack into a buffer, then combine out of it: a group of two, whose other rank sends what this one packs."""

    def __init__(self, rig: Rig, t: int = 6, h: int = 4, d: int = 128) -> None:
        self.rig, self.kernels = rig, rig.kernels(torch.bfloat16, 2)
        self.rows = torch.empty(2, t, h, d, dtype=torch.bfloat16, device=rig.device)
        self.lse = torch.empty(2, t, h, device=rig.device)
        self.blocks = Blocks(rig, 2, t, h, d, torch.bfloat16)
        self.ordinal = torch.zeros(1, dtype=torch.int64, device=rig.device)
        self.record = rig.pinned(13)
        self.out, self.out_lse = rig.poisoned((t, h, d), torch.bfloat16), rig.poisoned((t, h), torch.float32)
        header = header_for(t, d)
        at = self.ordinal.data_ptr()
        self.pack = self.kernels.bind_pack(pack_params(self.blocks.wire, self.rows, self.lse, 1, header, at))
        self.combine = self.kernels.bind_combine(combine_params(
            self.blocks.payload, self.blocks.lse, self.out, self.out_lse, "e", own=1, own_rows=self.rows[1],
            own_lse=self.blocks.lse[1], wire=self.blocks.wire, header=header, ordinal=at,
            record=self.record.data_ptr(),
        ))  # fmt: skip

    def refresh(self) -> None:
        self.rows.copy_(self.rig.randn(*self.rows.shape))
        self.lse.copy_(checks.any_lse(self.rig, *self.lse.shape))
        self.out.fill_(-1)
        self.blocks.inner.fill_(0xA5)

    def run(self, stream: int) -> None:
        self.pack(stream)
        self.combine(stream)

    def check(self) -> None:
        torch.cuda.synchronize()
        assert not self.record.any(), self.record.tolist()
        want, want_lse = checks.plain_merge(self.rig, self.rows.cpu(), self.lse.cpu(), torch.bfloat16)
        assert same_bits(self.out.cpu(), want)
        assert same_bits(self.out_lse.cpu(), want_lse)


def test_replays_and_eager_calls_mix(rig: Rig) -> None:
    loop = Loop(rig)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            loop.run(rig.stream)
    calls = 0
    for number in range(40):
        loop.refresh()
        if number % 3:
            graph.replay()
            calls += 3
        else:
            loop.run(rig.stream)
            calls += 1
        loop.check()
        assert int(loop.ordinal) == calls
        assert loop.blocks.on_cpu().words[:, 0].tolist() == [calls - 1] * 2, "the header's ordinal is that of the call"


def test_on_any_stream_and_from_any_thread(rig: Rig) -> None:
    loop = Loop(rig)
    side = torch.cuda.Stream()
    raised: list[BaseException] = []

    def other_thread() -> None:  # which has never used CUDA: it has no current context
        try:
            loop.run(side.cuda_stream)
        except BaseException as error:
            raised.append(error)

    for _ in range(3):
        loop.refresh()
        torch.cuda.synchronize()
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        assert not raised, raised
        loop.check()


def test_one_producer_stream_is_enough_order(rig: Rig) -> None:
    """Rows written just before by another kernel of the stream, 300 times with no wait in between."""
    loop = Loop(rig, t=1)
    fresh = rig.randn(300, *loop.rows.shape, dtype=torch.bfloat16).to(rig.device)
    loop.refresh()
    kept = torch.empty(300, *loop.out.shape, dtype=torch.bfloat16, device=rig.device)
    for number in range(300):
        loop.rows.copy_(fresh[number])
        loop.run(rig.stream)
        kept[number].copy_(loop.out)
    torch.cuda.synchronize()
    for number in range(0, 300, 7):
        want, _ = checks.plain_merge(rig, fresh[number].cpu(), loop.lse.cpu(), torch.bfloat16)
        assert same_bits(kept[number].cpu(), want), f"round {number}"


# ---------------------------------------------------------------- times


def microseconds(launch: Any, rounds: int = 20) -> float:
    """Of one launch, in a graph of `rounds`; the median of 30 replays."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            launch(torch.cuda.current_stream().cuda_stream)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(32):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / rounds)
    return sorted(times[2:])[15]


def host_microseconds(call: Any) -> float:
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(100):
            call()
        best = min(best, (time.perf_counter() - started) * 1e4)
    return best


@pytest.mark.parametrize(("n", "d"), [(2, 128), (8, 128), (2, 512)])
def test_times(rig: Rig, n: int, d: int, capsys: pytest.CaptureFixture[str]) -> None:
    kernels, lines = rig.kernels(torch.bfloat16, n), []
    ordinal = torch.zeros(1, dtype=torch.int64, device=rig.device)
    for b in (1, 16, 64, 256):
        h = 128 // n
        partial = torch.randn(b, 128, d, dtype=torch.bfloat16, device=rig.device)
        lse = torch.randn(b, 128, device=rig.device)
        rows = partial.view(b, n, h, d).transpose(0, 1)
        lses = lse.view(b, n, h).transpose(0, 1)
        blocks, header = Blocks(rig, n, b, h, d, torch.bfloat16), header_for(b, d)
        out, out_lse = rig.poisoned((b, h, d), torch.bfloat16), rig.poisoned((b, h), torch.float32)
        record = rig.pinned(5 + 4 * n)

        def pack_args() -> Any:
            return pack_params(blocks.wire, rows, lses, 0, header, ordinal.data_ptr())  # noqa: B023

        def combine_args() -> Any:
            return combine_params(
                blocks.payload, blocks.lse, out, out_lse, "e", own=0, own_rows=rows[0],  # noqa: B023
                own_lse=blocks.lse[0], wire=blocks.wire, header=header, ordinal=ordinal.data_ptr(),  # noqa: B023
                record=record.data_ptr(),  # noqa: B023
            )  # fmt: skip

        pack, combine = kernels.bind_pack(pack_args()), kernels.bind_combine(combine_args())
        pack(rig.stream)
        checked = microseconds(combine)
        assert not record.any(), "timed a combine whose headers differ"
        wire = n * block_bytes(b * h, d, 2) / 1024
        lines.append(f"N={n} D={d} B={b} ({wire:.0f} KiB of blocks): pack {microseconds(pack):.2f} us {pack.grid}, "
                     f"combine {checked:.2f} us {combine.grid}")  # fmt: skip
    stream = rig.stream
    pack_ready, combine_ready = pack_args(), combine_args()
    lines.append(
        f"host us: a bound launch {host_microseconds(lambda: pack(stream)):.2f}, "
        f"pack {host_microseconds(lambda: kernels.pack(stream, pack_ready)):.2f}, "
        f"combine {host_microseconds(lambda: kernels.combine(stream, combine_ready)):.2f}, "
        f"pack_params {host_microseconds(pack_args):.2f}, combine_params {host_microseconds(combine_args):.2f}"
    )
    with capsys.disabled():
        print("\n" + "\n".join(lines), end="")
