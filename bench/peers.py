"""Device memory of all ranks, as device addresses: kernels don't care how an address came to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dcpcomm.backends.cupy_ipc import LAZY_PEER_ACCESS, runtime, tensor_at

__all__ = ["Peers"]


class Peers:
    """A region of the same size on every rank.

    Attributes:
        rank: this one's place.
        own: uint8 `[nbytes]`, this rank's region.
        addresses: by rank, where the region begins as this rank addresses it, its own included.

    Args:
        meet: returns when all ranks have come: nobody frees what another still has open.
        kept: what must live as long as the addresses.
        unmap, free: what to do when this rank has done with the others' memory, and all with its own.
    """

    def __init__(
        self,
        rank: int,
        own: torch.Tensor,
        addresses: tuple[int, ...],
        meet: Callable[[], object],
        kept: Any = None,
        unmap: Callable[[], object] | None = None,
        free: Callable[[], object] | None = None,
    ) -> None:
        self.rank, self.own, self.addresses = rank, own, addresses
        self._meet, self._kept, self._unmap, self._free = meet, kept, unmap, free

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.addresses)

    @classmethod
    def over_ipc(
        cls,
        rank: int,
        nbytes: int,
        device: torch.device,
        gather: Callable[[Any], list[Any]],
        meet: Callable[[], object],
    ) -> Peers:
        """Processes of one host, by CUDA IPC handles. Collective.

        Args:
            gather: what every rank brought, by rank.
        """
        cuda = runtime()
        with torch.cuda.device(device):
            cuda.setDevice(torch.cuda.current_device())
            address = int(cuda.malloc(nbytes))  # not torch's: a handle opens a whole allocation from its beginning
            own = tensor_at(address, nbytes, device)
            own.zero_()
            torch.cuda.current_stream(device).synchronize()
            handles = gather(bytes(cuda.ipcGetMemHandle(address)))
            addresses = tuple(
                address if other == rank else int(cuda.ipcOpenMemHandle(handle, LAZY_PEER_ACCESS))
                for other, handle in enumerate(handles)
            )
        opened = [one for other, one in enumerate(addresses) if other != rank]
        return cls(
            rank, own, addresses, meet, None,
            lambda: [cuda.ipcCloseMemHandle(one) for one in opened], lambda: cuda.free(address),
        )  # fmt: skip

    def close(self) -> None:
        """Collective, with nothing in flight that touches the memory. Safe twice."""
        unmap, free, self._unmap, self._free, self._kept = self._unmap, self._free, None, None, None
        if unmap is not None and free is not None:
            unmap()
            self._meet()
            free()
