"""Built-in data that fit into memory: their images lie on the device of the run."""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fineprune.datasets.augment import Augment
from fineprune.datasets.cifar import load_cifar10, load_cifar100
from fineprune.datasets.device_images import DeviceImages
from fineprune.datasets.digits import load_digits
from fineprune.datasets.image_set import ImageSet, channel_statistics
from fineprune.datasets.synthetic import make_synthetic
from fineprune.training.data.source import evaluation_batch
from fineprune.training.recipe import Recipe


@dataclass(frozen=True, eq=False)
class MemorySource:
    """A ``Source`` of images in memory.

    Attributes:
        place: The name of the data.
        images: The images with their labels.
        augment: How they are varied.
        seed: The seed of the run.
        device: Where the images are put when they are opened.
        statistics: The mean and the standard deviation of each channel; None for those of
            ``images``.
    """

    place: str
    images: ImageSet
    augment: Augment
    seed: int
    device: str
    statistics: tuple[Sequence[float], Sequence[float]] | None = None

    sorted_by_class = False
    overlaps = True

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each class."""
        return self.images.classes

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """The class of each image; int64, shape (N,)."""
        labels: npt.NDArray[np.int64] = self.images.labels.numpy()
        return labels

    @property
    def evaluation_batch(self) -> int:
        """How many images to evaluate at once."""
        return evaluation_batch(self.device)

    def __len__(self) -> int:
        return len(self.images)

    def keys(self) -> None:
        """Return None: only its index names an image."""

    def blank(self) -> Tensor:
        """Return zeros of shape (1, channels, height, width)."""
        return torch.zeros(1, *self.images.images.shape[1:])

    def fingerprint(self) -> str:
        """Return the digest of the images and labels."""
        digest = hashlib.sha256()
        for tensor in (self.images.labels, self.images.images):
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    def part(
        self, index: npt.NDArray[np.int64], labels: npt.NDArray[np.int64] | None = None
    ) -> "MemorySource":
        """Return some of the samples; see ``Source``."""
        images = self.images
        if len(index) < len(images):
            images = images.subset(torch.from_numpy(index))
        if labels is not None:
            images = replace(images, labels=torch.from_numpy(labels))
        return replace(self, images=images)

    def plain(self, train: "MemorySource") -> "MemorySource":
        """Return the images without augmentation."""
        return replace(self, augment=Augment(), statistics=channel_statistics(train.images.images))

    def open(self) -> DeviceImages:
        """Put the images on the device."""
        mean, std = self.statistics or channel_statistics(self.images.images)
        return DeviceImages(
            self.images,
            seed=self.seed,
            device=self.device,
            augment=self.augment,
            mean=mean,
            std=std,
        )

    def show(self, sample: int) -> Any:
        """Return an image of Pillow."""
        from PIL import Image

        picture = self.images.images[sample].numpy()
        pixels = picture[0] if len(picture) == 1 else picture.transpose(1, 2, 0)
        return Image.fromarray(np.ascontiguousarray(pixels))

    def save(self, name: str, folder: Path) -> None:
        """Write nothing: the images stay as they are."""


def open_memory(recipe: Recipe) -> tuple[MemorySource, MemorySource]:
    """Load the training and the test images of a recipe with built-in data."""
    settings = recipe.data
    digits = settings.name == "digits"
    if digits:
        assert settings.train_size is not None
        train, test = load_digits(settings.train_size)
    elif settings.name == "synthetic":
        assert settings.train_size is not None
        assert settings.image_size is not None
        train, test = make_synthetic(
            settings.train_size, size=settings.image_size, classes=recipe.network.classes or 10
        )
    else:
        load = load_cifar10 if settings.name == "cifar10" else load_cifar100
        train, test = load(Path(settings.dir), download=settings.download)
    padding = (2 if digits else 4) if settings.crop_padding is None else settings.crop_padding
    flip = not digits if settings.flip is None else settings.flip  # A mirrored digit is invalid.
    source = functools.partial(
        MemorySource,
        settings.name,
        augment=Augment(padding=padding, flip=flip),
        seed=recipe.run.seed,
        device=recipe.run.device,
    )
    return source(train), source(test)
