"""What a call brings is checked once for each layout; whatever a layout doesn't tell, in every call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from dcpcomm.arguments import Arguments, rows_of
from dcpcomm.errors import ShapeError
from dcpcomm.rows import row_counts
from dcpcomm.transport import MergeShape

B, H, D, N = 4, 4, 32, 2
CPU = torch.device("cpu")
SHAPE = MergeShape(max_tokens=8, num_heads=H, head_dim=D, dtype=torch.float32, lse_base="e")
ROWS = (B, H // N, D)

#: Tensors that look like any other and lie nowhere.
NOWHERE = {
    "a lazy zero": lambda one: torch._efficientzerotensor(tuple(one.shape)),
    "a wrapper": AsyncCollectiveTensor,
    "a fake": lambda one: FakeTensorMode().from_tensor(one),
}


def plain() -> dict[str, torch.Tensor]:
    return {"out": torch.randn(B, H, D), "lse": torch.randn(B, H), "into": torch.zeros(ROWS)}


def check(arguments: Arguments, given: dict[str, Any]) -> None:
    checked = arguments.partials(given["out"], given["lse"])
    assert (checked.tokens, checked.rows) == (B, ROWS[:2])
    arguments.out(given["into"], ROWS, checked, (given["out"], given["lse"], None, None, None))


@pytest.fixture(params=[False, True], ids=["first", "after one like it"])
def arguments(request: pytest.FixtureRequest) -> Arguments:
    made = Arguments(SHAPE, N, CPU)
    if request.param:
        check(made, plain())
    return made


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(("where", "name"), [("out", "partial_out"), ("lse", "partial_lse"), ("into", "out")])
@pytest.mark.parametrize("kind", NOWHERE)
def test_memory_that_is_not_there_is_refused(arguments: Arguments, kind: str, where: str, name: str) -> None:
    """To read there ends the process."""
    given = plain()
    given[where] = NOWHERE[kind](given[where])
    with pytest.raises(ShapeError, match=rf"^{name} is a \w+ without memory of its own"):
        check(arguments, given)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_and_have_as_many_rows_as_can_be_told(arguments: Arguments) -> None:
    given = plain()
    given["out"] = torch.nested.nested_tensor([torch.randn(H, D) for _ in range(B)])
    with pytest.raises(ShapeError, match="partial_out is a nested tensor"):
        check(arguments, given)
    assert rows_of(given["out"], given["lse"]) == B, "the peers are told by a call of as many rows"


@pytest.mark.parametrize("wrong", ["interleaved", "inside", "the same"])
def test_an_out_among_the_inputs_is_refused(arguments: Arguments, wrong: str) -> None:
    given = plain()
    given["into"] = {
        "the same": given["out"][:, : H // N],
        "inside": given["out"].view(-1)[D : D + B * H // N * D].view(ROWS),
        "interleaved": given["out"].view(-1)[: 2 * B * H // N * D : 2].view(ROWS),
    }[wrong]
    with pytest.raises(ShapeError, match="out overlaps partial_out in memory"):
        check(arguments, given)


def test_rows_between_those_of_an_input_are_nobodys(arguments: Arguments) -> None:
    both = torch.zeros(2 * B, H, D)
    given = {**plain(), "out": both[::2], "into": both[1::2, : H // N]}
    check(arguments, given)


def test_what_asks_for_a_gradient_is_refused_in_every_call(arguments: Arguments) -> None:
    given = plain()
    given["lse"].requires_grad_()
    with pytest.raises(ShapeError, match="partial_lse requires grad"):
        check(arguments, given)
    with torch.no_grad():
        check(arguments, given)


def test_the_librarys_own_memory_is_refused(arguments: Arguments) -> None:
    own = torch.zeros(1 << 14, dtype=torch.uint8)
    arguments.keep_off(own)
    for name, wrong in (("out", "partial_out"), ("lse", "partial_lse"), ("into", "out")):
        given = plain()
        one = given[name]
        given[name] = own[4096 : 4096 + one.nbytes].view(torch.float32).view(one.shape)
        with pytest.raises(ShapeError, match=rf"^{wrong} lies in the library's own buffers"):
            check(arguments, given)


def test_what_is_remembered_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcpcomm.arguments._KNOWN", 16)
    arguments = Arguments(SHAPE, N, CPU)
    for gap in range(100):
        room = torch.randn(B, H, D + gap)
        given = {**plain(), "out": room[..., :D]}
        check(arguments, given)
    assert len(arguments._partials) <= 16
    assert len(arguments._outs) <= 16


@pytest.mark.parametrize("which", ["valid_counts", "seq_lens", "query_start_loc"])
@pytest.mark.parametrize("kind", ["sparse", "a lazy zero"])
def test_counts_must_be_dense(which: str, kind: str) -> None:
    counts = {"seq_lens": torch.ones(B, dtype=torch.int32), "query_start_loc": torch.arange(B + 1)}
    if which == "valid_counts":
        counts = {"valid_counts": torch.ones(B, dtype=torch.int32)}
    one = counts[which]
    counts[which] = one.to_sparse() if kind == "sparse" else torch._efficientzerotensor(one.shape, dtype=one.dtype)
    given = [counts.get(name) for name in ("valid_counts", "seq_lens", "query_start_loc")]
    with pytest.raises(ShapeError, match=f"{which} is no plain tensor"):
        row_counts(B, CPU, *given)
