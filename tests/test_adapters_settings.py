"""What the adapters' mergers are built with: stated, from the environment, or by default."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dcpcomm
from dcpcomm import adapters
from dcpcomm.adapters import vllm

KIND: Any = {"num_heads": 8, "head_dim": 16, "dtype": torch.bfloat16, "lse_base": "2", "device": "cpu"}


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    variables = ("DCPCOMM_MAX_TOKENS", "DCPCOMM_CHANNELS")
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    yield
    for name in variables:  # a wrong one would be told
        monkeypatch.delenv(name, raising=False)
    adapters.configure(**dict.fromkeys(("max_tokens", "channels", "require_graph", "config")))


def test_the_shape_is_what_was_configured_and_can_be_planned() -> None:
    adapters.configure(max_tokens=40, channels=2, require_graph=True)
    shape = adapters.shape_for(**KIND, v_head_dim=8, scatter="tokens")
    assert (shape.max_tokens, shape.channels, shape.require_graph) == (40, 2, True)
    assert (shape.num_heads, shape.head_dim, shape.v_head_dim, shape.scatter) == (8, 16, 8, "tokens")
    assert dcpcomm.plan_bytes(shape, 2, {"transport": "gloo_a2a"}, device="cpu") > 0


def test_a_statement_comes_before_the_environment_and_that_before_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert adapters.settings() == adapters.Settings()
    monkeypatch.setenv("DCPCOMM_MAX_TOKENS", "64")
    monkeypatch.setenv("DCPCOMM_CHANNELS", "3")
    assert adapters.settings() == adapters.Settings(max_tokens=64, channels=3)
    assert adapters.configure(max_tokens=7) == adapters.Settings(max_tokens=7, channels=3)
    assert adapters.configure(max_tokens=None).max_tokens == 64
    monkeypatch.setenv("DCPCOMM_CHANNELS", "")  # as unset
    assert adapters.settings().channels == adapters.Settings().channels


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
def test_a_variable_that_is_no_number_is_told(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DCPCOMM_MAX_TOKENS", text)
    with pytest.raises(dcpcomm.ConfigError, match=r"DCPCOMM_MAX_TOKENS is .*; expected a positive integer"):
        adapters.settings()


@pytest.mark.parametrize("stated", [{"max_tokens": 0}, {"channels": True}, {"channels": 1.0}, {"max_token": 4}])
def test_a_wrong_statement_is_told_and_changes_nothing(stated: Any) -> None:
    adapters.configure(max_tokens=9)
    with pytest.raises(dcpcomm.ConfigError, match=next(iter(stated))):
        adapters.configure(**{"channels": 2, **stated})
    assert adapters.settings() == adapters.Settings(max_tokens=9)


def test_a_graph_is_required_on_a_gpu_alone() -> None:
    assert not adapters.shape_for(**KIND).require_graph
    assert adapters.shape_for(**{**KIND, "device": "cuda:0"}).require_graph


def engine_config(**changes: Any) -> Any:
    given = {
        "scheduler_config": SimpleNamespace(max_num_seqs=128, max_num_batched_tokens=2048),
        "speculative_config": None,
        "compilation_config": SimpleNamespace(max_cudagraph_capture_size=512),
        "parallel_config": SimpleNamespace(num_ubatches=1),
    }
    return SimpleNamespace(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (512, 1)),
        ({"speculative_config": SimpleNamespace(num_speculative_tokens=7)}, (1024, 1)),
        ({"compilation_config": SimpleNamespace()}, (128, 1)),
        ({"compilation_config": SimpleNamespace(cudagraph_capture_sizes=[256, 8])}, (256, 1)),
        ({"speculative_config": SimpleNamespace(num_speculative_tokens=3, parallel_drafting=True)}, (896, 1)),
        ({"scheduler_config": SimpleNamespace(max_num_seqs=4096, max_num_batched_tokens=2048)}, (2048, 1)),
        ({"parallel_config": SimpleNamespace(num_ubatches=2)}, (512, 2)),
        ({"parallel_config": SimpleNamespace(enable_dbo=True)}, (512, 2)),
        ({"parallel_config": SimpleNamespace(num_ubatches=0)}, (512, 1)),
    ],
)
def test_an_engines_configuration_says_how_much_a_step_holds(changes: Any, expected: tuple[int, int]) -> None:
    found = vllm.configure_from(engine_config(**changes))
    assert (found.max_tokens, found.channels) == expected
