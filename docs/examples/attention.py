"""What an engine's attention kernel does, in a few lines of torch: the other examples import it."""

import torch


def attention(q, k, v, counts):
    """Attend over the first `counts` entries that are here.

    q [B, H, D]; k and v [B, S, Hkv, D], where H is a multiple of Hkv; counts [B]. Returns out [B, H, D], and the LSE
    [B, H] in base e. A row of no entries is garbage, as kernels leave it.
    """
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[2], dim=2) for one in (k, v))
    scores = torch.einsum("bhd,bshd->bhs", q, k) / q.shape[2] ** 0.5
    hidden = torch.arange(k.shape[1]) >= counts.unsqueeze(1)
    scores = scores.masked_fill(hidden.unsqueeze(1), -torch.inf)
    return torch.einsum("bhs,bshd->bhd", scores.softmax(dim=2), v), scores.logsumexp(dim=2)
