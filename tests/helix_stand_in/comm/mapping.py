"""Where a rank is."""

from __future__ import annotations


class Mapping:
    """Of context parallelism alone."""

    def __init__(self, world_size: int, rank: int, gpus_per_node: int, *, cp_size: int) -> None:
        assert cp_size == world_size == gpus_per_node
        self.cp_size, self.cp_rank, self.tp_size, self.tp_rank, self.pp_rank = cp_size, rank, 1, 0, 0
