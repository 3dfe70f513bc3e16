"""Built-in data that fit into memory: their images lie on the device of the run."""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fineprune.datasets.augment import Augment
from fineprune.datasets.cifar import load_cifar10, load_cifar100
from fineprune.datasets.device_images import DeviceImages
from fineprune.datasets.digits import load_digits
from fineprune.datasets.image_set import ImageSet, channel_statistics
from fineprune.datasets.synthetic import make_synthetic
from fineprune.training.data.source import Source, evaluation_batch
from fineprune.training.recipe import Recipe


@dataclass(frozen=True, eq=False, kw_only=True)
class MemorySource(Source):
    """A ``Source`` of images in memory.

    Attributes:
        images: All images with their own labels.
        augment: How they are varied.
        seed: The seed of the run.
        statistics: The mean and the deviation of each channel; None for those of the samples.
    """

    images: ImageSet
    augment: Augment
    seed: int
    statistics: tuple[Sequence[float], Sequence[float]] | None = None

    @functools.cached_property
    def _chosen(self) -> Tensor:
        """The images of the samples; uint8, shape (N, channels, height, width)."""
        images = self.images.images
        return images if len(self) == len(images) else images[torch.from_numpy(self.index)]

    def blank(self) -> Tensor:
        """Return zeros of shape (1, channels, height, width)."""
        return torch.zeros(1, *self.images.images.shape[1:])

    def fingerprint(self) -> str:
        """Return the digest of the images and labels."""
        digest = hashlib.sha256()
        for tensor in (self.images.labels, self.images.images):
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    def plain(self, train: "MemorySource") -> "MemorySource":
        """Return the images without augmentation, normalised like those to train on."""
        statistics = channel_statistics(train._chosen)
        return replace(super().plain(train), augment=Augment(), statistics=statistics)

    def open(self) -> DeviceImages:
        """Put the images on the device."""
        assert self.labels is not None
        mean, std = self.statistics or channel_statistics(self._chosen)
        return DeviceImages(
            ImageSet(self._chosen, torch.from_numpy(self.labels), self.classes),
            seed=self.seed,
            device=self.device,
            augment=self.augment,
            mean=mean,
            std=std,
        )

    def show(self, sample: int) -> Any:
        """Return an image of Pillow."""
        from PIL import Image

        picture = self._chosen[sample].numpy()
        pixels = picture[0] if len(picture) == 1 else picture.transpose(1, 2, 0)
        return Image.fromarray(np.ascontiguousarray(pixels))


def open_memory(recipe: Recipe) -> tuple[MemorySource, MemorySource]:
    """Load the training and the test images of a recipe with built-in data."""
    settings, device, digits = recipe.data, recipe.run.device, recipe.data.name == "digits"
    if digits or settings.name == "synthetic":
        size, classes = settings.train_size, recipe.network.classes or 10
        assert size is not None
        if digits:
            train, test = load_digits(size)
        else:
            train, test = make_synthetic(size, size=settings.image_size or 32, classes=classes)
    else:
        load = load_cifar10 if settings.name == "cifar10" else load_cifar100
        train, test = load(Path(settings.dir), download=settings.download)
    padding = (2 if digits else 4) if settings.crop_padding is None else settings.crop_padding
    flip = not digits if settings.flip is None else settings.flip  # A mirrored digit is invalid.

    def source(images: ImageSet) -> MemorySource:
        return MemorySource(
            place=settings.name,
            device=device,
            classes=images.classes,
            index=np.arange(len(images)),
            labels=images.labels.numpy(),
            evaluation_batch=evaluation_batch(device),
            images=images,
            augment=Augment(padding=padding, flip=flip),
            seed=recipe.run.seed,
        )

    return source(train), source(test)
