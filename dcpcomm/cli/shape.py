"""The options by which several commands describe a merge, and what they make of them."""

from __future__ import annotations

import os
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dcpcomm.transport import MergeShape

__all__ = [
    "Base",
    "Channels",
    "Device",
    "Dtype",
    "DtypeOption",
    "HeadDim",
    "Heads",
    "LseBase",
    "Ranks",
    "Scatter",
    "ScatterOption",
    "Tokens",
    "VHeadDim",
    "make_shape",
    "on_ranks",
    "world_size",
]


class Dtype(str, Enum):
    """dtype of the partials"""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Base(str, Enum):
    """base of the LSE"""

    e = "e"
    two = "2"


class Scatter(str, Enum):
    """what is divided over ranks"""

    heads = "heads"
    tokens = "tokens"
    none = "none"


def _known_device(device: str | None) -> str | None:
    from dcpcomm.errors import ConfigError

    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"--device is {device!r}; expected cpu or cuda")
    return device


Ranks = Annotated[int, typer.Option(help="N, local processes to start; under torchrun its ranks are used.")]
Tokens = Annotated[int, typer.Option("--max-tokens", help="B, most rows of one exchange.")]
Heads = Annotated[int, typer.Option("--num-heads", help="H, attention heads of the group.")]
HeadDim = Annotated[int, typer.Option("--head-dim", help="D, width of a partial: L for latent partials, else V.")]
VHeadDim = Annotated[int | None, typer.Option("--v-head-dim", help="V, where W_UV projects; D is then L.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Of the partials.")]
LseBase = Annotated[Base, typer.Option("--lse-base", help="Of the LSE.")]
ScatterOption = Annotated[Scatter, typer.Option("--scatter", help="What is divided over ranks in the result.")]
Device = Annotated[
    str | None,
    typer.Option(callback=_known_device, help="Where the partials are: cpu or cuda; default: cuda where there is one."),
]
Channels = Annotated[int, typer.Option(help="Independent streams of calls.")]


def make_shape(
    max_tokens: int,
    num_heads: int,
    head_dim: int,
    v_head_dim: int | None,
    dtype: Dtype,
    lse_base: Base,
    scatter: Scatter,
    channels: int,
    ranks: int,
) -> MergeShape:
    """The `MergeShape` of a command's options.

    Raises:
        ConfigError: there is no such shape, or none for so many ranks.
    """
    import torch

    from dcpcomm.errors import ConfigError, ShapeError
    from dcpcomm.transport import MergeShape

    try:
        shape = MergeShape(
            max_tokens=max_tokens,
            num_heads=num_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            dtype=getattr(torch, dtype.value),
            lse_base=lse_base.value,
            scatter=scatter.value,
            channels=channels,
        )
        shape.check_world_size(max(1, world_size(ranks)))
    except ShapeError as error:
        raise ConfigError(str(error)) from None
    return shape


def world_size(ranks: int) -> int:
    """How many ranks there will be, where `ranks` were asked for."""
    from dcpcomm.launch import under_torchrun

    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else ranks


def on_ranks(fn: Any, ranks: int, *args: Any, on_event: Any = None, timeout_s: float = 600.0) -> list[Any] | None:
    """`run_on_ranks`, with what a rank raised in the place of the report that it raised."""
    from dcpcomm.errors import ConfigError, DCPCommError
    from dcpcomm.launch import RankFailed, run_on_ranks

    if ranks < 1:
        raise ConfigError(f"--ranks is {ranks}; expected 1 or more")
    try:
        return run_on_ranks(fn, ranks, *args, on_event=on_event, timeout_s=timeout_s)
    except RankFailed as failure:
        if isinstance(failure.cause, DCPCommError):
            raise failure.cause from failure
        raise
