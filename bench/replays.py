"""Very many replays of captured merges, with data that change in each and ranks that are late at random; every bit of
every result is compared on the device.

    python -m dcpcomm.bench.replays --transport loopback_peer --json replays.json     # ranks: streams of one GPU
    torchrun --nproc-per-node 2 -m dcpcomm.bench.replays --transport cupy_ipc --json replays.json

Each rank makes the partials of all ranks from a counter on its device, so it knows what its result must be: what
`combine` makes of them, bit for bit. Exit status: 0, or 1 where a bit was wrong, or 2 for wrong usage.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dcpcomm.bench.console import Commit, Contender, need_gpu, numbers, of_rank_0, progress
from dcpcomm.bench.machine import facts
from dcpcomm.bench.ours import named
from dcpcomm.bench.ranks import Meeting, ProcessRanks, Ranks, ThreadRanks
from dcpcomm.combine.engine import by_destination, engine_for
from dcpcomm.graphs import captured
from dcpcomm.launch import emit, own_device, run_on_ranks, under_torchrun
from dcpcomm.merger import DCPMerger
from dcpcomm.testing.loopback import LoopbackRank, LoopbackWorld
from dcpcomm.transport import MergeShape

__all__ = ["Plan", "Tally", "main", "run"]

_SETTLE_EVERY = 100  # replays: a queue that is full would hold up the host, and with it the ranks of this process
_EAGER_EVERY = 50
_LATE_EVERY = 8
_MOST_LATE_US = 30
_PATIENCE_S = 3600.0


@dataclass(frozen=True)
class Plan:
    """What is replayed; the same on all ranks.

    Attributes:
        contender: a transport, perhaps with options (`ours.named`).
        rows: B of each merge of a replay.
    """

    contender: str
    replays: int
    rows: tuple[int, ...] = (1, 7, 3)
    heads: int = 16
    dim: int = 128
    dtype: str = "bfloat16"
    seed: int = 0


@dataclass(frozen=True)
class Tally:
    """What one rank found."""

    gpu: str
    merges: int
    words: int
    wrong: int
    seconds: float


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """int32, well stirred."""
    x = (x ^ (x >> 15)) * 0x2C1B3C6D
    x = (x ^ (x >> 12)) * 0x297A2D39
    return x ^ (x >> 15)


class _Merge:
    """One merge of a replay: the partials of all ranks in call `counter`, and what this rank must get."""

    def __init__(self, plan: Plan, number: int, tokens: int, size: int, device: torch.device) -> None:
        self.tokens, self.number, self._dtype = tokens, number, getattr(torch, plan.dtype)
        self._shape = size, tokens, plan.heads, plan.dim
        count = size * tokens * plan.heads * plan.dim
        self._places = (torch.arange(count, device=device, dtype=torch.int32) + plan.seed) * 0x1B873593 + number

    def partials(self, counter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[N, B, H, D]`, finite and never 0, and `[N, B, H]`, some of it -inf."""
        words = _mixed(self._places + counter * 0x3504F335)
        if self._dtype.itemsize == 2:
            out = ((words & 0xBFFF) | 1).to(torch.int16).view(self._dtype)
        else:
            out = ((words & -0x40000001) | 1).view(self._dtype)
        out = out.view(self._shape)
        stirred = _mixed(words.view(self._shape)[..., 0] + 1)
        lse = (stirred & 0xFF).float() / 16 - 8
        return out, torch.where((stirred >> 8) % 8 == 0, -torch.inf, lse)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def run(group: Any, ranks: Ranks, device: torch.device, plan: Plan, say: Callable[[str], Any]) -> Tally:
    """On one rank, of a group that a `DCPMerger` takes. Collective."""
    rank, size = ranks.rank, ranks.size
    shape = MergeShape(
        max_tokens=max(plan.rows), num_heads=plan.heads, head_dim=plan.dim, dtype=getattr(torch, plan.dtype),
        lse_base="e",
    )  # fmt: skip
    transport, options = named(plan.contender)
    config: dict[str, Any] = {"transport": transport, "verify": {"level": "quick"}, "watchdog": {"timeout_s": 60}}
    if options:
        config["options"] = {transport: options}
    merges = [_Merge(plan, number, tokens, size, device) for number, tokens in enumerate(plan.rows)]
    engine = engine_for(shape, rank, size, device)
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    words = torch.zeros(1, dtype=torch.int64, device=device)
    lateness = random.Random(plan.seed * 1000 + rank)
    with DCPMerger(group, shape, config, device) as merger:

        def step() -> None:
            counter.add_(1)
            for one in merges:
                outs, lses = one.partials(counter)
                got, got_lse = merger.merge(outs[rank], lses[rank], return_lse=True, tag=one.number)
                want, want_lse = torch.empty_like(got), torch.empty_like(got_lse)
                rows, sources = (
                    torch.stack([by_destination(every[source], "heads", size)[rank] for source in range(size)])
                    for every in (outs, lses)
                )
                engine.combine(rows, sources, want, want_lse)
                for mine, right in ((got, want), (got_lse, want_lse)):
                    wrong.add_((_bits(mine) != _bits(right)).sum())
                    words.add_(mine.numel())

        def late(cycles: int) -> None:
            if device.type == "cuda":
                torch.cuda._sleep(cycles)

        def settle() -> None:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            merger.check()

        for _ in range(2):
            step()
        settle()
        graph = captured(step, device)
        ranks.meet()  # to capture takes memory, which waits for the device as well
        steps = 2
        began = time.monotonic()
        for number in range(plan.replays):
            if lateness.randrange(_LATE_EVERY) == 0:
                late(int(lateness.random() * _MOST_LATE_US * 1800))
            if number % _EAGER_EVERY == _EAGER_EVERY - 1:
                step()
                steps += 1
            graph.replay()
            steps += 1
            if number % _SETTLE_EVERY == _SETTLE_EVERY - 1:
                settle()
                say(f"{plan.contender}: {number + 1} of {plan.replays} replays")
        settle()
        seconds = time.monotonic() - began
        del graph
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
        return Tally(gpu, steps * len(merges), int(words.item()), int(wrong.item()), seconds)


