"""Each fault does what it says, where it says, and writes down what it did."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dcpcomm.backends.loopback import Loopback
from dcpcomm.group import Group
from dcpcomm.testing import Fault, FaultyTransport, InjectedFault, Injection, LoopbackWorld, RankDied, faulty
from dcpcomm.topology import Facts
from dcpcomm.transport import Verdict
from tests.exchanges import ROWS, SHAPE, WIDTH, connected, rounds
from tests.nursery import Nursery


def only(cls: type[FaultyTransport]) -> Injection:
    assert len(cls.injected) == 1, cls.injected
    return cls.injected[0]


def facts(rank: int, place: str = "loopback") -> Facts:
    return Facts(rank=rank, world_size=3, host="here", device="cpu", place=place, torch_version="2")


# ---------------------------------------------------------------- the class


def test_without_faults_it_is_the_wrapped_transport() -> None:
    cls = faulty(Loopback)
    assert (cls.name, cls.capabilities, cls.Options) == ("faulty_loopback", Loopback.capabilities, Loopback.Options)
    assert issubclass(cls, Loopback)
    assert all(not arrivals.wrong() for arrivals in rounds(cls))
    assert cls.injected == []


def test_name_and_capabilities_can_be_given() -> None:
    other = dataclasses.replace(Loopback.capabilities, multi_host=True)
    cls = faulty(Loopback, name="flaky", capabilities=other)
    assert (cls.name, cls.capabilities) == ("flaky", other)
    assert faulty(Loopback).injected is not cls.injected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"kind": "explode"}, "kind is 'explode'; expected one of"),
        ({"kind": "raise", "stage": "verify"}, "stage is 'verify'; expected one of"),
        ({"kind": "corrupt", "stage": "connect"}, "of stage 'exchange'"),
        ({"kind": "refuse"}, "of stage 'check'"),
        ({"kind": "hang"}, "needs until, seconds or both"),
        ({"kind": "delay"}, "needs seconds"),
        ({"kind": "stale", "age": 0}, "age is 0"),
        ({"kind": "drop", "probability": 1.5}, "probability is 1.5"),
    ],
)
def test_what_can_not_be_is_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Fault(**given)


class Fused(Loopback):
    """Merges by itself: hands no messages over."""

    def fused_merge(self, partial_out: Any, partial_lse: Any, channel: int) -> Any:
        return partial_out, partial_lse


def test_message_faults_need_messages() -> None:
    with pytest.raises(ValueError, match="hands no messages over"):
        faulty(Fused, Fault("drop"))


def test_a_transport_that_merges_by_itself_can_raise() -> None:
    cls = faulty(Fused, Fault("raise", rank=0, call=1))

    def rank(handle: Any) -> list[Any]:
        transport = connected(cls, handle)
        return [attempt(lambda: transport.fused_merge(1, 2, 0)) for _ in range(3)]

    (fine, error, after), *others = LoopbackWorld(2).run(rank)
    assert fine == after == (1, 2)
    assert isinstance(error, InjectedFault)
    assert others == [[(1, 2)] * 3]


# ---------------------------------------------------------------- faults of a rank


def attempt(step: Callable[[], Any]) -> Any:
    try:
        return step()
    except BaseException as error:
        return error


def through_stages(cls: type[FaultyTransport], n: int = 3) -> list[dict[str, Any]]:
    """By rank, what each stage returned or raised."""

    def rank(handle: Any) -> dict[str, Any]:
        group = Group.of(handle)
        transport = cls(group, SHAPE, None)
        found = {
            "check": attempt(lambda: cls.check(facts(group.rank))),
            "prepare": attempt(transport.prepare),
            "connect": attempt(lambda: transport.connect([b""] * n)),
        }
        transport.close()
        transport.close()
        return found

    return LoopbackWorld(n).run(rank)


@pytest.mark.parametrize("stage", ["check", "prepare", "connect"])
@pytest.mark.parametrize(("kind", "error"), [("raise", InjectedFault), ("die", RankDied)])
def test_raises_or_dies_in_its_stage_on_its_rank(stage: Any, kind: Any, error: type[BaseException]) -> None:
    cls = faulty(Loopback, Fault(kind, rank=1, stage=stage, reason="no luck"))
    for rank, found in enumerate(through_stages(cls)):
        for name, came in found.items():
            assert isinstance(came, error) == (rank == 1 and name == stage), (rank, name, came)
    strike = only(cls)
    assert (strike.rank, strike.stage, strike.source) == (1, stage, None)


def test_the_dead_do_not_report() -> None:
    assert not issubclass(RankDied, Exception)


def test_rank_none_is_every_rank() -> None:
    cls = faulty(Loopback, Fault("raise", stage="prepare"))
    assert all(isinstance(found["prepare"], InjectedFault) for found in through_stages(cls))


def test_refuses_with_its_reason() -> None:
    cls = faulty(Loopback, Fault("refuse", rank=2, stage="check", reason="compiled without it"))
    assert cls.check(facts(1)) == Verdict(True)
    assert cls.check(facts(2)) == Verdict(False, "compiled without it")


@pytest.mark.parametrize("stage", ["prepare", "connect", "exchange"])
def test_a_hang_ends_with_its_event(stage: Any) -> None:
    release = threading.Event()
    cls = faulty(Loopback, Fault("hang", rank=1, stage=stage, call=0 if stage == "exchange" else None, until=release))
    done = threading.Event()
    results: list[Any] = []

    def run() -> None:
        results.extend(rounds(cls))
        done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not cls.injected:  # it is on record before it hangs
        time.sleep(0.001)
    assert not done.is_set()
    release.set()
    thread.join(20)
    assert done.is_set()
    assert all(not arrivals.wrong() for arrivals in results)


@pytest.mark.parametrize("kind", ["hang", "delay"])
def test_a_hang_and_a_delay_end_with_their_time(kind: Any) -> None:
    cls = faulty(Loopback, Fault(kind, rank=1, call=2, seconds=0.05))
    started = time.monotonic()
    assert all(not arrivals.wrong() for arrivals in rounds(cls))
    assert time.monotonic() - started >= 0.05
    assert only(cls).call == 2


def test_raises_in_its_exchange_only() -> None:
    cls = faulty(Loopback, Fault("raise", rank=0, call=1, channel=1, reason="no luck"))

    def rank(handle: Any) -> list[tuple[int, int]]:
        transport = connected(cls, handle)
        send = torch.zeros((2, ROWS, WIDTH), dtype=torch.uint8)
        raised = []
        for call in range(3):
            for channel in range(2):
                error = attempt(lambda channel=channel: transport.exchange(send, channel, recv=torch.zeros_like(send)))
                if isinstance(error, InjectedFault):
                    transport.cancel(send[:, :1], channel)  # or the peer would wait for this rank
                    raised.append((call, channel))
        return raised

    assert LoopbackWorld(2).run(rank) == [[(1, 1)], []]


_DIES = """
import torch
from dcpcomm.backends.gloo_a2a import GlooA2A
from dcpcomm.testing import Fault, faulty
from dcpcomm.topology import Facts

cls = faulty(GlooA2A, Fault("die", rank=0, stage="check"))
try:
    cls.check(Facts(rank=0, world_size=2, host="", device="cpu", place="cpu", torch_version=""))
finally:
    print("still here")
"""


def test_dies_for_good_where_the_rank_is_a_process(nursery: Nursery) -> None:
    done = nursery.python("-c", _DIES).wait()
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
