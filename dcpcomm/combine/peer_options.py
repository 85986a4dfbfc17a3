"""Options that every transport over peer memory has."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["PeerOptions"]


class PeerOptions(BaseModel):
    """Of the fused kernel, on GPUs; on CPU they do nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    blocks: Annotated[int, Field(gt=0, le=2048)] | None = Field(
        None, description="blocks of a launch at the most; by default as many as the work has and may wait"
    )
    threads: Literal[64, 128, 256, 512] | None = Field(
        None, description="threads of a block, of which 32 look after headers"
    )
    vectors_per_thread: Annotated[int, Field(gt=0, le=1024)] | None = Field(
        None, description="vectors of 16 bytes that a thread merges one after another, at the least"
    )
    programmatic: bool = Field(
        False,
        description="a launch may overlap the end of the one before it (sm_90 on); not with others' kernels in "
        "between that do so and don't wait themselves",
    )
    strict: bool = Field(False, description="with the fence that PTX asks for behind each call")
