"""Augment: random crop and horizontal flip of whole batches, with repeatable random numbers.

The random numbers of a sample depend only on the seed, the epoch and the sample's index. They do
not depend on the order, the batch size, the number of ranks, a resume in the middle of an epoch, or
on which other samples the epoch skips.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fineprune.errors import InputError
from fineprune.pruning.random_streams import stream

# Offsets 0..2 * padding must fit into a byte.
_LARGEST_PADDING = 127


@dataclass(frozen=True)
class Augment:
    """How training images are varied.

    Attributes:
        padding: How many pixels of value 0 are added on each side before a window of the original
            size is cut out at a random position.
        flip: Whether to mirror images left to right with probability one half.
    """

    padding: int = 0
    flip: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.padding <= _LARGEST_PADDING:
            raise InputError(
                f"expected padding in 0..{_LARGEST_PADDING}, got {self.padding}: "
                "give the pixels to add on each side (4 for CIFAR), or 0 for none"
            )


class Draws(NamedTuple):
    """The random numbers of one epoch, for every sample of the set; each of shape (N,).

    Attributes:
        top, left: The first row and column of the window in the padded image, 0..2 * padding.
        flip: Whether the window is mirrored after it is cut out.
    """

    top: NDArray[np.uint8]
    left: NDArray[np.uint8]
    flip: NDArray[np.bool_]


def draw(augment: Augment, *, seed: int, epoch: int, samples: int) -> Draws:
    """Draw the random numbers of an epoch for all samples, so that sample i always gets the i-th.

    The windows are the same with and without flipping.
    """
    generator = stream(seed, epoch, "augment")
    top, left = generator.integers(0, 2 * augment.padding + 1, size=(2, samples), dtype=np.uint8)
    flip = generator.integers(0, 1 + augment.flip, size=samples, dtype=np.bool_)
    return Draws(top, left, flip)


class Normalise:
    """Convert bytes to float32: ``(v / 255 - mean) / std``, of values scaled to 0..1.

    There is one mean and one deviation per channel, and the images are ``width`` pixels wide.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], width: int, device: torch.device
    ) -> None:
        if len(mean) != len(std) or not all(deviation > 0 for deviation in std):
            raise InputError(
                f"expected a mean and a positive std for each channel, got mean {tuple(mean)} and "
                f"std {tuple(std)}: channel_statistics gives both from the training images"
            )
        # The values are repeated for a whole line of pixels, because an inner loop over only three
        # channels is six times slower.
        centre = torch.tensor(mean, dtype=torch.float64) * 255
        factor = 1 / (torch.tensor(std, dtype=torch.float64) * 255)
        self._centre = centre.repeat(width).to(torch.float32).to(device)
        self._factor = factor.repeat(width).to(torch.float32).to(device)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalise uint8 pixels of shape (B, height, width, channels) to float32."""
        # These are two operations that round separately. A fused operation may round differently at
        # the end of a batch, and then a sample's value would depend on its place in the batch.
        lines = pixels.reshape(-1, self._centre.numel()).to(torch.float32)
        return lines.sub_(self._centre).mul_(self._factor).view(pixels.shape)
