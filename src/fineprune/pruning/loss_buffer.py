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
        self._sizes: list[int] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def fits(self, number: int) -> bool:
        """Return whether ``number`` more losses fit without growing."""
        return self._length + number <= self._capacity

    def append(self, index: torch.Tensor, losses: torch.Tensor) -> None:
        """Copy the indices and losses of one batch, both of shape (B,), into the buffer."""
        if self._index is None or self._losses is None:
            self._index = torch.empty(self._capacity, dtype=torch.int64, device=losses.device)
            self._losses = torch.empty(self._capacity, dtype=torch.float32, device=losses.device)
        end = self._length + len(losses)
        if end > self._capacity:
            self._capacity = max(end, 2 * self._capacity)
            self._index = _grown(self._index, self._capacity, self._length)
            self._losses = _grown(self._losses, self._capacity, self._length)
        self._index[self._length : end].copy_(index, non_blocking=True)
        self._losses[self._length : end].copy_(losses, non_blocking=True)
        self._sizes.append(len(losses))
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


def _grown(old: torch.Tensor, capacity: int, length: int) -> torch.Tensor:
    new = torch.empty(capacity, dtype=old.dtype, device=old.device)
    new[:length].copy_(old[:length])
    return new
