"""NVSHMEM between threads of this process: what `nvshmem.core` and `nvshmem.bindings` offer, as far as it is used.

Each thread's rank has a PE of its own, with memory at addresses of its own. What is put arrives later, in pieces, in
any order, and its signal behind it; two puts in any order too. Streams are empty: what is asked for is done at once.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Iterator
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch

from dcpcomm.backends.nvshmem_library import NvshmemLibrary

_UID_BYTES = 128
_PATIENCE_S = 20.0
_PIECES = 4


class Signal_op(IntEnum):
    SIGNAL_SET = 9
    SIGNAL_ADD = 10


class Cmp_type(IntEnum):
    CMP_GE = 5


class Init_status(IntEnum):
    STATUS_NOT_INITIALIZED = 0
    STATUS_IS_BOOTSTRAPPED = 1
    STATUS_IS_INITIALIZED = 2
    STATUS_LIMITED_MPG = 3
    STATUS_FULL_MPG = 4


class Job:
    """`n` processes, each of which may become a PE.

    Attributes:
        reaches: whether PE a reaches the memory of PE b by loads and stores.
        waiting: seconds of a collective call until it is taken for hung.
        said: what would be undefined with NVSHMEM, and was done.
        held: symmetric allocations, by number, of each PE.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.reaches: Callable[[int, int], bool] = lambda a, b: True
        self.waiting = _PATIENCE_S
        self.said: list[str] = []
        self.held: dict[int, dict[int, Any]] = {}
        self.processes = [_Process(self, i) for i in range(n)]
        self.libraries = [NvshmemLibrary(pe.core, pe.bindings) for pe in self.processes]
        self.uids: dict[bytes, int] = {}
        self._met: dict[str, list[Any]] = {}
        self._turn = threading.Condition()
        self._under_way: list[Iterator[None]] = []
        self._arriving: list[Iterator[None]] = []
        self._over = False
        self._wire = threading.Thread(target=self._deliver, daemon=True)
        self._wire.start()

    def end(self) -> None:
        """All that is under way arrives, and no more."""
        with self._turn:
            self._over = True
            self._turn.notify_all()
        self._wire.join()

    def quiet(self) -> None:
        """Wait until all that was sent has arrived."""
        with self._turn:
            assert self._turn.wait_for(lambda: not self._under_way and not self._arriving, self.waiting)

    def meet(self, what: str, pes: int, value: Any) -> list[Any]:
        """Of a collective call, what every PE brought to it."""
        with self._turn:
            came = self._met.setdefault(what, [])
            came.append(value)
            if len(came) == pes:
                del self._met[what]
                self._turn.notify_all()
            elif not self._turn.wait_for(lambda: len(came) == pes, self.waiting):
                self.said.append(f"{len(came)} of {pes} PEs came to {what}")
                raise RuntimeError(self.said[-1])
        return came

    def send(self, message: Iterator[None]) -> None:
        with self._turn:
            self._under_way.append(message)
            self._turn.notify_all()

    def place(self, pe: int, address: int, other: int) -> int:
        """Where `address` of `pe` lies on `other`; 0, and said, where it is nobody's."""
        with self._turn:
            for rooms in self.held.values():
                offset = address - rooms[pe][0]
                if 0 <= offset < rooms[pe][1]:
                    return int(rooms[other][0]) + offset
            self.said.append(f"PE {pe} named an address that isn't symmetric")
        return 0

    def _deliver(self) -> None:
        dice, messages = random.Random(), self._arriving

        def busy() -> bool:
            return bool(messages or self._under_way or self._over)

        while True:
            with self._turn:
                self._turn.wait_for(busy)
                messages += self._under_way
                self._under_way.clear()
            if not messages:
                return  # it is over
            for _ in range(dice.randrange(1, 2 * _PIECES * len(messages))):  # then what has been sent since comes too
                index = dice.randrange(len(messages))
                if next(messages[index], "whole") == "whole":
                    messages.pop(index)
                    if not messages:
                        with self._turn:
                            self._turn.notify_all()
                        break


