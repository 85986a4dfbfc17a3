"""What the protocol runs on: stores in flight, grids that end, streams that launch, hosts that reset."""

from __future__ import annotations

from typing import Any

from tests.protocol.memory import SENTINEL, Memory
from tests.protocol.setting import Answer, Call, Outcomes, Protocol, Reset, Scenario

__all__ = [
    "DONE",
    "ENTERED",
    "NEW",
    "SENDING",
    "SENT",
    "TAKEN",
    "WAITING",
    "Machine",
    "State",
    "Step",
    "Violated",
    "put",
]

#: (memory, stores in flight, streams). A stream: (next launch, steps of resets, active launches, record, answers). A
#: launch: (its number, its blocks). A block: (phase, epoch, how far, how it ended)
State = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]
#: Who, in which call, did what; and for an arrival, which word and value.
Step = tuple[str, str, str, tuple[Any, ...]]

NEW, ENTERED, SENDING, SENT, WAITING, TAKEN, DONE = range(7)
_PHASES = ("not begun", "resident", "sending", "sent", "waiting", "has all", "ended")

#: By `Protocol.overlap`: what all blocks of a grid are doing when the next one may begin.
_TRIGGERED = {"": DONE + 1, "waits": ENTERED, "sent": WAITING, "validated": DONE}


class Violated(Exception):
    """A property doesn't hold after this step: (step, property, detail)."""


