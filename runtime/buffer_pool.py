"""Buffers for messages, kept from bucket to bucket and from step to step."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BufferPool"]


class BufferPool:
    """Memory of one rank that is lent in whole buffers of any dtype.

    Attributes: `lent_bytes`, what is lent now; `peak_bytes`, the most ever lent at once. What is given back is kept:
    the next buffer of up to that size takes no new memory.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.lent_bytes = 0
        self.peak_bytes = 0
        self._free: list[Tensor] = []
        self._lent: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def kept_bytes(self) -> int:
        """The size of all memory that the pool has, lent or not."""
        return sum(storage.nbytes for storage in (*self._free, *(storage for storage, _ in self._lent.values())))

    def take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Returns a flat buffer with undefined contents: a kept one that is large enough, else a new one."""
        num_bytes = num_elements * dtype.itemsize
        fitting = [storage for storage in self._free if storage.nbytes >= num_bytes]
        if fitting:
            storage = min(fitting, key=lambda storage: storage.nbytes)
            self._free = [other for other in self._free if other is not storage]
        else:
            # A kept one that is too small makes room for what replaces it.
            self._free = sorted(self._free, key=lambda storage: storage.nbytes)[1:]
            storage = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        buffer = storage[:num_bytes].view(dtype)
        self._lent[id(buffer)] = storage, buffer
        self.lent_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.lent_bytes)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Takes back what `take` returned; the same object."""
        storage, _ = self._lent.pop(id(buffer))
        self.lent_bytes -= buffer.nbytes
        self._free.append(storage)