def _on_rank(plan: Plan) -> Tally:
    """On one rank of torchrun's, with its own GPU."""
    ranks, device = ProcessRanks(), own_device("cuda")
    plan = ranks.gather(plan)[0]  # each has rolled a seed of its own
    return run(ranks.nccl(), ranks, device, plan, emit)


def main(
    transport: Contender,
    replays: Annotated[int, typer.Option(help="of a graph with a merge for each of --rows", min=1)] = 100_000,
    ranks: Annotated[int, typer.Option(help="N, virtual ranks; under torchrun its ranks are used", min=2)] = 2,
    rows: Annotated[str, typer.Option(help="B of each merge of a replay")] = "1,7,3",
    heads: Annotated[int, typer.Option(help="H, heads of the group")] = 16,
    dim: Annotated[int, typer.Option(help="D, columns merged")] = 128,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    seed: Annotated[int | None, typer.Option(help="of the data and of who is late; default: another each time")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the results there")] = None,
    of_commit: Commit = None,
) -> None:
    """Replay captured merges very often, with changing data, and compare every bit."""
    need_gpu(transport)
    if dtype not in ("bfloat16", "float16", "float32"):
        raise typer.BadParameter(f"--dtype {dtype}; expected bfloat16, float16 or float32")
    given = random.SystemRandom().randrange(1 << 16) if seed is None else seed
    plan = Plan(transport, replays, numbers(rows), heads, dim, dtype, given)
    tallies: list[Tally] | None
    with progress() as say:
        if under_torchrun():
            tallies = run_on_ranks(_on_rank, ranks, plan, on_event=of_rank_0(say))
        else:
            world, meeting = LoopbackWorld(ranks), Meeting(ranks)
            device = torch.device("cuda", torch.cuda.current_device())

            def on_thread(group: LoopbackRank) -> Tally:
                mine = ThreadRanks(meeting, group.rank)
                return run(group, mine, device, plan, say if group.rank == 0 else lambda text: None)

            tallies = world.run(on_thread, timeout_s=_PATIENCE_S)
    if tallies is None:  # another rank than 0 under torchrun
        return
    wrong = sum(one.wrong for one in tallies)
    merges, words = sum(one.merges for one in tallies), sum(one.words for one in tallies)
    print(
        f"{transport}, {len(tallies)} ranks: {merges} merges in {replays} replays and eager calls between them, "
        f"{words} values compared, {wrong} wrong; {max(one.seconds for one in tallies):.0f} s, seed {plan.seed}"
    )
    if json_file is not None:
        found = {
            **facts("dcpcomm.bench.replays", [one.gpu for one in tallies], of_commit),
            "plan": asdict(plan),
            "ranks": [asdict(one) for one in tallies],
        }
        json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
