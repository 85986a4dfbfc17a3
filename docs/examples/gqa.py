"""GQA and MHA: heads of V are merged as they are, without a W_UV. A step that decodes one row of each request.

torchrun --nproc-per-node 2 docs/examples/gqa.py
"""

import torch
import torch.distributed as dist
from attention import attention

import dcpcomm

dist.init_process_group("gloo")
rank, N = dist.get_rank(), dist.get_world_size()
B, H, D = 4, 8, 64
lens = torch.tensor([9, 1, 30, 16])  # entries of each request, over all ranks: the second has none on rank 1

shape = dcpcomm.MergeShape(max_tokens=B, num_heads=H, head_dim=D, dtype=torch.float32, lse_base="e")
with dcpcomm.DCPMerger(None, shape, device="cpu") as merger:
    for name, kv_heads in (("GQA", 2), ("MHA", H)):
        torch.manual_seed(kv_heads)  # the same on all ranks, so that each can also compute the whole
        q = torch.randn(B, H, D)
        k, v = torch.randn(2, B, 30, kv_heads, D)

        here = dcpcomm.sharding.local_kv_lens(lens, N, rank)
        partial_out, partial_lse = attention(q, k[:, rank::N], v[:, rank::N], here)
        out = merger.merge(partial_out, partial_lse, valid_counts=here)

        whole, _ = attention(q, k, v, lens)
        torch.testing.assert_close(out, whole.chunk(N, dim=1)[rank])
        print(f"rank {rank}: {name} {list(out.shape)}, as without sharding\n", end="")
dist.destroy_process_group()
