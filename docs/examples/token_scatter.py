"""Token scatter: each rank keeps all heads of its own rows, for layers after attention that are split by tokens.

torchrun --nproc-per-node 2 docs/examples/token_scatter.py
"""

import torch
import torch.distributed as dist
from attention import attention

import dcpcomm

dist.init_process_group("gloo")
rank, N = dist.get_rank(), dist.get_world_size()
B, H, D = 3 * N, 8, 64  # B is a multiple of N
lens = torch.randint(1, 30, (B,), generator=torch.Generator().manual_seed(1))

torch.manual_seed(0)  # the same on all ranks, so that each can also compute the whole
q = torch.randn(B, H, D)
k, v = torch.randn(2, B, 30, 2, D)

here = dcpcomm.sharding.local_kv_lens(lens, N, rank)  # of all B rows, not only of this rank's
partial_out, partial_lse = attention(q, k[:, rank::N], v[:, rank::N], here)
shape = dcpcomm.MergeShape(max_tokens=B, num_heads=H, head_dim=D, dtype=torch.float32, lse_base="e", scatter="tokens")
with dcpcomm.DCPMerger(None, shape, device="cpu") as merger:
    out = merger.merge(partial_out, partial_lse, valid_counts=here)

whole, _ = attention(q, k, v, lens)
torch.testing.assert_close(out, whole.chunk(N)[rank])
print(f"rank {rank}: {list(out.shape)}, its rows with all heads\n", end="")
dist.destroy_process_group()
