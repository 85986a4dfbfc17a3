"""Entries that survive torn lines: every 64 bytes of a message twice in its line, each copy with a check of its own.

On sm_90 FlashInfer's reader may see a 128-byte line whose half without the flag is old (docs/transports/
flashinfer_helix.md). So both halves of a line carry the same 56 bytes, and 8 that prove them: a sum over the words, the
call and the place. Of two halves the first that proves right is taken. Nothing is believed about which half is old, how
long ago it was written, or where a message begins: where neither proves right the row is made NaN, and told.
"""

from __future__ import annotations

import torch

from dcpcomm import topology
from dcpcomm.backends.helix_entries import Entries, Sent
from dcpcomm.errors import VerificationFailed
from dcpcomm.transport import MergeShape

__all__ = ["Twins"]

_WORDS = 7  # int64 of payload in half a line; the eighth is their check
_LINES_PER_ENTRY = 5  # short entries are torn least: two stores of a warp, with FlashInfer's own lines
_LARGEST_LSE = torch.finfo(torch.float32).max
#: Odd, so that a single wrong word always changes the sum. From the digits of pi, as good as any.
_FACTORS = (
    0x243F6A8885A308D3, 0x13198A2E03707345, 0x24093822299F31D1, 0x082EFA98EC4E6C89, 0x452821E638D01377,
    0x3E5466CF34E90C6D, 0x40AC29B7C97C50DD,
)  # fmt: skip
_CALL, _PLACE = 0x3F84D5B5B5470917, 0x1216D5D98979FB1B


class Twins(Entries):
    """Rows and LSEs of one destination, cut into halves of lines.

    Args:
        seed: the same on all ranks, another for each connection: of what a workspace held before nothing proves right.
    """

    def __init__(self, shape: MergeShape, world_size: int, device: torch.device, seed: int) -> None:
        super().__init__(shape, world_size)
        halves = self.tokens * self._parts(max(shape.widths)) * _LINES_PER_ENTRY
        with torch.inference_mode(False):
            self._factors = torch.tensor(_FACTORS, dtype=torch.int64, device=device)
            self._places = torch.arange(halves, dtype=torch.int64, device=device).mul_(_PLACE)
            # Advanced on the device, so that replays and eager calls mix.
            self._calls = torch.full((shape.channels,), seed, dtype=torch.int64, device=device)
            self._counts = torch.zeros((shape.channels, 2), dtype=torch.int64, device=device)
            self._told = torch.zeros((shape.channels, 2), dtype=torch.int64)
            kept = self._factors, self._places, self._calls, self._counts
            self.own_bytes = sum(one.numel() * 8 for one in kept)
            if topology.on_gpu(device):
                self._told = self._told.pin_memory()

    @property
    def words(self) -> str:
        return f"twins, {_LINES_PER_ENTRY} lines an entry"

    def _bytes(self, width: int) -> int:
        return self.heads * (4 + width * self.shape.dtype.itemsize)

    def _parts(self, width: int) -> int:
        """Entries of one row and destination."""
        return -(-self._bytes(width) // (_LINES_PER_ENTRY * _WORDS * 8))

    def capacity(self) -> tuple[int, int]:
        entries = self.tokens * self._parts(max(self.shape.widths)) * self.world_size
        return entries * _LINES_PER_ENTRY * 64, entries * 2

    def healed(self, channel: int) -> int:
        """Halves of lines that came wrong so far and whose twin was right. Waits for the device."""
        lost, wrong = self._counts[channel].tolist()
        return int(wrong - 2 * lost)

    def _bases(self, t: int, parts: int, channel: int) -> torch.Tensor:
        """`[B, P, 1, L]`: what the check of a half begins with, from the call and the half's place in it."""
        places = self._places[: t * parts * _LINES_PER_ENTRY].view(t, parts, 1, _LINES_PER_ENTRY)
        return places + self._calls[channel]

    def sent(self, out: torch.Tensor, lse: torch.Tensor, channel: int) -> Sent:
        t, n, _, width = out.shape
        parts = self._parts(width)
        nbytes = parts * _LINES_PER_ENTRY * _WORDS * 8
        # The LSEs first: rows of any width behind them are still aligned.
        raw = [one.reshape(t, n, -1).contiguous().view(torch.uint8) for one in (lse, out)]
        room = torch.zeros((t, n, nbytes - self._bytes(width)), dtype=torch.uint8, device=out.device)
        words = torch.cat([*raw, room], 2).view(torch.int64).view(t, n, parts, _LINES_PER_ENTRY, _WORDS).transpose(1, 2)
        self._calls[channel].add_(_CALL)
        checks = (words * self._factors).sum(-1) + self._bases(t, parts, channel)
        half = torch.cat([words, checks.unsqueeze(-1)], -1)
        both = torch.stack([half, half], -2).view(t * parts, n, -1).view(torch.bfloat16)
        nothing = torch.zeros((t * parts, n, 2), dtype=torch.float32, device=out.device)
        return Sent(both, nothing)

    def arrived(self, got: Sent, like: tuple[int, int, int, int], channel: int) -> tuple[torch.Tensor, torch.Tensor]:
        t, n, h, width = like
        parts = self._parts(width)
        halves = got.rows.view(torch.int64).view(t, parts, n, _LINES_PER_ENTRY, 2, _WORDS + 1)
        words, checks = halves[..., :_WORDS], halves[..., _WORDS]
        right = (words * self._factors).sum(-1) + self._bases(t, parts, channel).unsqueeze(-1) == checks
        lost = ~right.any(-1)
        self._note(lost, right, channel)
        taken = torch.where(right[..., :1], words[..., 0, :], words[..., 1, :])
        raw = taken.transpose(1, 2).reshape(t, n, -1).view(torch.uint8)
        lse = raw[..., : 4 * h].view(torch.float32)
        out = raw[..., 4 * h : self._bytes(width)].view(self.shape.dtype).view(t, n, h, width)
        # NaN under an LSE that takes all of the weight: under NaN or -inf the source would be left out of the sum.
        broken = lost.any(3).any(1).unsqueeze(-1)
        return torch.where(broken.unsqueeze(-1), torch.nan, out), torch.where(broken, _LARGEST_LSE, lse)

    def _note(self, lost: torch.Tensor, right: torch.Tensor, channel: int) -> None:
        self._counts[channel].add_(torch.stack([lost.sum(), (~right).sum()]))
        self._told[channel].copy_(self._counts[channel], non_blocking=True)

    def warm(self, device: torch.device) -> None:
        call = self._calls[0].clone()
        super().warm(device)
        self._calls[0].copy_(call)

    def poll(self, channel: int) -> None:
        lost = int(self._told[channel, 0])
        if lost:
            raise VerificationFailed(
                f"{lost} pieces of 56 bytes came wrong in both of their copies; the rows that they belong to are NaN. "
                "Were all ranks in the same call? reset() begins anew"
            )
