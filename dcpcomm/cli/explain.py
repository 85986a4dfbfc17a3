"""`dcpcomm explain`: what would be chosen for a shape and a configuration, and why. It is really chosen: connected,
verified, priced.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcpcomm.cli.shape import (
    Base,
    Channels,
    Device,
    Dtype,
    DtypeOption,
    HeadDim,
    Heads,
    LseBase,
    Ranks,
    Scatter,
    ScatterOption,
    Tokens,
    VHeadDim,
    make_shape,
    on_ranks,
)

if TYPE_CHECKING:
    from dcpcomm.transport import MergeShape

__all__ = ["decide", "explain"]


def explain(
    ranks: Ranks = 2,
    config: Annotated[Path | None, typer.Option(help="Configuration file; default DCPCOMM_CONFIG, else auto.")] = None,
    max_tokens: Tokens = 64,
    num_heads: Heads = 128,
    head_dim: HeadDim = 512,
    v_head_dim: VHeadDim = 128,
    dtype: DtypeOption = Dtype.bfloat16,
    lse_base: LseBase = Base.e,
    scatter: ScatterOption = Scatter.heads,
    channels: Channels = 1,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")] = False,
) -> None:
    """What would be chosen for a shape and a configuration, and why.

    Exit status: 0 something was, 1 no transport can serve, 2 wrong usage.
    """
    from dcpcomm.config import load_config

    shape = make_shape(max_tokens, num_heads, head_dim, v_head_dim, dtype, lse_base, scatter, channels, ranks)
    load_config(config)  # what is wrong with the file is said before any process is started
    answers = on_ranks(decide, ranks, shape, None if config is None else str(config), device)
    if answers is None:  # another rank than 0 under torchrun
        return
    text, facts = answers[0]
    print(json.dumps(facts, indent=2) if as_json else text)


def decide(shape: MergeShape, config: str | None, device: str | None) -> tuple[str, dict[str, Any]]:
    """On one rank: the explanation, and the decision as plain data."""
    from dcpcomm.launch import own_device
    from dcpcomm.merger import DCPMerger

    with DCPMerger(None, shape, config, own_device(device)) as merger:
        decision = asdict(merger.decision)
        return merger.explain(), {"transports": merger.transports, **decision, "device_bytes": merger.device_bytes}
