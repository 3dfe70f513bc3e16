"""DeviceLoader: a whole image set on the device, and batches made there without waiting.

An image set that fits into memory needs no loader processes. Its bytes are copied to the device
once, and a batch is one gather of bytes, one conversion and one normalisation. Nothing waits for
the device during an epoch, because the indices of the whole epoch are copied there at its start.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fineprune.datasets.augment import Augment, Draws, Normalise, draw
from fineprune.datasets.image_set import ImageSet
from fineprune.pruning.sampler import PruningSampler


class DeviceImages:
    """A whole image set on the device, from which any batch can be made.

    The images are stored as one flat row of bytes, image after image, each with its padding and, if
    flips are needed, followed by its mirror image, and pixel after pixel with the channels of a
    pixel together. A line of any window is then a contiguous run of bytes, and a batch of windows,
    mirrored or not, is a single gather of such runs. This takes ``N * (height + 2 * padding) *
    (width + 2 * padding) * channels`` bytes, and twice as many with flipping (480 MB for CIFAR-10),
    but flipping then takes no time.

    Args:
        data: The images. A copy of them is stored on the device.
        seed: The seed of the run. Crops and flips depend only on it, on the epoch and on a sample's
            index.
        device: Where batches are made.
        augment: How images are varied.
        mean, std: One float per channel from values scaled to 0..1; see ``channel_statistics``.
    """

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

    def upload(self, index: Tensor, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Copy indices to the device, with the windows and the labels of their samples.

        Args:
            index: The indices of the samples; int64, shape (n,), on the CPU.
            epoch: The epoch, from 0, that determines crops and flips.

        Returns:
            The indices, the positions of the windows (for ``images``) and the labels; each int64 of
            shape (n,), on the device.
        """
        if self._drawn is None or self._drawn[0] != epoch:
            drawn = draw(self._augment, seed=self._seed, epoch=epoch, samples=self._samples)
            self._drawn = (epoch, drawn)
        # The copies do not wait: pageable memory is staged before the call returns.
        starts = self._starts(index, self._drawn[1]).to(self._device, non_blocking=True)
        index = index.to(self._device, non_blocking=True)
        return index, starts, self._labels.index_select(0, index)

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

    def images(self, starts: Tensor) -> Tensor:
        """Return normalised windows; float32, shape (n, channels, height, width).

        The memory format is channels last, which is faster for convolutions on most devices.
        """
        runs = starts[:, None] + self._lines
        pixels = self._runs.index_select(0, runs.view(-1)).view(-1, *self._shape)
        return self._normalise(pixels).permute(0, 3, 1, 2)

    def fetch(self, index: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Return one batch ``(x, y)`` of these samples with the crops and flips of ``epoch``."""
        _, starts, labels = self.upload(index, epoch)
        return self.images(starts), labels


@dataclass(eq=False)
class DeviceLoader:
    """Batches ``(index, (x, y))`` of an image set, augmented and normalised on the device.

    ``index`` is int64 of shape (B,), ``x`` is float32 of shape (B, channels, height, width) in the
    channels-last memory format, and ``y`` is int64 of shape (B,), all on the device. Each iteration
    is one epoch, in the order of the sampler and with the crops and flips of ``sampler.epoch``.
    Call ``set_epoch`` of the sampler before it.

    With ``drop_last``, an incomplete last batch is dropped.
    """

    _images: DeviceImages
    batch_size: int
    sampler: PruningSampler
    drop_last: bool = False

    def __len__(self) -> int:
        """Return the number of batches in the sampler's epoch."""
        whole, rest = divmod(len(self.sampler), self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def __iter__(self) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
        order = self.sampler.order()
        if self.drop_last:
            order = order[: len(order) - len(order) % self.batch_size]
        index, starts, labels = self._images.upload(order, self.sampler.epoch)
        for first in range(0, len(index), self.batch_size):
            # Slices are views of the tensors of the epoch, so indices and labels are not copied.
            batch = slice(first, first + self.batch_size)
            yield index[batch], (self._images.images(starts[batch]), labels[batch])


class EvaluationBatches:
    """Batches of images for evaluation: in order, normalised, and without augmentation.

    The bytes are copied to the device once, and the batches can be iterated any number of times, so
    keep this for the whole run. A batch ``(x, y)`` is float32 of shape (B, channels, height,
    width), channels last, and int64 of shape (B,). The arguments are those of ``DeviceImages``;
    ``mean`` and ``std`` are those of the training images.
    """

    def __init__(
        self,
        data: ImageSet,
        batch_size: int,
        device: str | torch.device,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        self._images = DeviceImages(
            data, seed=0, device=device, augment=Augment(), mean=mean, std=std
        )
        self._parts = torch.arange(len(data)).split(batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self._images.fetch(part, 0) for part in self._parts)
