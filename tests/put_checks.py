"""The checks of put and take: N virtual ranks whose memory is all on one device."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch

from dcpcomm.combine.engine import by_destination
from dcpcomm.combine.params import combine_params, counts_of, pack_params, record_words
from dcpcomm.combine.structs import ChannelState, PutParams, TakeParams
from dcpcomm.rows import RowCounts
from tests.kernel_rig import DTYPES, POISON, Blocks, Findings, Rig, any_lse, header_for, layouts
from tests.oracle import Case, judge

LINE = 128
SLACK_S = 10.0  # for what takes milliseconds, or a deadline of 0.1 s, on a machine that has other things to do


class Channel:
    """One channel of N virtual ranks, each with symmetric memory, state, record and stream of its own."""

    def __init__(self, rig: Rig, n: int, capacity: int, deadline_s: float = 5.0) -> None:
        self.rig, self.n, self.capacity = rig, n, capacity
        self.flags_at = 2 * n * capacity
        self.poison_at = self.flags_at + 2 * n * LINE
        self.memory = torch.full((n, self.poison_at + LINE), POISON, dtype=torch.uint8, device=rig.device)
        self.memory[:, self.flags_at :] = 0
        self.peers = torch.tensor([one.data_ptr() for one in self.memory], dtype=torch.int64, device=rig.device)
        words = -(-ctypes.sizeof(ChannelState) // 8)
        self.states = torch.zeros((n, words), dtype=torch.int64, device=rig.device)
        self.records = [rig.pinned(record_words(n)) for _ in range(n)]
        self.deadline_ns = int(deadline_s * 1e9)
        self.kernels = rig.kernels(torch.bfloat16, n)
        self.streams = [torch.cuda.Stream(rig.device) for _ in range(n)] if rig.device.type == "cuda" else None
        rig.sync()

    def stream(self, rank: int) -> int:
        return self.streams[rank].cuda_stream if self.streams else 0

    def put(self, rank: int, send: torch.Tensor) -> None:
        """`send` `[N, nbytes]`, at any stride."""
        self.kernels.put(self.stream(rank), PutParams(
            send.data_ptr(), send.stride(0), self.peers.data_ptr(), send.shape[1], self.n * self.capacity,
            self.capacity, self.flags_at, self.poison_at, self.states[rank].data_ptr(),
            self.records[rank].data_ptr(), self.n, rank,
        ))  # fmt: skip

    def take(self, rank: int, send: torch.Tensor, recv: torch.Tensor, header_bytes: int) -> None:
        self.kernels.take(self.stream(rank), TakeParams(
            send.data_ptr(), send.stride(0), recv.data_ptr(), recv.stride(0), self.peers.data_ptr(), recv.shape[1],
            header_bytes, self.n * self.capacity, self.capacity, self.flags_at, self.poison_at,
            self.states[rank].data_ptr(), self.records[rank].data_ptr(), self.deadline_ns, self.n, rank,
        ))  # fmt: skip

    def epochs(self) -> list[int]:
        return self.states[:, 0].tolist()

    def poisoned(self) -> list[bool]:
        return [bool(one) for one in self.memory[:, self.poison_at].tolist()]

    def data(self, nbytes: int, gap: int = 0) -> torch.Tensor:
        """By rank, fresh blocks `[N, nbytes]` to send."""
        whole = torch.randint(0, 256, (self.n, self.n, nbytes + gap), dtype=torch.uint8, generator=self.rig.rng)
        return whole.to(self.rig.device)[..., :nbytes]

    def room(self, nbytes: int, gap: int = 0) -> torch.Tensor:
        return torch.full((self.n, self.n, nbytes + gap), POISON, dtype=torch.uint8, device=self.rig.device)


def check_rounds(rig: Rig, n: int, rounds: int, skewed: bool = False) -> None:
    """Back to back, of changing sizes, with no wait in between: each rank gets what each peer sent it in that round.

    `skewed`: a rank's take is launched before the next rank's put. Needs streams that run beside each other.
    """
    channel = Channel(rig, n, 16384)
    sizes = [(32 + 16 * int(rig.randint(0, 1000, (1,)))) for _ in range(rounds)]
    sizes[0], sizes[-1] = 16, 16384
    sends = [channel.data(nbytes, gap=48 * (i % 2)) for i, nbytes in enumerate(sizes)]
    rooms = [channel.room(nbytes, gap=80 * (i % 3)) for i, nbytes in enumerate(sizes)]
    rig.sync()
    for send, room, nbytes in zip(sends, rooms, sizes, strict=True):
        header = min(nbytes, 32 if nbytes % 32 else 16)
        if skewed:
            for rank in range(n):
                channel.put(rank, send[rank])
                channel.take(rank, send[rank], room[rank, :, :nbytes], header)
        else:
            for rank in range(n):
                channel.put(rank, send[rank])
            for rank in range(n):
                channel.take(rank, send[rank], room[rank, :, :nbytes], header)
    rig.sync()
    assert channel.epochs() == [rounds] * n
    assert not any(record.any() for record in channel.records), [record.tolist() for record in channel.records]
    findings = Findings()
    for number, (send, room, nbytes) in enumerate(zip(sends, rooms, sizes, strict=True)):
        with findings.case(f"N={n} round {number} of {nbytes} bytes"):
            wrong = room[..., :nbytes] != send.transpose(0, 1)
            assert not bool(wrong.any()), f"{int(wrong.sum())} bytes are wrong, at {wrong.nonzero()[0].tolist()}"
            assert bool((room[..., nbytes:] == POISON).all()), "bytes past a block were written"
    findings.report()


def check_runs_ahead(rig: Rig, n: int) -> None:
    """A rank puts its next call's rows before a peer has taken this one's: they go into the other slot."""
    channel = Channel(rig, n, 512)
    sends = [channel.data(512) for _ in range(5)]
    rooms = [channel.room(512) for _ in sends]
    rig.sync()
    findings = Findings()
    for rank in range(n):
        channel.put(rank, sends[0][rank])
    for number, (send, room) in enumerate(zip(sends, rooms, strict=True)):
        ahead = number % n
        channel.take(ahead, send[ahead], room[ahead], 32)
        if number + 1 < len(sends):
            channel.put(ahead, sends[number + 1][ahead])
        rig.sync()
        for rank in range(n):
            if rank != ahead:
                channel.take(rank, send[rank], room[rank], 32)
                rig.sync()
                if number + 1 < len(sends):
                    channel.put(rank, sends[number + 1][rank])
                    rig.sync()
        with findings.case(f"N={n} round {number}, rank {ahead} ahead"):
            assert torch.equal(room, send.transpose(0, 1))
    assert not any(record.any() for record in channel.records)
    findings.report()


def check_deadline(rig: Rig, n: int, missing: int) -> None:
    """One rank doesn't come: the others name it, in time; nothing of that call is answered, nor of later ones."""
    channel = Channel(rig, n, 4096, deadline_s=0.1)
    good, late, after = (channel.data(4096) for _ in range(3))
    room = channel.room(4096)
    rig.sync()
    for rank in range(n):
        channel.put(rank, good[rank])
    for rank in range(n):
        channel.take(rank, good[rank], room[rank], 64)
    rig.sync()
    assert not any(record.any() for record in channel.records)
    others = [rank for rank in range(n) if rank != missing]

    room.fill_(POISON)
    rig.sync()
    started = time.monotonic()
    for rank in others:
        channel.put(rank, late[rank])
    for rank in others:
        channel.take(rank, late[rank], room[rank], 64)
    rig.sync()
    assert time.monotonic() - started < SLACK_S
    names = [int(rank == missing) for rank in range(n)]
    states = [channel.records[rank][0].item() for rank in others]
    assert 1 in states, "nobody recorded that a rank is missing"
    for rank in others:
        record = channel.records[rank].tolist()
        assert record[0] in (1, 2), record  # 2: another rank's verdict came first
        assert record[1] == 2, record
        # Who sees the other's verdict before it ran into the deadline itself can't know who is missing.
        assert record[2 : 2 + n] == names or (record[0] == 2 and not any(record[2 : 2 + n])), record
    assert bool((room[others, :, :64] == 0xFF).all()), "the headers of a call that failed"
    assert channel.poisoned() == [True] * n

    def refused(ranks: list[int], epoch: int) -> None:
        room.fill_(POISON)
        for rank in ranks:
            channel.records[rank].zero_()
        rig.sync()
        started = time.monotonic()
        for rank in ranks:
            channel.put(rank, after[rank])
        for rank in ranks:
            channel.take(rank, after[rank], room[rank], 64)
        rig.sync()
        assert time.monotonic() - started < SLACK_S
        for rank in ranks:
            assert channel.records[rank][:2].tolist() == [2, epoch], channel.records[rank].tolist()
            assert bool((room[rank, :, :64] == 0xFF).all())

    refused([missing], 2)
    assert channel.epochs()[missing] == 1, "a call of a channel that was given up counts"
    refused(others, 3)
    untouched: Any = channel.memory[missing, : channel.flags_at].view(2, n, channel.capacity)[1]
    assert not bool((untouched == after[others[0], missing]).all(-1).any()), "rows of a later call were put"