class _Process:
    """One process's modules."""

    def __init__(self, job: Job, index: int) -> None:
        self.job, self.pe, self.pes, self.calls = job, -1, 0, 0
        self.status = Init_status.STATUS_NOT_INITIALIZED
        self.limited = False  # whether it shares its GPU with another, without MPS
        version = SimpleNamespace(nvshmem4py_version="0.4.1", libnvshmem_version="3.4.5")
        self.core = SimpleNamespace(get_version=lambda: version, get_unique_id=self._unique_id, init=self._init)
        self.bindings = SimpleNamespace(
            Signal_op=Signal_op, Cmp_type=Cmp_type, Init_status=Init_status,
            uniqueid_dtype=SimpleNamespace(itemsize=_UID_BYTES), init_status=lambda: int(self.status),
            my_pe=lambda: self.pe, n_pes=lambda: self.pes, malloc=self._malloc, free=self._free, ptr=self._ptr,
            putmem_signal_on_stream=self._put_signal,
            signal_wait_until_on_stream=self._signal_wait_until,
        )  # fmt: skip

    def _unique_id(self, empty: bool = False) -> Any:
        room = ctypes.create_string_buffer(b"" if empty else random.randbytes(_UID_BYTES), _UID_BYTES)
        return SimpleNamespace(ptr=ctypes.addressof(room), room=room)

    def _init(self, device: Any = None, uid: Any = None, rank: Any = None, nranks: Any = None, mpi_comm: Any = None,
              initializer_method: str = "") -> None:  # fmt: skip
        assert initializer_method == "uid"
        assert mpi_comm is None
        assert self.status == Init_status.STATUS_NOT_INITIALIZED, "initialised twice"
        came = self.job.meet(f"init by {bytes(uid.room).hex()}", nranks, rank)
        assert sorted(came) == list(range(nranks))
        up = Init_status.STATUS_LIMITED_MPG if self.limited else Init_status.STATUS_IS_INITIALIZED
        self.pe, self.pes, self.status = rank, nranks, up

    def _malloc(self, size: int) -> int:
        room = (ctypes.c_uint8 * (size + 512))()
        address = -(-ctypes.addressof(room) // 512) * 512
        ctypes.memset(address, 0xA5, size)
        self.calls += 1
        came = self.job.meet(f"collective call {self.calls}", self.pes, ("malloc", self.pe, size, address, room))
        assert {one[:1] + one[2:3] for one in came} == {("malloc", size)}, "not the same call on all PEs"
        with self.job._turn:
            self.job.held[self.calls] = {one[1]: (one[3], size, one[4]) for one in came}
        return address

    def _free(self, ptr: int) -> None:
        (number,) = (one for one, rooms in self.job.held.items() if rooms[self.pe][0] == ptr)
        self.calls += 1
        came = self.job.meet(f"collective call {self.calls}", self.pes, ("free", number))
        assert set(came) == {("free", number)}, "not the same call on all PEs"
        with self.job._turn:
            self.job.held.pop(number, None)

    def _ptr(self, dest: int, pe: int) -> int:
        return self.job.place(self.pe, dest, pe) if self.job.reaches(self.pe, pe) else 0

    def _put_signal(self, dest: int, source: int, bytes: int, sig_addr: int, signal: int, sig_op: int, pe: int,
                    cstrm: int) -> None:  # fmt: skip
        assert sig_op == Signal_op.SIGNAL_ADD
        assert self.job.place(self.pe, source, self.pe) == source, "what is put must be symmetric to go to other hosts"
        taken = ctypes.string_at(source, bytes)  # the source may be written again when this returns
        to, word = self.job.place(self.pe, dest, pe), self.job.place(self.pe, sig_addr, pe)
        self.job.send(_arriving(to, taken, word, signal))

    def _signal_wait_until(self, sig_addr: int, cmp: int, cmp_value: int, cstream: int) -> None:
        assert not self.limited, "NVSHMEM ends the process"
        assert cmp == Cmp_type.CMP_GE
        assert ctypes.c_uint64.from_address(sig_addr).value >= cmp_value, "this would wait, past any deadline"


def _arriving(to: int, taken: bytes, word: int, signal: int) -> Iterator[None]:
    size = -(-len(taken) // _PIECES // 16) * 16 + 16 if len(taken) > 8 else 4  # a word arrives whole
    starts = list(range(0, len(taken), size))
    random.shuffle(starts)
    for start in starts:
        ctypes.memmove(to + start, taken[start : start + size], len(taken[start : start + size]))
        yield
    ctypes.c_uint64.from_address(word).value += signal  # by one thread alone


def tensor_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """In the place of what makes a CUDA tensor of an address."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
