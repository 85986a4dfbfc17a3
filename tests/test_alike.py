"""The guard of the short way: it must tell apart whatever a check of the long way could judge otherwise."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcpcomm import alike as module
from dcpcomm.again import layout_of
from dcpcomm.alike import alike

SHAPES = st.lists(st.integers(1, 3), min_size=3, max_size=3)
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    """Of many layouts, some of which are the same."""
    shape, axes = draw(SHAPES), draw(st.permutations([0, 1, 2]))
    wide = torch.zeros([n * draw(st.sampled_from([1, 1, 2])) for n in shape], dtype=draw(DTYPES))
    made = wide[tuple(slice(0, n) for n in shape)].permute(axes)
    return torch._neg_view(made) if draw(st.integers(0, 9)) == 0 else made


@given(tensors(), tensors())
def test_what_is_taken_for_alike_has_one_key(one: torch.Tensor, other: torch.Tensor) -> None:
    def key(x: torch.Tensor) -> Any:
        return layout_of(x, x, None, None, None, x, False, 0), x.is_neg()

    check = alike([one])
    assert check is not None, "this torch has no such guard"
    assert check(other) == (key(one) == key(other))
    assert check(one.clone(memory_format=torch.preserve_format)) or one.is_neg() or not one.is_contiguous()


MODES: list[Callable[[], Any]] = [torch.no_grad, torch.enable_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("grad", [False, True])
def test_gradients_and_inference_are_told_apart(mode: Callable[[], Any], grad: bool) -> None:
    plain = torch.zeros(2, 3)
    with torch.inference_mode():
        inference = torch.zeros(2, 3)
    with mode():
        check = alike([plain])
        assert check is not None
        assert check(plain)
        assert not check(inference)
        assert check(torch.zeros(2, 3, requires_grad=grad)) == (not grad and mode is not torch.inference_mode)
    with torch.inference_mode(mode is not torch.inference_mode):
        assert not check(plain), "inference mode makes a difference to what may be written"


@pytest.mark.parametrize(
    "broken", [lambda *given: True, lambda *given: False, lambda *given: 1 // 0], ids=["blind", "never", "raises"]
)
def test_a_guard_that_does_not_tell_is_not_taken(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module._trusted.cache_clear()
    monkeypatch.setattr(module, "_guard", lambda tensors: broken)
    try:
        assert alike([torch.zeros(1)]) is None
    finally:
        module._trusted.cache_clear()


def test_what_it_was_made_of_is_not_kept() -> None:
    made = torch.zeros(4, 2)
    gone = weakref.ref(made)
    check = alike([made])
    del made
    assert gone() is None, "memory of an engine's would be held as long as the merger lives"
    assert check is not None
    assert check(torch.ones(4, 2))
