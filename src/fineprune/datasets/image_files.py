"""ImageFiles: a data set of image files, which are read, decoded and cropped when they are needed.

A broken file does not end a run: it is replaced by another sample of its batch, so that the number
of batches and their sizes stay as planned on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from fineprune.datasets.image_crops import Crop, centre_crop, random_crop, random_resized_crop
from fineprune.datasets.image_decoder import BrokenImage, decode
from fineprune.datasets.image_index import ImageIndex


@dataclass(frozen=True)
class View:
    """How images are cropped and resized.

    Attributes:
        size: The height and width of the result.
        resize: The length of an image's shorter side at the scale at which a square of ``size`` is
            cut out: in the centre, or at random with ``crop = "crop"``.
        crop: ``random-resized``, ``crop`` or ``centre``.
        flip: Whether to mirror images at random; without effect with ``centre``.
        seed: Seeds random crops and flips, together with the epoch and the index.
    """

    size: int
    resize: int
    crop: str = "centre"
    flip: bool = False
    seed: int = 0

    def choose(self, width: int, height: int, epoch: int, index: int) -> Crop:
        """Return the part of an image to use in an epoch."""
        share, key = self.size / self.resize, (self.seed, epoch, index)
        if self.crop == "random-resized":
            return random_resized_crop(width, height, key=key, flip=self.flip)
        if self.crop == "crop":
            return random_crop(width, height, share=share, key=key, flip=self.flip)
        return centre_crop(width, height, share=share)


class Broken(NamedTuple):
    """A file that could not be used: the index of its sample, where it is, and what is wrong."""

    sample: int
    path: str
    reason: str


class Batch(NamedTuple):
    """A batch as loader processes return it.

    Attributes:
        samples: The index of each sample; int64, shape (B,).
        images: The pixels; uint8, shape (B, 3, size, size). None if all files are broken.
        labels: The classes; int64, shape (B,).
        broken: The files that could not be used.
    """

    samples: Tensor
    images: Tensor | None
    labels: Tensor
    broken: list[Broken]


Item = tuple[int, Tensor | Broken, int]


class ImageFiles(Dataset[Item]):
    """A map-style dataset of image files.

    A key is a pair ``(epoch, index)``. An item is the index, the pixels (uint8, shape (3, size,
    size)) or what is broken, and the class.

    Args:
        labels: The class of each sample; integers, shape (N,).
        images: The image of the index that each sample is, integers, shape (N,); None if sample i
            is image i.
    """

    def __init__(
        self,
        index: ImageIndex,
        labels: npt.NDArray[np.integer],
        view: View,
        images: npt.NDArray[np.integer] | None = None,
    ) -> None:
        self.index = index
        self.labels = labels
        self.view = view
        self._images = images

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: tuple[int, int]) -> Item:
        epoch, sample = key
        image = sample if self._images is None else int(self._images[sample])
        label = int(self.labels[sample])
        view = self.view
        try:
            content = self.index.read(image)
            pixels = decode(
                content, lambda width, height: view.choose(width, height, epoch, sample), view.size
            )
        except (OSError, BrokenImage) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            return sample, Broken(sample, self.index.name(image), reason), label
        return sample, pixels, label


def collate_replacing(items: Sequence[Item]) -> Batch:
    """Make a batch in which the next sample that is not broken replaces each broken one.

    After the last sample of the batch comes the first one. The index of a replaced sample is that
    of its replacement, which is therefore in the batch more than once.
    """
    good = [position for position, item in enumerate(items) if isinstance(item[1], Tensor)]
    after = np.searchsorted(good, np.arange(len(items))) % max(len(good), 1)
    return _batch([items[good[number]] for number in after] if good else [], items)


def collate_leaving_out(items: Sequence[Item]) -> Batch:
    """Make a batch without broken samples, which is smaller if there are any."""
    return _batch([item for item in items if isinstance(item[1], Tensor)], items)


def _batch(used: Sequence[Item], items: Sequence[Item]) -> Batch:
    # In a loader process, ``default_collate`` copies the pixels directly to shared memory.
    pixels: Any = default_collate([item[1] for item in used]) if used else None
    return Batch(
        torch.tensor([item[0] for item in used], dtype=torch.int64),
        pixels,
        torch.tensor([item[2] for item in used], dtype=torch.int64),
        [item[1] for item in items if isinstance(item[1], Broken)],
    )
