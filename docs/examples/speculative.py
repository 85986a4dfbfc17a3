"""Speculative rows: each request brings several query rows, and each row sees one entry more than the row before it.

Counts go by row, because the shard of a row isn't that of its request: of lengths 1, 2 and 3 over two ranks, rank 1
has 0, 1 and 1 entries.

    torchrun --nproc-per-node 2 docs/examples/speculative.py
"""

import torch
import torch.distributed as dist
from attention import attention

import dcpcomm

dist.init_process_group("gloo")
rank, N = dist.get_rank(), dist.get_world_size()
H, D = 8, 64
lens = torch.tensor([3, 20])  # entries of each request, this step's rows included
starts = torch.tensor([0, 3, 6])  # three rows each: one token and two drafted ones
B = 8  # two rows of padding, as for a CUDA graph

torch.manual_seed(0)  # the same on all ranks, so that each can also compute the whole
q = torch.randn(B, H, D)
request = torch.tensor([0, 0, 0, 1, 1, 1, 0, 0])
k, v = torch.randn(2, len(lens), 20, 2, D)[:, request]

counts = dcpcomm.sharding.local_row_counts(lens, starts, N, rank, num_rows=B)
partial_out, partial_lse = attention(q, k[:, rank::N], v[:, rank::N], counts)
shape = dcpcomm.MergeShape(max_tokens=B, num_heads=H, head_dim=D, dtype=torch.float32, lse_base="e")
with dcpcomm.DCPMerger(None, shape, device="cpu") as merger:
    out = merger.merge(partial_out, partial_lse, valid_counts=counts)

seen = dcpcomm.sharding.local_row_counts(lens, starts, 1, 0, num_rows=B)
whole = attention(q, k, v, seen)[0].nan_to_num(0.0)  # rows that see nothing are 0
torch.testing.assert_close(out, whole.chunk(N, dim=1)[rank])
print(f"rank {rank}: counts {counts.tolist()}, merged as without sharding\n", end="")
dist.destroy_process_group()
