"""DeviceLoader: a whole image set on the device, and batches made there without waiting.

An image set that fits into memory needs no loader processes. Its bytes are copied to the device
once, and a batch is one gather of bytes, one conversion and one normalisation. Nothing waits for
the device during an epoch, because the indices of the whole epoch are copied there at its start.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fineprune.datasets.augment import Augment, Canvas, Draws, Normalise, draw
from fineprune.datasets.image_set import ImageSet
from fineprune.pruning.sampler import PruningSampler


class DeviceImages:
    """A whole image set on the device, from which any batch can be made.

    Args:
        data: The images. A copy of them is stored on the device (see ``Canvas`` for its size).
        seed: The seed of the run. Crops and flips depend only on it, on the epoch and on a sample's
            index.
        device: Where batches are made.
        augment: How images are varied.
        mean: One float per channel from values scaled to 0..1, as ``channel_statistics`` returns.
        std: One float per channel, likewise.
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
        self.device = torch.device(device)
        self._seed = seed
        self._samples = len(data)
        self._canvas = Canvas(data.images, augment, self.device)
        self._normalise = Normalise(mean, std, data.images.shape[3], self.device)
        self._labels = data.labels.to(self.device)
        self._drawn: tuple[int, Draws] | None = None

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
            augment = self._canvas.augment
            drawn = draw(augment, seed=self._seed, epoch=epoch, samples=self._samples)
            self._drawn = (epoch, drawn)
        # The copies do not wait: pageable memory is staged before the call returns.
        starts = self._canvas.starts(index, self._drawn[1]).to(self.device, non_blocking=True)
        index = index.to(self.device, non_blocking=True)
        return index, starts, self._labels.index_select(0, index)

    def images(self, starts: Tensor) -> Tensor:
        """Return normalised windows; float32, shape (n, channels, height, width).

        The memory format is channels last, which is faster for convolutions on most devices.
        """
        return self._normalise(self._canvas.cut(starts)).permute(0, 3, 1, 2)

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
        return self.batches(order, self.sampler.epoch, self.batch_size)

    def batches(
        self, index: Tensor, epoch: int, batch_size: int
    ) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
        """Yield batches of given samples with the crops and flips of an epoch.

        Args:
            index, epoch: As for ``DeviceImages.upload``. The batches have this order.
            batch_size: The number of samples per batch.
        """
        index, starts, labels = self._images.upload(index, epoch)
        for first in range(0, len(index), batch_size):
            # Slices are views of the tensors of the epoch, so indices and labels are not copied.
            batch = slice(first, first + batch_size)
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
        device = torch.device(device)
        self._batch_size = batch_size
        self._pixels = data.images.to(device).permute(0, 2, 3, 1).contiguous()
        self._labels = data.labels.to(device)
        self._normalise = Normalise(mean, std, data.images.shape[3], device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(0, len(self._labels), self._batch_size):
            batch = slice(first, first + self._batch_size)
            yield self._normalise(self._pixels[batch]).permute(0, 3, 1, 2), self._labels[batch]
