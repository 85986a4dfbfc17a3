"""What the adapters build mergers with: engines' functions have no argument for it."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from dcpcomm import topology
from dcpcomm.errors import ConfigError
from dcpcomm.transport import MergeShape

__all__ = ["Settings", "configure", "settings", "shape_for"]

#: Of a step that decodes: above it a merge takes as long as its bytes do, and in chunks hardly longer.
_MAX_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every merger of the adapters has in common. The same on all ranks.

    Attributes:
        max_tokens: rows of one exchange at the most; a merge of more runs in chunks.
        channels: micro-batches that may be in flight at once.
        require_graph: only transports that can be captured in a CUDA graph; None: so on a GPU, not on CPU.
        config: as for `DCPMerger`.
    """

    max_tokens: int = _MAX_TOKENS
    channels: int = 1
    require_graph: bool | None = None
    config: Any = None


_FROM_ENVIRONMENT = {"max_tokens": "DCPCOMM_MAX_TOKENS", "channels": "DCPCOMM_CHANNELS"}
_stated: dict[str, Any] = {}


def configure(**stated: Any) -> Settings:
    """State what mergers built from now on are made with; what is left out stays as it is. None takes a statement
    back.

    Args:
        max_tokens, channels, require_graph, config: see `Settings`. Before them comes nothing; after them the
            environment (`DCPCOMM_MAX_TOKENS`, `DCPCOMM_CHANNELS`), then the defaults.

    Returns:
        what holds now.

    Raises:
        ConfigError: an argument that isn't known, or a number that isn't one.
    """
    names = [field.name for field in fields(Settings)]
    for name, value in stated.items():
        if name not in names:
            raise ConfigError(f"configure({name}=...) is not known; expected one of {', '.join(names)}")
        if name in _FROM_ENVIRONMENT and value is not None:
            _positive(value, f"configure({name}=...)")
    for name, value in stated.items():
        if value is None:
            _stated.pop(name, None)
        else:
            _stated[name] = value
    return settings()


def settings() -> Settings:
    """What holds now: `configure`, else the environment, else the defaults.

    Raises:
        ConfigError: a variable of the environment that is no positive number.
    """
    found: dict[str, Any] = {}
    for name, variable in _FROM_ENVIRONMENT.items():
        text = os.environ.get(variable)
        if text:
            found[name] = _positive(int(text) if text.isdecimal() else text, variable)
    return replace(Settings(), **{**found, **_stated})


def shape_for(
    *,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    lse_base: str,
    scatter: str = "heads",
    v_head_dim: int | None = None,
    device: torch.device | str | None = None,
) -> MergeShape:
    """The shape of the merger that the adapters build for such partials, as `plan_bytes` takes it.

    Args:
        num_heads: H, of the whole group.
        device: where the partials will be; None: a GPU if there is one here.

    Raises:
        ShapeError: as `MergeShape`.
        ConfigError: as `settings`.
    """
    stated = settings()
    require_graph = stated.require_graph
    if require_graph is None:
        require_graph = torch.cuda.is_available() if device is None else topology.on_gpu(torch.device(device))
    return MergeShape(
        max_tokens=stated.max_tokens,
        num_heads=num_heads,
        head_dim=head_dim,
        dtype=dtype,
        lse_base=lse_base,  # type: ignore[arg-type]
        scatter=scatter,  # type: ignore[arg-type]
        channels=stated.channels,
        v_head_dim=v_head_dim,
        require_graph=require_graph,
    )


def _positive(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{what} is {value!r}; expected a positive integer")
    return value
