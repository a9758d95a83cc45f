"""Room for what a lens keeps."""

from __future__ import annotations

import torch
from torch import Tensor

PIECE = 64 << 20


class Store:
    """Keeps copies of tensors, on the CPU side by side in large pieces.

    One by one, among a model's temporaries, they would leave holes in the heap: 700 MB for 360 on the default model.
    """

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def keep(self, tensor: Tensor) -> Tensor:
        """A contiguous copy."""
        size = tensor.numel() * tensor.element_size()
        # What is large has a piece of its own anyway; so has what lives on a GPU, whose allocator sees to it.
        if tensor.device.type != "cpu" or size > PIECE // 2:
            return tensor.clone(memory_format=torch.contiguous_format)
        if self._used + size > len(self._piece):
            self._piece, self._used = torch.empty(PIECE, dtype=torch.uint8), 0
        room = self._piece[self._used : self._used + size].view(tensor.dtype).view(tensor.shape)
        self._used += -(-size // 64) * 64
        return room.copy_(tensor)
