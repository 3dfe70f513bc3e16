"""LossBuffer: copies of (index, loss), kept on the losses' device until the epoch ends.

The one thing that happens in every training step: two small copies, no synchronisation, nothing
sent. Batches stay apart because the sizes of the calls are known on the host.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError


class Drained(NamedTuple):
    """What a buffer held: one entry a recorded loss, batch after batch, on the CPU."""

    indices: npt.NDArray[np.int64]
    losses: npt.NDArray[np.float32]
    sizes: npt.NDArray[np.int64]


class LossBuffer:
    """Preallocated room for an epoch's losses, 12 bytes each, on the first losses' device.

    Args:
        capacity: losses to make room for at first; the buffer grows where more come.
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
        """Say whether as many more losses fit without growing."""
        return self._length + number <= self._capacity

    def append(self, index: torch.Tensor, losses: torch.Tensor) -> None:
        """Copy one batch's indices (B,) and losses (B,) in; the given tensors are not kept."""
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
        """Empty the buffer and return what it held. Waits for the device."""
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


def check_batch(index: torch.Tensor, losses: torch.Tensor) -> None:
    """Raise InputError unless these are B integer indices and B floating-point losses."""
    if losses.ndim != 1 or index.shape != losses.shape:
        raise InputError(
            f"expected one loss for each index, both of shape (B,), got losses of shape "
            f'{tuple(losses.shape)} and indices of shape {tuple(index.shape)}: use reduction="none"'
        )
    if not len(losses):
        raise InputError("expected at least one loss in a batch, got none")
    if not losses.is_floating_point():
        raise InputError(f"expected floating-point losses, got {losses.dtype}")
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise InputError(
            f"expected integer indices, got {index.dtype}: large ones do not survive a float"
        )


def check_range(lowest: int, highest: int, num_samples: int) -> None:
    """Raise InputError unless the indices from lowest to highest lie within the samples."""
    if lowest < 0 or highest >= num_samples:
        raise InputError(f"expected indices in 0..{num_samples - 1}, got {lowest}..{highest}")
