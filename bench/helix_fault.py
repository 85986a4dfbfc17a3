"""Stale halves of lines out of FlashInfer's `decode_cp_a2a_alltoall`, shown on one GPU with torch and FlashInfer alone.

    python bench/helix_fault.py                       # 64 rows of 8192 columns, 200 calls
    python bench/helix_fault.py --width 128 --rows 4096
    DCP_A2A_CHANNEL_COUNT=1 python bench/helix_fault.py
    python bench/helix_fault.py --repeats 5           # every call five times, on the same data
    python bench/helix_fault.py --placement pinned    # queues in the host's memory

Two ranks are two streams of this process. Their workspace is one tensor in plain device memory, so no handle, no link
and no second GPU is involved. Each 64-bit word that is sent says by which call, from whom, to whom, and from where; so
each wrong word says what it is. Imports nothing of dcpcomm, so that it can be sent upstream as it is.

Exit status: 0 where every word was right, 1 where some were wrong, 2 where it can't run, and 1 with a traceback where
the kernels hung.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import itertools
import json
import os
import sys
from typing import Any

import torch

RANKS = 2
FILL = -1  # what decode_cp_a2a_init_workspace leaves in the queues
_CALL, _SOURCE, _DESTINATION = 40, 38, 36  # where the parts of a word begin; the place is below


def words(call: int, source: int, destination: int, rows: int, per_row: int, device: Any) -> torch.Tensor:
    """int64 `[rows, per_row]`: what `source` sends to `destination` in `call`."""
    place = torch.arange(rows * per_row, dtype=torch.int64, device=device).view(rows, per_row)
    return place + (call + 1 << _CALL) + (source << _SOURCE) + (destination << _DESTINATION)


def call_of(word: int) -> int | None:
    """Which call wrote a word; None: it is what the queues were filled with."""
    return None if word == FILL else (word >> _CALL) - 1


class Tally:
    """What was wrong, over all calls."""

    def __init__(self) -> None:
        self.wrong_words = self.wrong_rows = self.wrong_calls = self.of_own_slice = 0
        self.ages: collections.Counter[str] = collections.Counter()
        self.runs: collections.Counter[int] = collections.Counter()
        self.starts: collections.Counter[int] = collections.Counter()
        self.first = ""

    def compare(self, call: int, repeats: int, rank: int, source: int, got: torch.Tensor, want: torch.Tensor) -> None:
        """int64 `[rows, per_row]` that `rank` got from `source`, against what was sent."""
        if torch.equal(got, want):
            return
        got, want = got.cpu(), want.cpu()
        wrong = got != want
        self.wrong_calls += 1
        self.wrong_rows += int(wrong.any(1).sum())
        self.wrong_words += int(wrong.sum())
        self.of_own_slice += int(wrong.sum()) if source == rank else 0
        for word in got[wrong].tolist():
            before = call_of(word)
            self.ages["initial fill" if before is None else str((call - before) * repeats)] += 1
        for row in wrong.any(1).nonzero().flatten().tolist():
            columns = wrong[row].nonzero().flatten()
            begins = [0, *((columns.diff() > 1).nonzero().flatten() + 1).tolist(), len(columns)]
            for first, end in itertools.pairwise(begins):
                self.runs[8 * (end - first)] += 1
                self.starts[int(columns[first]) * 8 % 128] += 1
            if not self.first:
                at = int(columns[0])
                self.first = (
                    f"call {call}, rank {rank}, row {row} from rank {source}, byte {8 * at}: wanted "
                    f"{int(want[row, at]):#018x}, got {int(got[row, at]) & (1 << 64) - 1:#018x}"
                )


def plain_workspace(nbytes: int, placement: str, device: torch.device) -> tuple[torch.Tensor, Any]:
    """int64 `[RANKS, nbytes / 8]`, and what must live as long."""
    count = -(-nbytes // 8)
    if placement == "device":
        return torch.empty((RANKS, count), dtype=torch.int64, device=device), None
    host = torch.empty(RANKS * count, dtype=torch.int64, pin_memory=True)

    class Mapped:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (RANKS, count), "typestr": "<i8", "data": (host.data_ptr(), False), "version": 3,
        }  # fmt: skip

    return torch.as_tensor(Mapped(), device=device), host


def run(given: argparse.Namespace) -> dict[str, Any]:
    """All calls; what was found."""
    import flashinfer  # type: ignore[import-not-found,unused-ignore]
    from flashinfer import comm

    device = torch.device("cuda", torch.cuda.current_device())
    workspace, kept = plain_workspace(comm.decode_cp_a2a_workspace_size(RANKS), given.placement, device)
    for rank in range(RANKS):
        comm.decode_cp_a2a_init_workspace(workspace, rank, RANKS)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(RANKS)]
    per_row = given.width * 2 // 8
    statistics = torch.zeros(given.rows, RANKS, 2, device=device)
    outs = [
        [torch.empty(given.rows, RANKS, given.width, dtype=torch.bfloat16, device=device) for _ in range(given.repeats)]
        for _ in range(RANKS)
    ]
    stats_out = [torch.empty_like(statistics) for _ in range(RANKS)]
    tallies = [Tally() for _ in range(given.repeats)]
    never_right = 0
    for call in range(given.calls):
        sent = [
            torch.stack([words(call, rank, to, given.rows, per_row, device) for to in range(RANKS)], 1)
            for rank in range(RANKS)
        ]
        torch.cuda.synchronize()
        for turn in range(given.repeats):
            for rank in range(RANKS):
                with torch.cuda.stream(streams[rank]):
                    comm.decode_cp_a2a_alltoall(
                        sent[rank].view(torch.bfloat16), statistics, workspace, rank, RANKS,
                        enable_pdl=not given.no_pdl, out=(outs[rank][turn], stats_out[rank]),
                    )  # fmt: skip
        torch.cuda.synchronize()
        for rank in range(RANKS):
            for source in range(RANKS):
                want = sent[source][:, rank]
                wrong = torch.ones_like(want, dtype=torch.bool)
                for turn, tally in enumerate(tallies):
                    got = outs[rank][turn].view(torch.int64)[:, source]
                    tally.compare(call, given.repeats, rank, source, got, want)
                    wrong &= got != want
                never_right += int(wrong.sum())
    del kept
    total = given.calls * RANKS * RANKS * given.rows * per_row
    return {
        "gpu": torch.cuda.get_device_name(device),
        "flashinfer": flashinfer.__version__,
        "torch": torch.__version__,
        "channels": os.environ.get("DCP_A2A_CHANNEL_COUNT", "default"),
        "placement": given.placement,
        "pdl": not given.no_pdl,
        "rows": given.rows,
        "width": given.width,
        "calls": given.calls,
        "messages": given.calls * RANKS * RANKS,
        "words": total,
        "words_never_right": never_right,
        "by_repeat": [
            {
                "wrong_words": tally.wrong_words,
                "wrong_rows": tally.wrong_rows,
                "wrong_messages": tally.wrong_calls,
                "in_own_slice": tally.of_own_slice,
                "calls_old": dict(tally.ages.most_common(8)),
                "bytes_of_runs": {str(size): count for size, count in tally.runs.most_common(8)},
                "runs_begin_at_byte_of_128": {str(at): count for at, count in sorted(tally.starts.items())[:16]},
                "first": tally.first,
            }
            for tally in tallies
        ],
    }


def main() -> int:
    """As the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--width", type=int, default=8192, help="bfloat16 columns of a row, a multiple of 8")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=1, help="exchanges of the same data in a row")
    parser.add_argument("--placement", choices=("device", "pinned"), default="device")
    parser.add_argument("--no-pdl", action="store_true", help="without programmatic dependent launch")
    parser.add_argument("--limit-s", type=float, default=100, help="then end, with a traceback")
    given = parser.parse_args()
    if given.width % 8:
        parser.error(f"--width {given.width}; expected a multiple of 8: FlashInfer moves 16 bytes at a time")
    if not torch.cuda.is_available():
        print("this needs a CUDA GPU, and torch sees none", file=sys.stderr)
        return 2
    faulthandler.dump_traceback_later(given.limit_s, exit=True)
    found = run(given)
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps(found, indent=1))
    return int(any(one["wrong_words"] for one in found["by_repeat"]))


if __name__ == "__main__":
    sys.exit(main())
