"""LossBuffer: the (index, loss) pairs of batches, which stay where they are until they are needed.

Filling it is the only work in a training step. On a CPU, it keeps the tensors themselves, because
copying them takes longer than everything else together. They must not change until they are joined
with those of other batches, which their version counters tell. On other devices, where the next
step may write into the same memory, they are copied without waiting for the device. The batches
remain distinguishable because the host knows the size of each.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError
from fineprune.pruning.loop_checks import check_batch

# So many batches are joined into one: often enough that a change in place is noticed soon, and that
# few small tensors, which take more memory than their values, are alive. Large batches are joined
# when they hold this many losses.
_JOIN_AT = 64
_JOIN_LOSSES = 1 << 20

# Losses that are not those of single samples are recognised by the first batches, if there are enough
# of them.
_LOOKED_AT = 8
_TELLING = 4


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
    """The indices and losses of batches: 12 bytes for an int64 index and its loss."""

    def __init__(self) -> None:
        # Indices, losses and their versions; None for versions that do not matter.
        self._batches: list[tuple[torch.Tensor, torch.Tensor, int | None, int | None]] = []
        self._joined: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sizes: list[int] = []
        self._length = 0
        self._join_at = _JOIN_AT

    def __deepcopy__(self, memo: dict[int, Any]) -> "LossBuffer":
        self._join()  # The version of a copied tensor is another one.
        made = LossBuffer()
        made._joined, made._sizes = list(self._joined), list(self._sizes)
        made._length, made._join_at = self._length, self._join_at
        return made

    def __len__(self) -> int:
        """Return the number of losses, without those of the batches that were not joined yet."""
        return self._length

    @property
    def is_empty(self) -> bool:
        """Whether there is no batch."""
        return not self._batches and not self._joined

    def expect(self, number: int) -> None:
        """Prepare for batches of so many losses."""
        self._join_at = max(1, min(_JOIN_AT, _JOIN_LOSSES // number))

    def append(self, index: torch.Tensor, losses: torch.Tensor) -> bool:
        """Add a batch: indices and losses without a gradient, both of shape (B,).

        Returns:
            Whether the batches were joined, after which ``len`` has grown.

        Raises:
            InputError: An earlier batch was changed in place, or has a wrong shape or type.
        """
        try:
            self._batches.append((index, losses, index._version, losses._version))
        except RuntimeError:  # Tensors of the inference mode have no version.
            self._batches.append((index.clone(), losses.clone(), None, None))
        if len(self._batches) < self._join_at:
            return False
        self._join()
        return True

    def drain(self) -> Drained:
        """Return the contents and empty the buffer. This waits for the device.

        Raises:
            InputError: As for ``append``.
        """
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
        batches, self._batches = self._batches, []
        if not batches:
            return
        for index, losses, of_index, of_losses in batches:
            check_batch(index, losses)
            if of_index is not None and (index._version, losses._version) != (of_index, of_losses):
                raise InputError(
                    "expected the indices and losses of a batch to stay as they were recorded, got "
                    "some that were changed in place afterwards: record a copy, such as "
                    "losses.clone(), or change a copy"
                )
        indices, values, *_ = zip(*batches, strict=True)
        self._joined.append((_cat(indices).long(), _cat(values).float()))
        sizes = [len(losses) for losses in values]
        self._sizes += sizes
        self._length += sum(sizes)
        self.expect(max(sizes))


def are_flat(drained: Drained) -> bool:
    """Return whether all samples of each batch have the same loss, but not all batches.

    Only the first batches are looked at. It is false if too few of them have several samples.
    """
    ends = np.cumsum(drained.sizes[:_LOOKED_AT])
    batches = [batch for batch in np.split(drained.losses, ends)[:-1] if len(batch) > 1]
    flat = all(bool((batch == batch[0]).all()) for batch in batches)
    return flat and len(batches) >= _TELLING and len({float(batch[0]) for batch in batches}) > 1


def _cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors on the device of the first one."""
    return torch.cat([part.to(parts[0].device) for part in parts])
