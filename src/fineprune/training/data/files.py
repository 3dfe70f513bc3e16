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
        broken takes the place of each, also in the indices; the first one comes after the last.
        """
        assert self.labels is not None
        read = [self.read(epoch, sample) for epoch, sample in keys]
        good = [place for place, pixels in enumerate(read) if isinstance(pixels, Tensor)]
        used = good
        if good and not self.evaluated:
            used = [good[i] for i in np.searchsorted(good, np.arange(len(read))) % len(good)]
        samples = np.array([keys[place][1] for place in used], dtype=np.int64)
        return Loaded(
            torch.from_numpy(samples),
            # In a loader process, this copies the pixels directly to shared memory.
            default_collate([read[place] for place in used]) if used else None,
            torch.from_numpy(self.labels[samples].astype(np.int64)),
            [pixels for pixels in read if isinstance(pixels, Broken)],
        )

    def read(self, epoch: int, sample: int) -> Tensor | Broken:
        """Return the pixels of a sample, or what is broken."""
        image, view = int(self.index[sample]), self.view
        try:
            return decode(
                self.images.read(image),
                lambda width, height: view.choose(width, height, epoch, sample),
                view.size,
            )
        except (OSError, BrokenImage) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            return Broken(sample, self.images.name(image), reason)


def open_files(recipe: Recipe, folder: Path | None) -> tuple[FileSource, FileSource | None]:
    """Return the training images and the test images, which are None with ``data.validation``.

    They are those in the folder of a run that continues, if it is given.
    """
    settings, seed = recipe.data, recipe.run.seed
    check_decoder()
    size, resize, crop = settings.image_size, settings.resize, settings.crop
    # The settings replace None by their defaults.
    assert settings.train is not None and size and resize and crop  # noqa: PT018
    view = View(size, resize, crop, settings.flip is not False, seed)

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
