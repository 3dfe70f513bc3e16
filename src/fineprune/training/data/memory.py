"""Built-in data that fit into memory: their images lie on the device of the run."""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fineprune.datasets.augment import Augment
from fineprune.datasets.cifar import load_cifar10, load_cifar100
from fineprune.datasets.device_loader import DeviceImages, DeviceLoader, EvaluationBatches
from fineprune.datasets.digits import load_digits
from fineprune.datasets.image_set import ImageSet, channel_statistics
from fineprune.datasets.synthetic import make_synthetic
from fineprune.pruning.pruner import Pruner
from fineprune.runs.training_set import TrainingSet
from fineprune.training.data.run_data import (
    Data,
    evaluation_batch,
    number_of_classes,
    split,
)
from fineprune.training.left_out import left_out
from fineprune.training.recipe import Recipe
from fineprune.training.weak_labels import WeakLabels, weak_labels


@dataclass(frozen=True, eq=False)
class LoadedImages:
    """The images of a recipe with built-in data.

    Attributes:
        train: The images to train on, with the labels to train with.
        evaluated: The images to evaluate on.
        augment: How training images are augmented.
        weak: The labels of ``train``, and which images of the whole training set it has.
        given: The labels of the whole training set of the dataset; int64.
        digest: Returns the digest of the data; see ``Data.digest``.
        left_out_digest: The digest of what ``data.without`` leaves; None without it.
    """

    train: ImageSet
    evaluated: ImageSet
    augment: Augment
    weak: WeakLabels
    given: npt.NDArray[np.int64]
    digest: Callable[[], str]
    left_out_digest: str | None = None

    def training_set(self) -> TrainingSet:
        """Return the whole training set, of which ``train`` is a part."""
        return TrainingSet(self.weak.index, self.weak.whole, self.train.classes)

    def only(self, kept: npt.NDArray[np.int64]) -> "LoadedImages":
        """Return the data with these training images, sorted positions; int64, shape (m,)."""
        train = self.train.subset(torch.from_numpy(kept))
        return replace(self, train=train, weak=self.weak.only(kept))


def load_images(recipe: Recipe) -> LoadedImages:
    """Load the images of a recipe with built-in data that fit into memory."""
    loaded = _load_all(recipe)
    left = left_out(recipe.data, loaded.training_set, loaded.digest)
    if left is None:
        return loaded
    known = loaded.digest()  # Afterwards, the images are fewer.
    return replace(loaded.only(left.kept), digest=lambda: known, left_out_digest=left.digest)


def _load_all(recipe: Recipe) -> LoadedImages:
    """Load the images with those that ``data.without`` leaves out."""
    settings = recipe.data
    if settings.name == "digits":
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
    digits = settings.name == "digits"
    padding = (2 if digits else 4) if settings.crop_padding is None else settings.crop_padding
    flip = not digits if settings.flip is None else settings.flip  # A mirrored digit is invalid.
    kept, held_out = split(len(train), settings.validation)
    kept = kept[: settings.limited(len(kept))]
    evaluated = train.subset(torch.from_numpy(held_out)) if settings.validation else test
    given = train.labels.numpy()
    weak = weak_labels(settings, given, train.classes, kept)
    if len(weak.index) < len(train):
        train = train.subset(torch.from_numpy(weak.index))
    train = replace(train, labels=torch.from_numpy(weak.labels))
    augment = Augment(padding=padding, flip=flip)
    digest = functools.partial(_digest, given, train.images, evaluated)
    return LoadedImages(train, evaluated, augment, weak, given, digest)


def device_data(recipe: Recipe, loaded: LoadedImages) -> Data:
    """Return the data of a recipe from its images; what it trains on is put on its device."""
    train, augment, weak = loaded.train, loaded.augment, loaded.weak
    mean, std = channel_statistics(train.images)
    device = recipe.run.device

    def images() -> DeviceImages:
        seed = recipe.run.seed
        return DeviceImages(train, seed=seed, device=device, augment=augment, mean=mean, std=std)

    def make_loader(pruner: Pruner) -> DeviceLoader:
        size, drop_last = recipe.training.batch_size, recipe.training.drop_last
        return DeviceLoader(images(), size, sampler=pruner.sampler, drop_last=drop_last)

    return Data(
        train=len(train),
        make_loader=make_loader,
        make_fetch=lambda: images().fetch,
        evaluation=EvaluationBatches(
            loaded.evaluated, evaluation_batch(device), device=device, mean=mean, std=std
        ),
        evaluated_on="validation" if recipe.data.validation else "test",
        num_samples=len(train),
        labels=lambda: train.labels,
        training_set=loaded.training_set,
        classes=number_of_classes(train, recipe.data.name, recipe.network.classes),
        blank=torch.zeros(1, *train.images.shape[1:]),
        wrong=weak.wrong,
        labels_digest=weak.digest,
        left_out_digest=loaded.left_out_digest,
        digest=loaded.digest,
    )


def _digest(given: npt.NDArray[np.int64], images: torch.Tensor, evaluated: ImageSet) -> str:
    """Return the digest of the images and of the dataset's own labels."""
    digest = hashlib.sha256(np.ascontiguousarray(given).data)
    for tensor in (images, evaluated.images, evaluated.labels):
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()
