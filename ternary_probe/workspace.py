"""Scratch memory reused from chunk to chunk: the page faults of fresh temporaries cost more than the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Workspace:
    """Named buffers of one device. A buffer handed out twice under one name is the same memory."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._storage: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised contiguous tensor, valid until the name is taken again.

        Args:
            name: What it is for; different names never share memory.
            shape: Its shape.
            dtype: Its dtype.

        Returns:
            The buffer, shape ``shape``.
        """
        size = 1
        for extent in shape:
            size *= extent
        held = self._storage.get((name, dtype))
        if held is None or held.numel() < size:
            held = self._storage[name, dtype] = torch.empty(size, dtype=dtype, device=self._device)
        return held[:size].view(*shape)