def check_chain(rig: Rig, dtype: torch.dtype, n: int, d: int, scatter: str, rounds: int = 3) -> None:
    """Whole merges of N virtual ranks, pack to combine; layouts, LSE dtypes and counts differ by rank."""
    findings = Findings()
    b, h_all = (3 * n if scatter == "tokens" else 7), 2 * n
    channel = Channel(rig, n, 1 << 20)
    kernels = rig.kernels(dtype, n)
    ordinals = torch.zeros(n, dtype=torch.int64, device=rig.device)
    for number in range(rounds):
        outs, lses = rig.randn(n, b, h_all, d, dtype=dtype), any_lse(rig, n, b, h_all)
        counts = rig.randint(0, 3, (n, b))
        base = "e" if number % 2 else "2"
        header = header_for(b, d, tag=number)
        held, results = [], []
        for rank in range(n):
            lse_dtype = DTYPES[(rank + number) % 3]
            lses[rank] = lses[rank].to(lse_dtype).float()
            names = list(layouts(torch.zeros(1, 1, 1), torch.device("cpu")))
            partial = layouts(outs[rank], rig.device)[names[(rank * 3 + number) % 9]]
            rows = by_destination(partial, scatter, n)
            lse = by_destination(lses[rank].to(lse_dtype).to(rig.device), scatter, n)
            _, t, h, _ = rows.shape
            send, recv = Blocks(rig, n, t, h, d, dtype), Blocks(rig, n, t, h, d, dtype, gap=64)
            given = RowCounts(counts[rank].to(rig.device)), 0, t if scatter == "tokens" else 0
            held.append((rows, lse, send, recv, given))
            results.append((rig.poisoned((t, h, d), dtype), rig.poisoned((t, h), torch.float32)))
        rig.sync()
        for rank, (rows, lse, send, _, given) in enumerate(held):
            params = pack_params(send.wire, rows, lse, rank, header, ordinals[rank:].data_ptr(), counts_of(*given))
            kernels.pack(channel.stream(rank), params)
            channel.put(rank, send.inner.view(n, -1))
        for rank, (rows, _, send, recv, _) in enumerate(held):
            stride = recv.inner.view(n, -1)[:, : recv.nbytes]
            channel.take(rank, send.inner.view(n, -1), stride, recv.pitch)
            kernels.combine(channel.stream(rank), combine_params(
                recv.payload, recv.lse, results[rank][0], results[rank][1], base, own=rank, own_rows=rows[rank],
                own_lse=send.lse[rank], wire=recv.wire, header=header, ordinal=ordinals[rank:].data_ptr(),
                record=channel.records[rank].data_ptr(),
            ))  # fmt: skip
        rig.sync()
        case = Case(outs, lses, base, counts)
        with findings.case(f"{dtype} N={n} D={d} {scatter} round {number}"):
            assert not any(record.any() for record in channel.records), [r.tolist() for r in channel.records]
            judge([(out.cpu(), lse.cpu()) for out, lse in results], case, scatter)
    assert ordinals.tolist() == [rounds] * n
    findings.report()


def check_unread_record(rig: Rig, n: int) -> None:
    """A record that the host hasn't read stays as it is; one that isn't kept (0) is no reason to fault."""
    channel = Channel(rig, n, 64, deadline_s=0.01)
    send, room = channel.data(64), channel.room(64)
    channel.records[0][:] = 7
    rig.sync()
    channel.put(0, send[0])
    channel.take(0, send[0], room[0], 32)
    rig.sync()
    assert bool((channel.records[0] == 7).all())
    assert bool((room[0, :, :32] == 0xFF).all())
