"""The four-launch rival's kernels on a CPU: whatever it is slow or fast at, it must be right."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from dcpcomm.bench.checked import count_wrong
from dcpcomm.bench.kernels import FOLDER
from dcpcomm.bench.rivals.four_launch_put import Memory, defines
from dcpcomm.combine.structs import struct_sizes
from dcpcomm.reference import merge_partials
from dcpcomm.transport import MergeShape
from tests.emulated import COMPILER, compile_for_host, host_source

pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
KERNELS = ("four_count", "four_dispatch", "four_signal", "four_combine")


def library(dtype: torch.dtype, n: int, folder: Path) -> ctypes.CDLL:
    file = folder / f"four_launch-{n}.so"
    source = host_source(FOLDER / "four_launch.cu", [(name, "FourLaunchParams") for name in KERNELS])
    compile_for_host(source, {**struct_sizes(), **defines(dtype, n)}, file)
    return ctypes.CDLL(str(file))


class Ranks:
    """N ranks whose memory is plain memory, and whose kernels run one after another."""

    def __init__(self, shape: MergeShape, n: int, folder: Path) -> None:
        self.shape, self.n, self.library = shape, n, library(shape.dtype, n, folder)
        self.where = Memory(shape, n)
        # 16 bytes more, and begun at a multiple of 16, as a GPU's memory is.
        raw = torch.full((n, self.where.nbytes + 16), 0xA5, dtype=torch.uint8)
        self.memory = [one[-one.data_ptr() % 16 :][: self.where.nbytes] for one in raw]
        for one in self.memory:
            one[self.where.flags_offset :] = 0
        self.states = torch.zeros(n, 2, dtype=torch.int64)

    def merge(self, outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
        tokens, heads = outs.shape[1], self.shape.num_heads // self.n
        merged = torch.full((self.n, tokens, heads, self.shape.head_dim), float("nan"), dtype=self.shape.dtype)
        addresses = tuple(one.data_ptr() for one in self.memory)
        all_params = []
        for rank in range(self.n):
            params = self.where.params(self.shape, addresses, rank, tokens, self.states[rank].data_ptr())
            params.rows, params.lse, params.out = outs[rank].data_ptr(), lses[rank].data_ptr(), merged[rank].data_ptr()
            params.most_polls = 0  # all is there before the first combine: nobody may have to wait
            all_params.append(params)
        for name, grid in zip(
            KERNELS, ((1, 1, 1, 1), (3, self.n - 1, 64, 1), (1, 1, 32, 1), (2, 1, 64, 1)), strict=True
        ):
            for params in all_params:
                self.library[f"run_{name}"](ctypes.byref(params), *grid)
        return merged


@pytest.mark.parametrize(
    ("dtype", "n", "base"), [(torch.bfloat16, 2, "e"), (torch.float32, 3, "2"), (torch.float16, 4, "e")]
)
def test_the_four_launches_merge(dtype: torch.dtype, n: int, base: str, tmp_path: Path, rng: torch.Generator) -> None:
    shape = MergeShape(max_tokens=5, num_heads=2 * n, head_dim=24, dtype=dtype, lse_base=base)  # type: ignore[arg-type]
    ranks = Ranks(shape, n, tmp_path)
    for tokens in (5, 1, 4, 4, 5):  # both slots, with rows left over from calls of more tokens
        outs = torch.randn(n, tokens, 2 * n, 24, generator=rng).to(dtype)
        lses = 5 * torch.randn(n, tokens, 2 * n, generator=rng)
        lses[0, 0, 0] = -torch.inf
        lses[:, 0, 1] = -torch.inf
        want = merge_partials(outs, lses, lse_base=base)[0]
        assert count_wrong(ranks.merge(outs, lses), want) == 0
    assert ranks.states.tolist() == [[5, 0]] * n


def test_a_peer_that_does_not_signal_is_noted(tmp_path: Path, rng: torch.Generator) -> None:
    shape = MergeShape(max_tokens=2, num_heads=4, head_dim=16, dtype=torch.float32, lse_base="e")
    ranks = Ranks(shape, 2, tmp_path)
    ranks.states[0, 0] = 7  # rank 0 is in a later call than rank 1
    ranks.merge(torch.randn(2, 2, 4, 16, generator=rng), torch.randn(2, 2, 4, generator=rng))
    assert ranks.states.tolist() == [[8, 1], [1, 0]]
