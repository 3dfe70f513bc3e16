"""LossBuffer: copies of (index, loss) that stay on the device of the losses until they are needed.

Filling it is the only work in a training step: two small copies, without synchronisation and
without communication. The batches remain distinguishable because the host knows the size of each.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class Drained(NamedTuple):
    """The contents of a buffer on the CPU, batch after batch.

    Attributes:
        indices: Sample of each loss, int64, shape (n,).
        losses: The losses, float32, shape (n,).
        sizes: Number of losses in each batch, int64, shape (batches,); their sum is n.
    """

    indices: npt.NDArray[np.int64]
    losses: npt.NDArray[np.float32]
    sizes: npt.NDArray[np.int64]


class LossBuffer:
    """Preallocated memory for losses, 12 bytes each, on the device of the first losses.

    Args:
        capacity: Number of losses for which memory is allocated at first. The buffer grows if it
            is given more.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._index: torch.Tensor | None = None
        self._losses: torch.Tensor | None = None
        # Views of both on the CPU, where NumPy copies a small batch in half the time.
        self._views: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None = None
        self._sizes: list[int] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def fits(self, number: int) -> bool:
        """Return whether ``number`` more losses fit without growing."""
        return self._length + number <= self._capacity

    def append(self, index: torch.Tensor, losses: torch.Tensor) -> None:
        """Copy the indices and losses of one batch, both of shape (B,), into the buffer."""
        number = len(losses)
        begin, end = self._length, self._length + number
        if self._index is None or self._losses is None or end > self._capacity:
            self._allocate(end, losses.device)
            assert self._index is not None
            assert self._losses is not None
        if self._views is not None and index.is_cpu and losses.dtype is torch.float32:
            indices, values = self._views
            indices[begin:end] = index.numpy()
            values[begin:end] = losses.numpy()
        else:
            self._index[begin:end].copy_(index, non_blocking=True)
            self._losses[begin:end].copy_(losses, non_blocking=True)
        self._sizes.append(number)
        self._length = end

    def drain(self) -> Drained:
        """Return the contents and empty the buffer. This waits for the device."""
        sizes = np.array(self._sizes, dtype=np.int64)
        if self._index is None or self._losses is None:
            drained = Drained(np.empty(0, np.int64), np.empty(0, np.float32), sizes)
        else:
            drained = Drained(
                self._index[: self._length].cpu().numpy().copy(),
                self._losses[: self._length].cpu().numpy().copy(),
                sizes,
            )
        self._sizes = []
        self._length = 0
        return drained

    def _allocate(self, needed: int, device: torch.device) -> None:
        """Allocate the memory, or twice as much as before, and keep the contents."""
        if self._index is not None:
            self._capacity = 2 * self._capacity
        self._capacity = max(needed, self._capacity)
        index = torch.empty(self._capacity, dtype=torch.int64, device=device)
        losses = torch.empty(self._capacity, dtype=torch.float32, device=device)
        if self._index is not None and self._losses is not None:
            index[: self._length].copy_(self._index[: self._length])
            losses[: self._length].copy_(self._losses[: self._length])
        self._index, self._losses = index, losses
        self._views = (index.numpy(), losses.numpy()) if device.type == "cpu" else None