class Machine:
    """Everything but what a block does."""

    def __init__(self, scenario: Scenario, protocol: Protocol) -> None:
        self.scenario, self.protocol = scenario, protocol
        self.memory = Memory(scenario, protocol)
        self.keys = tuple(scenario.programs)
        self.programs = tuple(scenario.programs.values())
        #: of each stream: its rank and buffers, its own poison and epoch words, and the ranks of its channel
        self.place = [(rank, scenario.buffers[channel]) for rank, channel in self.keys]
        self.poison = [self.memory.of("poison", *place) for place in self.place]
        self.epochs = [self.memory.of("epoch", *place) for place in self.place]
        self.group = [tuple(sorted({r for r, c in self.keys if c == channel})) for _, channel in self.keys]
        self._plans: dict[Any, Any] = {}

    def initial(self) -> State:
        return self.settle(self.memory.fresh, (), tuple((0, 0, (), (), ()) for _ in self.keys))

    # -- what is sent and awaited

    def call(self, state: State, s: int, a: int) -> Call:
        call = self.programs[s][state[2][s][2][a][0]]
        assert isinstance(call, Call)
        return call

    def plan(self, s: int, launch: int, b: int, epoch: int) -> tuple[list[Any], list[Any]]:
        """The stores of a block, in chunks; and what it then waits for: (what, source, row, payload, LSE, header)."""
        key = s, launch, b, epoch
        if key not in self._plans:
            call = self.programs[s][launch]
            assert isinstance(call, Call)
            self._plans[key] = self._chunks(s, launch, call, b, epoch), self._items(s, call, b, epoch)
        found: tuple[list[Any], list[Any]] = self._plans[key]
        return found

    def header(self, s: int, launch: int, call: Call, epoch: int) -> list[Any]:
        """By word, what it says beside the epoch. The call's name is there for the checker alone."""
        host = self.protocol.ordinal_from == "host"
        kind = "off" if self.place[s][0] in call.off else "rows"
        return [(call.name, self.host_ordinal(s, launch) if host else epoch), (call.tag, call.rows, kind)]

    def host_ordinal(self, s: int, launch: int) -> int:
        call = self.programs[s][launch]
        counted = sum(isinstance(item, Call) for item in self.programs[s][:launch])
        return call.ordinal if isinstance(call, Call) and call.ordinal >= 0 else counted

    def _words(self, rank: int, s: int, epoch: int, source: int, row: int) -> tuple[list[int], int, list[int]]:
        start = (rank, self.place[s][1], epoch % self.protocol.slots, source)
        payload = self.memory.of("payload", *start, row)
        return payload, self.memory.of("lse", *start, row)[0], self.memory.of("header", *start)

    def _silent(self, call: Call, source: int) -> bool:
        """The error that a source without rows sends nothing at all."""
        return self.protocol.headers == "with-rows" and all((source, r) in call.empty for r in range(call.rows))

    def _chunks(self, s: int, launch: int, call: Call, b: int, epoch: int) -> list[list[Any]]:
        rank = self.place[s][0]
        by_peer: list[list[Any]] = []
        for peer in self.group[s]:
            if peer == rank or self._silent(call, rank):
                continue
            stores: list[Any] = []
            if b == 0:
                words = self._words(peer, s, epoch, rank, 0)[2]
                values = self.header(s, launch, call, epoch)
                stores += [(word, (epoch, value)) for word, value in zip(words, values, strict=True)]
            for row in range(b, 0 if rank in call.off else call.rows, call.grid):
                payload, lse_word, _ = self._words(peer, s, epoch, rank, row)
                empty, light = (rank, row) in call.empty, (rank, row) in call.light
                if not empty:
                    stores += [(word, (call.name, row, n)) for n, word in enumerate(payload)]
                stores.append((lse_word, (epoch, "empty" if empty else "light" if light else "full", (call.name, row))))
            by_peer.append(stores)
        if self.scenario.split == "peer":
            return by_peer
        whole = [store for stores in by_peer for store in stores]
        return [[store] for store in whole] if self.scenario.split == "word" else [whole]

    def _items(self, s: int, call: Call, b: int, epoch: int) -> list[Any]:
        rank = self.place[s][0]
        takes = self.protocol.off_takes if rank in call.off else "all"
        sources = [q for q in self.group[s] if q != rank and not self._silent(call, q) and takes != "nothing"]
        items: list[Any] = [("header", q, 0, [], 0, self._words(rank, s, epoch, q, 0)[2]) for q in sources]
        for row in range(b, call.rows if takes == "all" else 0, call.grid):
            for source in sources:
                words = self._words(rank, s, epoch, source, row)
                halves = ("early", "rest") if self.protocol.rearm == "early" else ("row",)
                items += [(what, source, row, *words) for what in halves]
        return items

    # -- changes of state

    def become(self, state: State, s: int, a: int, b: int, block: Any, text: str) -> tuple[Step, Any, Any, Any]:
        """The step after which this block is so."""
        mem, flight, streams = state
        step = self.step(state, s, a, b, text)
        launch, blocks = streams[s][2][a]
        active = put(streams[s][2], a, (launch, put(blocks, b, block)))
        return step, mem, flight, put(streams, s, put(streams[s], 2, active))

    def step(self, state: State, s: int, a: int, b: int, text: str) -> Step:
        block = f"block {b} " if len(state[2][s][2][a][1]) > 1 else ""
        return self.who(s), self.call(state, s, a).name, block + text, ()

    def issue(self, state: State, s: int, launch: int, b: int, stores: list[Any]) -> State:
        mem, flight, streams = state
        return mem, tuple(sorted({*flight, *((word, value, s, launch, b) for word, value in stores)})), streams

    def record(self, state: State, s: int, epoch: int, kind: str, ranks: tuple[int, ...]) -> State:
        """What the host can see: the first launch that failed, how, and who was named."""
        mem, flight, streams = state
        since, kinds, named = streams[s][3] or (epoch, (), ())
        if since != epoch:
            return state
        seen = (epoch, tuple(sorted({*kinds, kind})), tuple(sorted({*named, *ranks})))
        return mem, flight, put(streams, s, put(streams[s], 3, seen))

    def advance(self, state: State, s: int, a: int, b: int, epoch: int) -> State:
        """This block's epoch word, and its share of those of blocks that the launch lacks."""
        mem, flight, streams = state
        grid = len(streams[s][2][a][1])
        for other in range(b, len(self.epochs[s]) if self.protocol.advances == "all" else b + 1, grid):
            mem = put(mem, self.epochs[s][other], epoch)
        return mem, flight, streams

    def fits(self, state: State, s: int) -> bool:
        """Whether one block more can be resident on this rank."""
        if not self.scenario.resident:
            return True
        rank = self.place[s][0]
        held = sum(
            block[0] not in (NEW, DONE)
            for place, stream in zip(self.place, state[2], strict=True)
            for _, blocks in stream[2]
            for block in blocks
            if place[0] == rank
        )
        return held < self.scenario.resident

    def poison_word(self, s: int, rank: int) -> int:
        """Where this stream's rank tells `rank` that the channel is given up."""
        return self.memory.at["poison", rank, self.place[s][1], self.place[s][0]]

    # -- streams and hosts

    def settle(self, mem: Any, flight: Any, streams: Any) -> State:
        """Grids that have ended are over, and what then can be launched is. Others see none of it."""
        for s in range(len(streams)):
            while True:
                launch, resets, active, record, answers = streams[s]
                if active and all(block[0] == DONE for block in active[0][1]) and self._drained(flight, s, active[0]):
                    self._check_ended(mem, s, active, record)
                    right = all(block[3] == "right" for block in active[0][1])
                    call = self.programs[s][active[0][0]]
                    assert isinstance(call, Call)
                    said = ((), ()) if right or not record else record[1:]
                    streams = put(
                        streams, s, (launch, resets, active[1:], record, (*answers, (call.name, right, *said)))
                    )
                elif self._launches(s, launch, active):
                    call = self.programs[s][launch]
                    assert isinstance(call, Call)
                    active = (*active, (launch, ((NEW, 0, 0, ""),) * call.grid))
                    streams = put(streams, s, (launch + 1, resets, active, record, answers))
                else:
                    break
        return mem, flight, streams

    def _launches(self, s: int, launch: int, active: Any) -> bool:
        if launch == len(self.programs[s]) or not isinstance(self.programs[s][launch], Call):
            return False
        if not active:
            return True
        triggered = _TRIGGERED[self.protocol.overlap]
        return len(active) < 3 and all(block[0] >= triggered for block in active[-1][1])

    def _drained(self, flight: Any, s: int, launch: Any) -> bool:
        """Whether the grid counts as ended, by what is assumed of its stores."""
        left = [store[1] for store in flight if store[2] == s and store[3] == launch[0]]
        matter = {"all": left, "none": []}.get(self.protocol.drains)
        if matter is None:
            matter = [value for value in left if (value == SENTINEL) == (self.protocol.drains == "rearm")]
        return not matter

    def _check_ended(self, mem: Any, s: int, active: Any, record: Any) -> None:
        blocks = active[0][1]
        if record or any(block[3] != "right" for block in blocks):
            return
        epochs = {mem[word] for word in self.epochs[s]}
        if len(active) == 1 and len(epochs) > 1 and "epochs differ" not in self.scenario.forgives:
            raise Violated("epochs differ", f"after {self.who(s)}'s launch its blocks are in epochs {sorted(epochs)}")
        slot = blocks[0][1] % self.protocol.slots
        if "left unarmed" in self.scenario.forgives:
            return
        for word in self.memory.of("payload", *self.place[s], slot):
            if mem[word] != SENTINEL:
                raise Violated("left unarmed", f"{self.memory.name(word)} = {shown(mem[word])} when the grid has ended")

    def reset(self, state: State, s: int) -> tuple[Step, Any, Any, Any] | None:
        """The host's next step of a reset; every third of all streams' steps is an agreement."""
        mem, flight, streams = state
        launch, resets, active, _, answers = streams[s]
        item, peers = (
            self.programs[s][launch],
            [r for p, r in zip(self.keys, streams, strict=True) if p[1] == self.keys[s][1]],
        )
        assert isinstance(item, Reset)
        agreed = all(peer[1] >= resets for peer in peers)
        if resets % 3 == 0:
            ended = [self.keys.index(key) for key in item.after]
            if any(streams[e][0] < len(self.programs[e]) or streams[e][2] for e in ended):
                return None
            return (
                self._host(s, "has stopped"),
                mem,
                flight,
                put(streams, s, (launch, resets + 1, active, *streams[s][3:])),
            )
        if resets % 3 == 1:
            if not agreed and self.protocol.agrees_to_refill:
                return None
            place = self.place[s]
            cells = zip(self.memory.cells, self.memory.fresh, mem, strict=True)
            mem = tuple(fresh if cell[1:3] == place else now for cell, fresh, now in cells)
            return (
                self._host(s, "refills its buffers"),
                mem,
                flight,
                put(streams, s, (launch, resets + 1, (), (), answers)),
            )
        if not agreed and self.protocol.agrees_to_begin:
            return None
        return self._host(s, "begins anew"), mem, flight, put(streams, s, (launch + 1, resets + 1, *streams[s][2:]))

    def _host(self, s: int, text: str) -> Step:
        return self.who(s) + "'s host", "", text, ()

    # -- the end

    def judge(self, state: State) -> tuple[str, str] | None:
        """What is wrong with a state in which nothing more can happen."""
        outcomes: Outcomes = {}
        stuck = []
        for s, (launch, _, active, _, answers) in enumerate(state[2]):
            outcomes[self.keys[s]] = tuple(Answer(*answer) for answer in answers)
            for number, blocks in active:
                call = self.programs[s][number]
                assert isinstance(call, Call)
                states = ", ".join(_PHASES[block[0]] for block in blocks)
                stuck.append(f"{self.who(s)} in {call.name}: blocks {states}")
            if not active and launch < len(self.programs[s]):
                stuck.append(f"{self.who(s)} in a reset")
        if stuck and "deadlock" in self.scenario.forgives:
            return None
        if stuck:
            return "deadlock", "; ".join(stuck)
        text = self.scenario.expect(outcomes)
        return ("unexpected end", text) if text else None

    def who(self, s: int) -> str:
        rank, channel = self.keys[s]
        return f"rank {rank}" + (f" channel {channel}" if len({c for _, c in self.keys}) > 1 else "")


def put(items: tuple[Any, ...], n: int, value: Any) -> tuple[Any, ...]:
    return (*items[:n], value, *items[n + 1 :])


def shown(value: Any) -> str:
    """A word, for people."""
    if value == SENTINEL:
        return "sentinel"
    if isinstance(value, tuple):
        return "{" + ", ".join(shown(part) for part in value) + "}"
    return str(value)
