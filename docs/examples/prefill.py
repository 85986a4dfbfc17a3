"""Prefill context parallel: a chunk of a long prompt attends to KV that is spread over the ranks, and every rank needs
the whole result (scatter "none"), because each goes on with all heads and all rows.

The merged LSE is what a chunk is joined to other parts of the context by.

    torchrun --nproc-per-node 2 docs/examples/prefill.py
"""

import torch
import torch.distributed as dist
from attention import attention

import dcpcomm

dist.init_process_group("gloo")
rank, N = dist.get_rank(), dist.get_world_size()
before, chunk, H, D = 21, 16, 8, 64  # entries in the cache before this chunk, rows of the chunk

torch.manual_seed(0)  # the same on all ranks, so that each can also compute the whole
q = torch.randn(chunk, H, D)
k, v = torch.randn(2, 1, before + chunk, 2, D).expand(2, chunk, -1, -1, -1)

lens, starts = torch.tensor([before + chunk]), torch.tensor([0, chunk])
counts = dcpcomm.sharding.local_row_counts(lens, starts, N, rank)  # causal: each row one entry more
partial_out, partial_lse = attention(q, k[:, rank::N], v[:, rank::N], counts)
shape = dcpcomm.MergeShape(max_tokens=chunk, num_heads=H, head_dim=D, dtype=torch.float32, lse_base="e", scatter="none")
with dcpcomm.DCPMerger(None, shape, device="cpu") as merger:
    out, lse = merger.merge(partial_out, partial_lse, valid_counts=counts, return_lse=True)

whole, whole_lse = attention(q, k, v, torch.arange(before + 1, before + chunk + 1))
torch.testing.assert_close(out, whole)
torch.testing.assert_close(lse, whole_lse)
print(f"rank {rank}: {list(out.shape)} and its LSE {list(lse.shape)}, as without sharding\n", end="")
dist.destroy_process_group()
