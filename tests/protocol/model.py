"""The protocol of the fused peer kernel: what a block does, one step at a time.

A step is one access to memory that others see, with the private work before it. Stores are put into flight, and arrive
one by one in any order; a grid has ended when its blocks have and its stores have arrived (`Protocol.drains`).
"""

from __future__ import annotations

from typing import Any

from tests.protocol.machine import (
    DONE,
    ENTERED,
    NEW,
    SENDING,
    SENT,
    TAKEN,
    WAITING,
    Machine,
    State,
    Step,
    Violated,
    put,
    shown,
)
from tests.protocol.memory import SENTINEL
from tests.protocol.setting import Protocol, Scenario

__all__ = ["Model", "State", "Step"]

_POISONED = -1  # in an epoch word


class Model(Machine):
    """All steps from a state. `reduce`: where an arrival commutes with whatever can come before it, only that."""

    def __init__(self, scenario: Scenario, protocol: Protocol, *, reduce: bool = True) -> None:
        super().__init__(scenario, protocol)
        self.reduce = reduce

    # -- steps

    def steps(self, state: State) -> list[tuple[Step, State, tuple[str, str] | None]]:
        found: list[tuple[Step, State, tuple[str, str] | None]] = []
        mem, flight, streams = state
        if self.reduce:
            for n in range(len(flight)):
                if self._commutes(mem, flight, streams, n):
                    self._try(found, state, self._arrive, n)
                    return found
        for n in range(len(flight)):
            self._try(found, state, self._arrive, n)
        for s, (launch, _, active, _, _) in enumerate(streams):
            for a, (_, blocks) in enumerate(active):
                for b, block in enumerate(blocks):
                    if block[0] != DONE:
                        self._block_steps(found, state, s, a, b)
            if not active and launch < len(self.programs[s]):  # a call would have been launched: it is a reset
                self._try(found, state, self.reset, s)
        return found

    def _try(self, found: list[Any], state: State, action: Any, *args: Any) -> None:
        """Append what `action` leads to, unless it can't happen here."""
        step: Step = ("", "", "", ())
        try:
            if (happened := action(state, *args)) is None:
                return
            step, mem, flight, streams = happened
            found.append((step, self.settle(mem, flight, streams), None))
        except Violated as violated:
            *before, property, detail = violated.args
            found.append((before[0] if before else step, state, (property, detail)))

    def _commutes(self, mem: Any, flight: Any, streams: Any, n: int) -> bool:
        """Whether nothing that could happen before this arrival would see or write its word.

        Then the order doesn't matter, and the other orders need no search. An LSE or header word: no block still looks
        for the epoch that is there. A payload word: the sentinel is there, which nobody takes. A later store to the
        same word can't come before, where a rank sends again only when an earlier grid's stores have arrived; and
        readers must look at every word. Without either (`Case.reduce`, `Fault.reduce`), all orders are searched.
        """
        word, value, *_ = flight[n]
        if (n and flight[n - 1][0] == word) or (n + 1 < len(flight) and flight[n + 1][0] == word):
            return False
        kind = self.memory.kinds[word]
        if kind == "payload":
            return bool(value != SENTINEL and mem[word] == SENTINEL)
        if kind in ("lse", "header"):
            place = self.memory.cells[word][1:3]
            return bool(mem[word][0] <= self._finished(mem, streams, place))
        return False

    def _finished(self, mem: Any, streams: Any, place: tuple[int, int]) -> int:
        """The last epoch that no block there looks for any more. A block that hasn't begun looks for its word + 1."""
        epochs: list[int] = []
        for s, stream in enumerate(streams):
            if self.place[s] == place:
                epochs += [mem[word] for word in self.epochs[s]]
                epochs += [b[1] - 1 for _, blocks in stream[2] for b in blocks if b[0] not in (NEW, DONE) and b[1]]
        return min(epochs)

    def _arrive(self, state: State, n: int) -> Any:
        mem, flight, streams = state
        word, value, *_ = flight[n]
        step: Step = ("memory", "", "arrives", (word, value))
        return step, put(mem, word, value), flight[:n] + flight[n + 1 :], streams

    def _block_steps(self, found: list[Any], state: State, s: int, a: int, b: int) -> None:
        phase = state[2][s][2][a][1][b][0]
        if phase == NEW:
            first = self._enter if self.protocol.overlap == "waits" else self._start
            self._try(found, state, first, s, a, b)
        elif phase == ENTERED:
            self._try(found, state, self._start, s, a, b)
        elif phase == SENDING:
            self._try(found, state, self._send, s, a, b)
        elif phase == SENT:
            self._try(found, state, self._trigger, s, a, b)
        elif phase == WAITING:
            self._try(found, state, self._take, s, a, b)
            self._try(found, state, self._give_up_as_told, s, a, b)
            if self.call(state, s, a).deadline:
                self._try(found, state, self._time_out, s, a, b)
        elif phase == TAKEN:
            self._try(found, state, self._finish, s, a, b)

    # -- a block

    def _enter(self, state: State, s: int, a: int, b: int) -> Any:
        """Under programmatic launch: resident, though the grid before hasn't ended."""
        if not self.fits(state, s):
            return None
        epoch = 0 if self.protocol.epoch_after_wait else state[0][self.epochs[s][b]] + 1
        return self.become(state, s, a, b, (ENTERED, epoch, 0, ""), "becomes resident")

    def _start(self, state: State, s: int, a: int, b: int) -> Any:
        """Load the epoch and the poison words, and send."""
        mem, _, streams = state
        protocol = self.protocol
        early = protocol.overlap == "waits" and not protocol.epoch_after_wait
        if protocol.overlap == "waits":
            if a and not early:
                return None
        elif not self.fits(state, s):
            return None
        own = self.epochs[s][b]
        if mem[own] == _POISONED:
            return self.become(state, s, a, b, (DONE, 0, 0, "refused"), "finds its epoch word poisoned, and ends")
        epoch = streams[s][2][a][1][b][1] if early else mem[own] + 1
        if protocol.epoch_from == "host":
            epoch = self.host_ordinal(s, streams[s][2][a][0]) + 1
        poison = [mem[word] for word in self.poison[s] if mem[word]]
        stale = any(since < epoch for since, _ in poison)
        if protocol.refuses and (stale or (poison and not protocol.same_call_sends)):
            state = self.advance(self.record(state, s, epoch, "told", self._named(s, poison)), s, a, b, epoch)
            return self.become(state, s, a, b, (DONE, epoch, 0, "refused"), "finds the channel poisoned, and ends")
        if protocol.overlap in ("sent", "validated"):
            state = self.advance(state, s, a, b, epoch)
        chunks = self.plan(s, streams[s][2][a][0], b, epoch)[0]
        return self._put_chunk(state, s, a, b, epoch, chunks, 0)

    def _send(self, state: State, s: int, a: int, b: int) -> Any:
        launch, blocks = state[2][s][2][a]
        _, epoch, done, _ = blocks[b]
        return self._put_chunk(state, s, a, b, epoch, self.plan(s, launch, b, epoch)[0], done)

    def _put_chunk(self, state: State, s: int, a: int, b: int, epoch: int, chunks: Any, done: int) -> Any:
        launch = state[2][s][2][a][0]
        if done < len(chunks):
            state = self.issue(state, s, launch, b, chunks[done])
        if done + 1 < len(chunks):
            phase, done = SENDING, done + 1
        else:
            phase, done = (SENT if self.protocol.overlap == "sent" else WAITING), 0
        part = f", part {done} of {len(chunks)}" if len(chunks) > 1 and done else ""
        return self.become(state, s, a, b, (phase, epoch, done, ""), f"sends in epoch {epoch}{part}")

    def _trigger(self, state: State, s: int, a: int, b: int) -> Any:
        """Let the next kernel begin, once the one before has ended."""
        if a and self.protocol.waits_before_trigger:
            return None
        epoch = state[2][s][2][a][1][b][1]
        return self.become(state, s, a, b, (WAITING, epoch, 0, ""), "lets the next kernel begin")

    def _take(self, state: State, s: int, a: int, b: int) -> Any:
        """The next thing that it waits for: a header, or a row of one source."""
        mem, _, streams = state
        launch, blocks = streams[s][2][a]
        _, epoch, done, _ = blocks[b]
        call = self.call(state, s, a)
        items = self.plan(s, launch, b, epoch)[1]
        if done == len(items):
            return self._taken(state, s, a, b, "has nothing to wait for")
        what, source, row, words, lse_word, header = items[done]
        if what == "header":
            return self._compare(state, s, a, b, items[done])
        if mem[header[-1]][1][-1:] == ("off",):
            return self._on(state, s, a, b, f"rank {source} called it off: no row {row}")
        stamp, lse, ghost = mem[lse_word]
        if stamp != epoch:
            return None
        light = lse == "light"
        awaited = lse != "empty" if self.protocol.awaited == "wire" else (self.place[s][0], row) not in call.empty
        # `early` takes a row in two steps: words that are there, with all re-armed, and then those that were not
        looked_at = words[:1] if what == "early" or self.protocol.words_checked == "first" else words
        if what == "rest":
            looked_at = words[1:]
        if awaited and any(mem[word] == SENTINEL for word in looked_at):
            return None
        text = f"takes row {row} of rank {source}" + ("" if awaited else ", of which nothing was sent")
        step = self.step(state, s, a, b, text)
        if ghost != (call.name, row):
            raise Violated(step, "wrong data", f"the LSE is that of {shown(ghost)}")
        for n, word in enumerate(words if awaited and what == "row" else looked_at if awaited else ()):
            if mem[word] == SENTINEL:
                raise Violated(step, "torn row", f"{self.memory.name(word)} has not arrived")
            if mem[word][:2] != (call.name, row):
                raise Violated(step, "wrong data", f"word {n} is that of {shown(mem[word])}")
        if awaited and what != "rest" and not (self.protocol.rearm == "unless-light" and light):
            state = self.issue(state, s, launch, b, [(word, SENTINEL) for word in words])
            text += ", and re-arms it" if what == "row" else " as far as it is there, and re-arms all of it"
        return self._on(state, s, a, b, text)

    def _compare(self, state: State, s: int, a: int, b: int, item: Any) -> Any:
        mem = state[0]
        _, source, _, _, _, words = item
        epoch = state[2][s][2][a][1][b][1]
        read = [mem[word] for word in words]
        stamps = read if self.protocol.header_epoch == "every-word" else read[:1]
        if any(word[0] != epoch for word in stamps):
            return None
        call = self.call(state, s, a)
        mine, theirs = self.header(s, state[2][s][2][a][0], call, epoch), [word[1] for word in read]
        ghost = theirs[0][0]
        if theirs[0][1:] == mine[0][1:] and theirs[1][:2] == mine[1][:2]:  # the kind may differ
            return self._on(state, s, a, b, f"finds the header of rank {source} equal")
        text = f"finds the header of rank {source} different"
        if ghost == call.name:
            step = self.step(state, s, a, b, text)
            raise Violated(step, "false mismatch", f"both are in {ghost}: {shown(mine)} here, {shown(theirs)} came")
        state = self.record(state, s, epoch, "mismatch", (source,))
        # Peers are left to find it themselves, so that each names its own.
        state = self.issue(state, s, state[2][s][2][a][0], b, [(self.poison_word(s, self.place[s][0]), (epoch, ()))])
        return self._end(state, s, a, b, epoch, "mismatch", text + ", poisons its own channel and ends")

    def _give_up_as_told(self, state: State, s: int, a: int, b: int) -> Any:
        mem = state[0]
        epoch = state[2][s][2][a][1][b][1]
        poison = [
            mem[word] for word in self.poison[s] if mem[word] and (self.protocol.refuses or mem[word][0] >= epoch)
        ]
        if not poison and mem[self.epochs[s][b]] != _POISONED:
            return None
        named = self._named(s, poison)
        state = self.record(state, s, epoch, "told", named)
        if self.protocol.poison_in == "own-word" and self.protocol.told_poisons:
            # The peer may have given up in a later call than this one, which this rank must not carry either.
            own = (self.poison_word(s, self.place[s][0]), (epoch, named))
            state = self.issue(state, s, state[2][s][2][a][0], b, [own])
        return self._end(state, s, a, b, epoch, "told", "finds the channel poisoned while it waits, and ends")

    def _time_out(self, state: State, s: int, a: int, b: int) -> Any:
        """Where what it waits for was not even sent: deadlines are far longer than a store is on its way."""
        mem, flight, streams = state
        launch, blocks = streams[s][2][a]
        _, epoch, done, _ = blocks[b]
        there = list(mem)
        for word, value, *_ in flight:
            if value != SENTINEL:
                there[word] = value
        items = self.plan(s, launch, b, epoch)[1]
        late = [self._late(there, item, epoch) for item in items[done:]]
        if not late or not late[0]:
            return None
        missing = tuple(sorted({item[1] for item, is_late in zip(items[done:], late, strict=True) if is_late}))
        state = self.record(state, s, epoch, "missing", missing)
        told = (epoch, missing if self.protocol.poison_names else ())
        if self.protocol.poison_in == "own-word":
            stores: list[Any] = [(self.poison_word(s, peer), told) for peer in self.group[s]]
        else:
            place = self.place[s][1]
            stores = [(w, _POISONED) for peer in self.group[s] for w in self.memory.of("epoch", peer, place)]
        state = self.issue(state, s, launch, b, stores)
        names = ", ".join(map(str, missing))
        return self._end(state, s, a, b, epoch, "missing", f"gives rank {names} up, poisons all peers and ends")

    @staticmethod
    def _late(there: list[Any], item: Any, epoch: int) -> bool:
        _, _, _, words, lse_word, header = item
        if any(there[word][0] != epoch for word in header):
            return True
        if not words or there[header[-1]][1][-1:] == ("off",):
            return False
        stamp, lse, _ = there[lse_word]
        return stamp != epoch or (lse != "empty" and any(there[word] == SENTINEL for word in words))

    def _on(self, state: State, s: int, a: int, b: int, text: str) -> Any:
        """One thing less to wait for."""
        launch, blocks = state[2][s][2][a]
        _, epoch, done, _ = blocks[b]
        if done + 1 == len(self.plan(s, launch, b, epoch)[1]):
            return self._taken(state, s, a, b, text)
        return self.become(state, s, a, b, (WAITING, epoch, done + 1, ""), text)

    def _taken(self, state: State, s: int, a: int, b: int, text: str) -> Any:
        epoch = state[2][s][2][a][1][b][1]
        if self.protocol.overlap == "validated" or self.protocol.strict:
            return self.become(state, s, a, b, (TAKEN, epoch, 0, ""), text)
        return self._end(state, s, a, b, epoch, "right", text)

    def _finish(self, state: State, s: int, a: int, b: int) -> Any:
        """Behind a fence (`strict`), or behind the grid before (`validated`)."""
        launch = state[2][s][2][a][0]
        if self.protocol.strict and any(store[2:] == (s, launch, b) and store[1] == SENTINEL for store in state[1]):
            return None
        if self.protocol.overlap and a and self.protocol.waits_before_trigger:
            return None
        return self._end(state, s, a, b, state[2][s][2][a][1][b][1], "right", "ends")

    def _end(self, state: State, s: int, a: int, b: int, epoch: int, how: str, text: str) -> Any:
        record, call = state[2][s][3], self.call(state, s, a)
        rank = self.place[s][0]
        if how == "right" and record and record[0] < epoch:
            step = self.step(state, s, a, b, text)
            raise Violated(step, "answer after a failure", f"the channel failed in epoch {record[0]}, no reset since")
        if how == "right" and (call.off or rank in call.off):
            how = "off"
        late = self.protocol.overlap in ("", "waits")  # else it was advanced before the next kernel could begin
        if late and (how == "right" or self.protocol.poison_in == "own-word"):
            state = self.advance(state, s, a, b, epoch)
        return self.become(state, s, a, b, (DONE, epoch, 0, how), text)

    def _named(self, s: int, poison: list[Any]) -> tuple[int, ...]:
        """Whom a rank that was told names: all that were missing elsewhere, but itself."""
        return tuple(sorted({rank for _, missing in poison for rank in missing} - {self.place[s][0]}))

    def describe(self, step: Step) -> str:
        who, call, what, about = step
        if about:
            return f"arrives: {self.memory.name(about[0])} = {shown(about[1])}"
        return f"{who}{', ' if call else ''}{call}: {what}"
