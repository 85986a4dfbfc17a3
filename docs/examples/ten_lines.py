import torch
import torch.distributed as dist

import dcpcomm

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
B, H, D = 8, 32, 128
shape = dcpcomm.MergeShape(max_tokens=B, num_heads=H, head_dim=D, dtype=torch.bfloat16, lse_base="e")
with dcpcomm.DCPMerger(None, shape, device="cpu") as merger:  # once; None is the default process group
    partial_out, partial_lse = torch.randn(B, H, D).bfloat16(), torch.randn(B, H)  # what attention returned here
    out = merger.merge(partial_out, partial_lse, tag=0)  # every layer of every step; tag: the layer
    print(f"rank {dist.get_rank()} holds {list(out.shape)}, merged over {merger.transports}\n", end="")
dist.destroy_process_group()
