"""LossBuffer: copies of the (index, loss) pairs of batches, which stay on their device.

A training step copies the indices of its batch, whose memory loaders may use again. On a CPU, it
keeps a reference to its losses, which must not change in place before they are copied into this
buffer, many batches at a time; their version counter tells. On other devices it copies them, too
(``as_batch``). No copy waits for the device. The batches remain distinguishable because the host
knows the size of each.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError
from fineprune.labels.batch import for_buffer

# A batch that was recorded: its indices and its losses without a gradient, shape (B,) each, and the
# version that the losses had then; None for those that are nobody else's.
Batch = tuple[torch.Tensor, torch.Tensor, int | None]

# At most so many batches wait to be copied, so that a change in place is noticed soon; and fewer if
# they hold this many losses.
MOST_WAITING = 64
MOST_LOSSES_WAITING = 1 << 20

# Losses that are not those of single samples are recognised by the first batches, if there are
# enough of them.
_LOOKED_AT = 8
_TELLING = 4


def as_batch(index: torch.Tensor, losses: torch.Tensor) -> Batch:
    """Return a copy of the indices, and the losses, copied unless they may wait."""
    return index.clone(), *for_buffer(losses.detach())


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
        self._joined: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sizes: list[int] = []

    def __len__(self) -> int:
        """Return the number of losses."""
        return sum(len(losses) for _, losses in self._joined)

    def extend(self, batches: Sequence[Batch]) -> None:
        """Copy the indices and losses of some batches, joined on the device of the first one."""
        for _, losses, version in batches:
            if version is not None and losses._version != version:
                raise InputError(
                    "expected recorded losses to stay unchanged, got some that were changed in "
                    "place afterwards: record a copy, such as losses.clone(), or change a copy"
                )
        indices, values, _ = zip(*batches, strict=True)
        self._joined.append((_cat(indices).long(), _cat(values).float()))
        self._sizes += map(len, values)

    def drain(self) -> Drained:
        """Return the contents and empty the buffer. This waits for the device."""
        sizes = np.array(self._sizes, dtype=np.int64)
        if self._joined:
            indices, losses = (
                _cat(parts).cpu().numpy() for parts in zip(*self._joined, strict=True)
            )
        else:
            indices, losses = np.empty(0, np.int64), np.empty(0, np.float32)
        self._joined = []
        self._sizes = []
        return Drained(indices, losses, sizes)


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
