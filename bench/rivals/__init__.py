"""Other ways to merge, to measure ours against: see README.md here."""

from __future__ import annotations

from dcpcomm.bench.rivals.ag_rs import AllGatherReduceScatter
from dcpcomm.bench.rivals.four_launch_put import FourLaunchPut
from dcpcomm.bench.rivals.helix_exchange import HelixExchange
from dcpcomm.bench.rivals.helix_lse_reduce import HelixLseReduce
from dcpcomm.bench.rivals.nccl_packed import NcclPacked
from dcpcomm.bench.rivals.nccl_two_messages import NcclTwoMessages
from dcpcomm.bench.rivals.rival import Rival

__all__ = [
    "RIVALS",
    "AllGatherReduceScatter",
    "FourLaunchPut",
    "HelixExchange",
    "HelixLseReduce",
    "NcclPacked",
    "NcclTwoMessages",
    "Rival",
]

#: All of them, in the order of tables.
RIVALS: tuple[type[Rival], ...] = (
    FourLaunchPut,
    NcclPacked,
    NcclTwoMessages,
    AllGatherReduceScatter,
    HelixExchange,
    HelixLseReduce,
)
