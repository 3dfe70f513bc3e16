"""Image files, which are read, decoded and cropped while the training needs them.

A broken file does not end a run: it is replaced by another sample of its batch, so that the number
of batches and their sizes stay as planned on every rank.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from fineprune.datasets.augment import Normalise
from fineprune.datasets.broken_files import Broken, BrokenFiles
from fineprune.datasets.image_crops import View
from fineprune.datasets.image_decoder import BrokenImage, check_decoder, decode
from fineprune.datasets.image_list import ImageList, find_images, load_images, save_images
from fineprune.training.data.loaded import Keys, Loaded, LoadedSource
from fineprune.training.data.source import UNREADABLE
from fineprune.training.recipe import Recipe

# The mean and the standard deviation of the channels of ImageNet's training images, scaled to 0..1,
# with which published networks are trained.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

Item = tuple[int, Tensor | Broken, int]


@dataclass(frozen=True, eq=False, kw_only=True)
class FileSource(LoadedSource):
    """A ``Source`` of image files.

    Attributes:
        images: The files of the whole data set.
        view: How images are cropped and resized.
        broken_limit: The largest share of the files that may be broken.
    """

    images: ImageList
    view: View
    broken_limit: float

    sorted_by_class = True

    def keys(self) -> tuple[str, ...]:
        """Return the path of each sample, relative to the folder of the images."""
        keys = self.images.keys()
        return tuple(keys[image] for image in self.index)

    def blank(self) -> Tensor:
        """Return zeros of shape (1, 3, size, size)."""
        return torch.zeros(1, 3, self.view.size, self.view.size)

    def fingerprint(self) -> str:
        """Return the digest of the relative paths of all images and their classes."""
        return self.images.digest()

    def plain(self, train: "FileSource") -> "FileSource":
        """Return the centre of each image."""
        return replace(super().plain(train), view=View(self.view.size, self.view.resize))

    def show(self, sample: int) -> Any:
        """Return an image of Pillow, or a text: a page needs most of its samples."""
        from PIL import Image

        try:
            opened = Image.open(io.BytesIO(self.images.read(int(self.index[sample]))))
            opened.load()
        except MemoryError:
            raise
        except Exception:  # Each decoder has errors of its own for damaged files.
            return UNREADABLE
        return opened

    def save(self, name: str, folder: Path) -> None:
        """Write the list of the images, so that indices stay right if files come or go."""
        save_images(_saved(folder, name), self.images)

    def broken_files(self) -> BrokenFiles:
        """Return what takes note of broken files."""
        return BrokenFiles(len(self), self.broken_limit)

    def on_device(self) -> Callable[[Tensor], Tensor]:
        """Return what normalises pixels; float32, shape (B, 3, size, size), channels last."""
        device = torch.device(self.device)
        normalise = Normalise(IMAGENET_MEAN, IMAGENET_STD, self.view.size, device)
        return lambda pixels: normalise(pixels.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def __getitems__(self, keys: Keys) -> Loaded:
        """Read a batch, in which none of the files is broken. ``x`` is uint8, (B, 3, size, size).

        In an evaluation, broken files are left out. In the training, the next sample that is not
        broken replaces each of them; after the last one comes the first one. The index of a
        replaced sample is that of its replacement.
        """
        items = [self.read(epoch, sample) for epoch, sample in keys]
        good = [place for place, item in enumerate(items) if isinstance(item[1], Tensor)]
        used = [items[place] for place in good]
        if good and not self.evaluated:
            after = np.searchsorted(good, np.arange(len(items))) % len(good)
            used = [used[number] for number in after]
        return Loaded(
            torch.tensor([item[0] for item in used], dtype=torch.int64),
            # In a loader process, this copies the pixels directly to shared memory.
            default_collate([item[1] for item in used]) if used else None,
            torch.tensor([item[2] for item in used], dtype=torch.int64),
            [item[1] for item in items if isinstance(item[1], Broken)],
        )

    def read(self, epoch: int, sample: int) -> Item:
        """Return a sample, its pixels or what is broken, and its class."""
        assert self.labels is not None
        image, label, view = int(self.index[sample]), int(self.labels[sample]), self.view
        try:
            pixels = decode(
                self.images.read(image),
                lambda width, height: view.choose(width, height, epoch, sample),
                view.size,
            )
        except (OSError, BrokenImage) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            return sample, Broken(sample, self.images.name(image), reason), label
        return sample, pixels, label


def open_files(recipe: Recipe, folder: Path | None) -> tuple[FileSource, FileSource | None]:
    """Find the training and the test images of a recipe.

    Args:
        recipe: The recipe.
        folder: The folder of a run that continues with the images with which it began; None to look
            for the images.

    Returns:
        The training set and the test set, which is None with ``data.validation``.
    """
    settings = recipe.data
    check_decoder()
    # The settings replace None by their defaults.
    assert settings.train is not None
    assert settings.image_size is not None
    assert settings.resize is not None
    view = View(
        settings.image_size,
        settings.resize,
        settings.crop or "random-resized",
        settings.flip is not False,
        recipe.run.seed,
    )

    def source(images: ImageList) -> FileSource:
        return FileSource(
            place=str(images.source),
            device=recipe.run.device,
            classes=images.classes,
            index=np.arange(len(images)),
            labels=images.labels,
            evaluation_batch=recipe.training.batch_size,
            workers=settings.workers,
            images=images,
            view=view,
            broken_limit=settings.broken_limit or 0.0,
        )

    train = _images(Path(settings.train), "train", folder).with_numbers(recipe.network.classes)
    if settings.validation:
        return source(train), None
    assert settings.test is not None
    test = _images(Path(settings.test), "test", folder)
    return source(train), source(test.numbered(train.classes))


def _images(source: Path, name: str, folder: Path | None) -> ImageList:
    """Return the images of a run that continues, or else those that there are now."""
    if folder is not None and (file := _saved(folder, name)).exists():
        return load_images(file, source)
    return find_images(source)


def _saved(folder: Path, name: str) -> Path:
    return folder / f"{name}-images.npz"
