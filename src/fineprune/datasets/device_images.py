"""DeviceImages: a whole image set on the device, and batches made there without waiting.

An image set that fits into memory needs no loader processes. Its bytes are copied to the device
once, and a batch is one gather of bytes, one conversion and one normalisation. Nothing waits for
the device during an epoch, because the indices of the whole epoch are copied there at its start.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fineprune.datasets.augment import Augment, Draws, Normalise, draw
from fineprune.datasets.image_set import ImageSet


class DeviceImages:
    """A whole image set on the device, from which any batch can be made.

    The images are one flat row of bytes: image after image, each with its padding and, with flips,
    followed by its mirror image, and pixel after pixel with its channels together. Then any line of
    a window, mirrored or not, is one run of bytes, and a batch is a single gather of runs. This
    takes ``N * (height + 2 * padding) * (width + 2 * padding) * channels`` bytes, twice as many
    with flips (480 MB for CIFAR-10), and makes flips free.

    Args:
        data: The images. A copy of them is stored on the device.
        seed: The seed of the run. Crops and flips depend only on it, on the epoch and on a sample's
            index.
        device: Where batches are made.
        augment: How images are varied.
        mean, std: One float per channel from values scaled to 0..1; see ``channel_statistics``.

    Attributes:
        broken: None, because no file is read later.
    """

    broken = None

    def __init__(
        self,
        data: ImageSet,
        *,
        seed: int,
        device: str | torch.device,
        augment: Augment,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        samples, channels, height, width = data.images.shape
        padding, copies = augment.padding, 2 if augment.flip else 1
        self._device = torch.device(device)
        self._seed = seed
        self._augment = augment
        self._samples = samples
        self._shape = (height, width, channels)
        self._step = (width + 2 * padding) * channels
        self._area = (height + 2 * padding) * self._step
        self._normalise = Normalise(mean, std, width, self._device)
        self._labels = data.labels.to(self._device)
        self._drawn: tuple[int, Draws] | None = None

        padded = torch.zeros(
            (samples, copies, height + 2 * padding, width + 2 * padding, channels),
            dtype=torch.uint8,
            device=self._device,
        )
        inner = padded[:, 0, padding : padding + height, padding : padding + width]
        inner.copy_(data.images.to(self._device).permute(0, 2, 3, 1))
        if augment.flip:
            # The padding is the same on both sides, so the padded image can be mirrored as a whole.
            padded[:, 1] = padded[:, 0].flip(2)

        # Row k of this view is the run of one line's bytes that starts at byte k. The rows overlap
        # in memory, and they are only read.
        line = width * channels
        flat = padded.view(-1)
        self._runs = flat.as_strided((max(flat.numel() - line + 1, 0), line), (1, 1))
        self._lines = torch.arange(height, device=self._device) * self._step

    def batches(
        self, order: Tensor, epoch: int, size: int
    ) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
        """Yield ``(index, (x, y))`` for the samples of an order, ``size`` at a time, on the device.

        The images ``x`` are float32, shape (B, channels, height, width), channels last, which is
        faster for convolutions on most devices; the indices and labels are int64, shape (B,).

        Args:
            order: The indices of the samples; int64, shape (n,), on the CPU.
            epoch: The epoch, from 0, that determines crops and flips.
            size: The number of samples of each batch but the last.
        """
        if self._drawn is None or self._drawn[0] != epoch:
            drawn = draw(self._augment, seed=self._seed, epoch=epoch, samples=self._samples)
            self._drawn = (epoch, drawn)
        # The copies do not wait: pageable memory is staged before the call returns.
        starts = self._starts(order, self._drawn[1]).to(self._device, non_blocking=True)
        index = order.to(self._device, non_blocking=True)
        labels = self._labels.index_select(0, index)
        for first in range(0, len(index), size):
            # Slices are views of the tensors of the epoch, so indices and labels are not copied.
            part = slice(first, first + size)
            yield index[part], (self._images(starts[part]), labels[part])

    def batch(self, index: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Return one batch ``(x, y)`` of these samples with the crops and flips of ``epoch``."""
        ((_, batch),) = self.batches(index, epoch, len(index))
        return batch

    def _starts(self, index: Tensor, draws: Draws) -> Tensor:
        """Return the position of the first byte of each sample's window; int64, on the CPU."""
        chosen = index.numpy()
        top = draws.top[chosen].astype(np.int64)
        left = draws.left[chosen].astype(np.int64)
        flip = draws.flip[chosen]
        # A window that starts `left` pixels from the left edge ends 2 * padding - left pixels from
        # the right edge, and that is where it starts in the mirrored copy.
        left = np.where(flip, 2 * self._augment.padding - left, left)
        image = chosen * (2 if self._augment.flip else 1) + flip
        channels = self._shape[2]
        return torch.from_numpy(image * self._area + top * self._step + left * channels)

    def _images(self, starts: Tensor) -> Tensor:
        """Return the normalised windows that start at these bytes."""
        runs = starts[:, None] + self._lines
        pixels = self._runs.index_select(0, runs.view(-1)).view(-1, *self._shape)
        return self._normalise(pixels).permute(0, 3, 1, 2)
