"""Augment: random crop and horizontal flip, for whole batches and by draws that are repeatable.

The draw of a sample depends on the seed, the epoch and its index only. Neither the order nor the
batch size, the number of ranks or a resume in the middle of an epoch change it, and a sample that
an epoch skips takes no other sample's draw.
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

# Offsets 0..2 * padding fit a byte.
_LARGEST_PADDING = 127


@dataclass(frozen=True)
class Augment:
    """What is done to training images.

    Attributes:
        padding: pixels of value 0 added on each side before a window of the image's own size is
            cut out at random; 0 leaves the image in its place.
        flip: mirror left and right, with probability one half.

    Raises:
        InputError: a padding outside 0..127.
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
    """One epoch's random numbers, one of each for every sample of the set.

    Attributes:
        top: uint8, shape (N,): the first row of the window in the padded image, 0..2 * padding.
        left: uint8, shape (N,): its first column, likewise.
        flip: bool, shape (N,): whether the window is mirrored after it is cut out.
    """

    top: NDArray[np.uint8]
    left: NDArray[np.uint8]
    flip: NDArray[np.bool_]


def draw(augment: Augment, *, seed: int, epoch: int, samples: int) -> Draws:
    """Draw for all ``samples`` of the set, so that sample i always gets the i-th draw.

    The windows are the same with and without flipping.
    """
    generator = stream(seed, epoch, "augment")
    offsets = generator.integers(0, 2 * augment.padding + 1, size=(2, samples), dtype=np.uint8)
    if augment.flip:
        flip = generator.integers(0, 2, size=samples, dtype=np.bool_)
    else:
        flip = np.zeros(samples, dtype=np.bool_)
    return Draws(offsets[0], offsets[1], flip)


class Canvas:
    """All images of a set, padded, and mirrored beside them where they may be flipped.

    The layout is one flat row of bytes, image after image and pixel after pixel with a pixel's
    channels together. A line of any window is then a run of bytes: a batch of windows, mirrored
    or not, is one gather of such runs. It takes ``N * (height + 2 * padding) * (width + 2 *
    padding) * channels`` bytes, twice that with flipping (CIFAR-10: 480 MB), and in return
    flipping is free.

    Args:
        images: uint8, shape (N, channels, height, width).
        augment: the padding, and whether mirror images are needed.
        device: where the canvas lies and windows are cut.
    """

    def __init__(self, images: Tensor, augment: Augment, device: torch.device) -> None:
        samples, channels, height, width = images.shape
        padding = augment.padding
        self.augment = augment
        self._copies = 2 if augment.flip else 1
        self._shape = (height, width, channels)
        self._step = (width + 2 * padding) * channels
        self._area = (height + 2 * padding) * self._step

        padded = torch.zeros(
            (samples, self._copies, height + 2 * padding, width + 2 * padding, channels),
            dtype=torch.uint8,
            device=device,
        )
        inner = padded[:, 0, padding : padding + height, padding : padding + width]
        inner.copy_(images.to(device).permute(0, 2, 3, 1))
        if augment.flip:
            # The padding is the same on both sides, so the padded image is mirrored whole.
            padded[:, 1] = padded[:, 0].flip(2)

        # Row k of this view is the run of one line's bytes that starts at byte k. The view costs
        # nothing, its rows overlap, and it is only ever read.
        line = width * channels
        flat = padded.view(-1)
        self._runs = flat.as_strided((max(flat.numel() - line + 1, 0), line), (1, 1))
        self._lines = torch.arange(height, device=device) * self._step

    def starts(self, index: Tensor, draws: Draws) -> Tensor:
        """Return the first byte of each sample's window: int64 of shape (B,), on the CPU.

        Args:
            index: int64, shape (B,), on the CPU: which samples.
            draws: the epoch's draws for the whole set.
        """
        chosen = index.numpy()
        top = draws.top[chosen].astype(np.int64)
        left = draws.left[chosen].astype(np.int64)
        flip = draws.flip[chosen]
        # In the mirrored copy a window that began `left` pixels from the left edge begins as
        # far from the other one: 2 * padding - left.
        left = np.where(flip, 2 * self.augment.padding - left, left)
        image = chosen * self._copies + flip
        channels = self._shape[2]
        return torch.from_numpy(image * self._area + top * self._step + left * channels)

    def cut(self, starts: Tensor) -> Tensor:
        """Cut out windows: uint8 of shape (B, height, width, channels), on the canvas's device.

        Args:
            starts: int64, shape (B,), on the canvas's device, as ``starts`` returns them.
        """
        runs = starts[:, None] + self._lines
        return self._runs.index_select(0, runs.view(-1)).view(-1, *self._shape)


class Normalise:
    """Turn bytes into float32 of about zero mean and unit deviation: ``(v / 255 - mean) / std``.

    Args:
        mean: one float a channel, over values scaled to 0..1.
        std: likewise, greater than 0.
        width: the images' width in pixels.
        device: where the images lie.

    Raises:
        InputError: ``mean`` and ``std`` of different lengths, or a deviation that is not positive.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], width: int, device: torch.device
    ) -> None:
        if len(mean) != len(std) or not all(deviation > 0 for deviation in std):
            raise InputError(
                f"expected a mean and a positive std for each channel, got mean {tuple(mean)} and "
                f"std {tuple(std)}: channel_statistics gives both from the training images"
            )
        # Repeated to a whole line of pixels: the inner loop over three channels alone is six
        # times slower.
        centre = torch.tensor(mean, dtype=torch.float64) * 255
        factor = 1 / (torch.tensor(std, dtype=torch.float64) * 255)
        self._centre = centre.repeat(width).to(torch.float32).to(device)
        self._factor = factor.repeat(width).to(torch.float32).to(device)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalise uint8 pixels of shape (B, height, width, channels); same shape, float32."""
        # Two operations, each rounded on its own: a fused one may round differently at the end
        # of a batch, and then a sample's value would depend on its place.
        lines = pixels.reshape(-1, self._centre.numel()).to(torch.float32)
        return lines.sub_(self._centre).mul_(self._factor).view(pixels.shape)
