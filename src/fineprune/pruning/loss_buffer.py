"""LossBuffer: copies of (index, loss) that stay where they are until they are needed.

Filling it is the only work in a training step: two small copies, without synchronisation and
without communication. Each tensor is copied on its own device. The batches remain distinguishable
because the host knows the size of each.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

# So many batches are joined into one, because a small tensor takes more memory than its values. To
# copy a batch into preallocated memory instead would take three times as long in a training step,
# when that memory is in no cache.
_JOIN_AT = 256


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
    """Copies of the indices and losses of batches: 12 bytes for an int64 index and its loss."""

    def __init__(self) -> None:
        self._indices: list[torch.Tensor] = []
        self._losses: list[torch.Tensor] = []
        self._joined: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sizes: list[int] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, index: torch.Tensor, losses: torch.Tensor) -> None:
        """Copy the indices and the losses, without a gradient, of one batch, both of shape (B,)."""
        self._indices.append(index.clone())
        self._losses.append(losses.clone())
        number = len(losses)
        self._sizes.append(number)
        self._length += number
        if len(self._losses) == _JOIN_AT:
            self._join()

    def drain(self) -> Drained:
        """Return the contents and empty the buffer. This waits for the device."""
        self._join()
        sizes = np.array(self._sizes, dtype=np.int64)
        if self._joined:
            indices, losses = (
                _cat(parts).cpu().numpy() for parts in zip(*self._joined, strict=True)
            )
        else:
            indices, losses = np.empty(0, np.int64), np.empty(0, np.float32)
        self._joined = []
        self._sizes = []
        self._length = 0
        return Drained(indices, losses, sizes)

    def _join(self) -> None:
        if self._losses:
            self._joined.append((_cat(self._indices).long(), _cat(self._losses).float()))
            self._indices, self._losses = [], []


def _cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors on the device of the first one."""
    return torch.cat([part.to(parts[0].device) for part in parts])
