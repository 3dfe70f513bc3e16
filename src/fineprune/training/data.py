"""Builds the training loader and the evaluation batches that a recipe's data section describes."""

import functools
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from fineprune.datasets.augment import Augment
from fineprune.datasets.broken_files import BrokenFiles
from fineprune.datasets.cifar import load_cifar10, load_cifar100
from fineprune.datasets.device_loader import DeviceImages, DeviceLoader, evaluation_batches
from fineprune.datasets.digits import load_digits
from fineprune.datasets.image_decoder import check_decoder
from fineprune.datasets.image_files import ImageFiles, View
from fineprune.datasets.image_index import ImageIndex, load_index
from fineprune.datasets.image_loader import EvaluationImages, ImageFetcher, ImageLoader
from fineprune.datasets.image_set import ImageSet, channel_statistics
from fineprune.datasets.synthetic import make_synthetic
from fineprune.errors import InputError
from fineprune.pruning.pruner import Pruner
from fineprune.pruning.random_streams import stream
from fineprune.training.own_data import (
    EpochIndices,
    PlainSamples,
    SampleFetcher,
    evaluation_loader,
    labels_of,
    load_own,
    number_of_classes,
    subset,
    training_loader,
)
from fineprune.training.recipe import Recipe
from fineprune.training.settings import DataSettings
from fineprune.training.weak_labels import WeakLabels, weak_labels

# Evaluation keeps nothing for a backward pass, so its batches can be larger than those of training.
# On a CPU, they are smaller than on a GPU so that the activations stay in the cache. Both sizes
# divide the size of CIFAR's test set.
_EVALUATION_BATCH = {"cpu": 500, "cuda": 2000}

# The validation part and the watched samples are drawn from this seed instead of the run's, so that
# runs with different seeds can be compared.
_FIXED_SEED = 0

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]
Fetch = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Data:
    """The data that a run trains and evaluates on.

    Attributes:
        train: The first argument of ``Pruner``: the training dataset, or its number of samples.
        make_loader: Builds the training loader for a pruner; it yields ``(index, (x, y))``.
        make_fetch: Builds a function that takes the indices of a batch (int64, shape (B,)) and an
            epoch and returns ``(x, y)``. Workers of parameter servers load their batches with it.
        evaluation: The batches ``(x, y)`` to evaluate on; they can be iterated more than once.
        evaluated_on: The name of the set to evaluate on, ``test`` or ``validation``.
        watched: The indices of the watched training samples, and batches of these samples in the
            same order.
        num_samples: The number of training samples, N.
        labels: Returns the class of each training sample, integers, shape (N,). It raises
            InputError if the classes of user-defined data are not known.
        classes: The number of classes of the network to build.
        channels: The number of input channels of the network to build.
        blank: Zeros with the shape (1, ...) and dtype of the ``x`` of one sample, to check that the
            network fits the data.
        wrong: Which training labels are wrong; bool, shape (N,). None if this is not known.
        labels_digest: The digest of training labels that come from a file of the user, and of
            the names of image files with their labels; None for other data.
        images_digest: The digest of the index of the training images if they are files; None for
            other data.
        fetch_overlaps: Whether the function that ``make_fetch`` builds may be called in another
            thread while a step is computed.
    """

    train: Any
    make_loader: Callable[[Pruner], Any]
    make_fetch: Callable[[], Fetch]
    evaluation: Batches
    evaluated_on: str
    watched: tuple[list[int], Batches]
    num_samples: int
    labels: Callable[[], Any]
    classes: int
    channels: int
    blank: torch.Tensor
    wrong: npt.NDArray[np.bool_] | None = None
    labels_digest: str | None = None
    images_digest: str | None = None
    fetch_overlaps: bool = True


@dataclass(frozen=True, eq=False)
class LoadedImages:
    """The images of a recipe with built-in data.

    Attributes:
        train: The images to train on, with the labels to train with.
        evaluated: The images to evaluate on.
        augment: How training images are augmented.
        weak: Where the labels of ``train`` come from; None if they are those of the dataset.
        index: The index of each image of ``train`` in the whole training set of the dataset,
            sorted; int64, shape (N,).
        given: The labels of the whole training set of the dataset; int64.
    """

    train: ImageSet
    evaluated: ImageSet
    augment: Augment
    weak: WeakLabels | None
    index: npt.NDArray[np.int64]
    given: npt.NDArray[np.int64]


def load_data(recipe: Recipe, images_digest: str | None = None) -> Data:
    """Load the data that a recipe names.

    Args:
        recipe: The recipe.
        images_digest: The ``images_digest`` with which the run began; None for a new run.

    Raises:
        InputError: The data or the file with their labels are missing or damaged, have too few
            samples for the validation part and the training part, do not fit the label noise, or
            have other image files than when the run began.
    """
    if ":" in recipe.data.name:
        return _own_data(recipe)
    if recipe.data.name == "images":
        return _image_files(recipe, images_digest)
    return device_data(recipe, load_images(recipe))


def load_images(recipe: Recipe) -> LoadedImages:
    """Load the images of a recipe with built-in data that fit into memory.

    The errors are those of ``load_data``.
    """
    settings = recipe.data
    if settings.name == "digits":
        assert settings.train_size is not None
        train, test = load_digits(settings.train_size)
        default = Augment(padding=2, flip=False)  # A mirrored digit is not a valid digit.
    elif settings.name == "synthetic":
        assert settings.train_size is not None
        assert settings.image_size is not None
        train, test = make_synthetic(
            settings.train_size, size=settings.image_size, classes=recipe.network.classes or 10
        )
        default = Augment(padding=4, flip=True)
    else:
        load = load_cifar10 if settings.name == "cifar10" else load_cifar100
        train, test = load(Path(settings.dir), download=settings.download)
        default = Augment(padding=4, flip=True)
    padding = default.padding if settings.crop_padding is None else settings.crop_padding
    flip = default.flip if settings.flip is None else settings.flip
    kept, held_out = _split(len(train), settings.validation)
    kept = kept[: settings.limited(len(kept))]
    evaluated = train.subset(torch.from_numpy(held_out)) if settings.validation else test
    given = train.labels.numpy()
    weak = weak_labels(settings, given, train.classes, kept)
    if weak is not None:
        kept = weak.index
        train = replace(train.subset(torch.from_numpy(kept)), labels=torch.from_numpy(weak.labels))
    elif len(kept) < len(train):
        train = train.subset(torch.from_numpy(kept))
    augment = Augment(padding=padding, flip=flip)
    return LoadedImages(train, evaluated, augment, weak, kept, given)


def device_data(recipe: Recipe, loaded: LoadedImages) -> Data:
    """Return the data of a recipe from its images; what it trains on is put on its device."""
    train, augment, weak = loaded.train, loaded.augment, loaded.weak
    mean, std = channel_statistics(train.images)
    device = recipe.run.device
    watched = _watched(recipe, len(train))

    def make_loader(pruner: Pruner) -> DeviceLoader:
        _check_batches(recipe, pruner)
        return DeviceLoader(
            train,
            recipe.training.batch_size,
            sampler=pruner.sampler,
            seed=recipe.run.seed,
            device=device,
            augment=augment,
            mean=mean,
            std=std,
            drop_last=recipe.training.drop_last,
        )

    def make_fetch() -> Fetch:
        seed = recipe.run.seed
        images = DeviceImages(train, seed=seed, device=device, augment=augment, mean=mean, std=std)
        return images.fetch

    prepare = functools.partial(
        evaluation_batches,
        batch_size=_evaluation_batch(device),
        device=device,
        mean=mean,
        std=std,
    )
    samples = train.subset(torch.tensor(watched, dtype=torch.int64))
    return Data(
        train=len(train),
        make_loader=make_loader,
        make_fetch=make_fetch,
        evaluation=prepare(loaded.evaluated),
        evaluated_on="validation" if recipe.data.validation else "test",
        watched=(watched, prepare(samples) if watched else ()),
        num_samples=len(train),
        labels=lambda: train.labels,
        classes=number_of_classes(train, recipe.data.name, recipe.network.classes),
        channels=train.images.shape[1],
        blank=torch.zeros(1, *train.images.shape[1:]),
        wrong=None if weak is None else weak.wrong,
        labels_digest=None if weak is None else weak.digest,
    )


def _own_data(recipe: Recipe) -> Data:
    """Load user-defined datasets, which are read through a ``DataLoader``."""
    settings, run = recipe.data, recipe.run
    train, test, plain = load_own(settings.name, needs_plain=settings.validation > 0)
    classes = number_of_classes(train, settings.name, recipe.network.classes)
    evaluated = test
    if settings.validation:
        kept, held_out = _split(len(train), settings.validation)
        train, plain, evaluated = subset(train, kept), subset(plain, kept), subset(plain, held_out)
    watched = _watched(recipe, len(train))
    size = _evaluation_batch(run.device)
    blank = _blank(settings.name, PlainSamples(plain)[0])

    def make_loader(pruner: Pruner) -> Any:
        _check_batches(recipe, pruner)
        return training_loader(
            train,
            pruner.sampler,
            seed=run.seed,
            batch_size=recipe.training.batch_size,
            drop_last=recipe.training.drop_last,
            workers=settings.workers,
            pin_memory=run.device.startswith("cuda"),
        )

    def make_fetch() -> Fetch:
        load = SampleFetcher(train, run.seed, settings.workers)

        def fetch(index: torch.Tensor, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = load(index, epoch)
            return x.to(run.device), y.to(run.device)

        return fetch

    return Data(
        train=train,
        make_loader=make_loader,
        make_fetch=make_fetch,
        # In this process, transforms draw from the same generators as a step.
        fetch_overlaps=settings.workers > 0,
        evaluation=evaluation_loader(evaluated, size),
        evaluated_on="validation" if settings.validation else "test",
        watched=(watched, evaluation_loader(plain, size, watched) if watched else ()),
        num_samples=len(train),
        labels=functools.partial(labels_of, train, settings.name),
        classes=classes,
        channels=blank.shape[1],
        blank=blank,
    )


def _image_files(recipe: Recipe, digest: str | None) -> Data:
    """Load the indexes of image files, which are read while they are needed."""
    settings, run = recipe.data, recipe.run
    check_decoder()
    # The settings replace None by their defaults.
    assert settings.train is not None
    assert settings.image_size is not None
    assert settings.crop is not None
    assert settings.resize is not None
    assert settings.broken_limit is not None
    limit = settings.broken_limit
    index = load_index(Path(settings.train), digest)
    classes = number_of_classes(index, settings.train, recipe.network.classes)
    labels, kept, held_out, weak = _chosen(settings, index)
    centre = View(settings.image_size, settings.resize)
    view = replace(centre, crop=settings.crop, flip=settings.flip is not False, seed=run.seed)
    train, plain = (ImageFiles(index, labels, seen, kept) for seen in (view, centre))
    if held_out is not None:
        evaluated = ImageFiles(index, index.labels[held_out], centre, held_out)
    else:
        assert settings.test is not None
        test, source = load_index(Path(settings.test)), Path(settings.test)
        evaluated = ImageFiles(test, test.numbered(index.classes, source), centre)
    broken = BrokenFiles(len(train), limit)
    watched = _watched(recipe, len(train))
    options: dict[str, Any] = {"batch_size": recipe.training.batch_size, "device": run.device}

    def make_loader(pruner: Pruner) -> ImageLoader:
        _check_batches(recipe, pruner)
        return ImageLoader(
            train,
            EpochIndices(pruner.sampler),
            workers=settings.workers,
            broken=broken,
            drop_last=recipe.training.drop_last,
            **options,
        )

    def make_fetch() -> Fetch:
        return ImageFetcher(train, device=run.device, threads=settings.workers, broken=broken)

    return Data(
        train=len(train),
        make_loader=make_loader,
        make_fetch=make_fetch,
        evaluation=EvaluationImages(
            evaluated,
            None,
            workers=settings.workers,
            broken=BrokenFiles(len(evaluated), limit),
            **options,
        ),
        evaluated_on="test" if held_out is None else "validation",
        watched=(
            watched,
            EvaluationImages(plain, watched, workers=0, broken=broken, replace=True, **options),
        ),
        num_samples=len(train),
        # A copy, because torch warns of arrays that cannot be written, such as a mapped file.
        labels=lambda: np.array(labels),
        classes=classes,
        channels=3,
        blank=torch.zeros(1, 3, settings.image_size, settings.image_size),
        wrong=None if weak is None else weak.wrong,
        labels_digest=_digest(index.digest, weak),
        images_digest=index.digest,
    )


def _chosen(
    settings: DataSettings, index: ImageIndex
) -> tuple[
    npt.NDArray[np.integer],
    npt.NDArray[np.int64] | None,
    npt.NDArray[np.int64] | None,
    WeakLabels | None,
]:
    """Choose the images to train on and to hold out.

    Returns:
        The labels to train with, shape (M,); the images to train on, sorted, int64, shape (M,), or
        None for all of them; those held out for validation, or None; and where the labels come
        from, as ``weak_labels`` returns it.
    """
    kept, held_out = None, None
    if settings.validation:
        kept, held_out = _split(len(index), settings.validation)
    available = len(index) if kept is None else len(kept)
    limit = settings.limited(available)
    if limit < available:
        # Not the first ones, because an index may be in the order of the classes.
        order = stream(_FIXED_SEED, 0, "train_size").permutation(available)
        chosen = np.sort(order[:limit])
        kept = chosen if kept is None else kept[chosen]
    if settings.labels is None and settings.label_noise is None:
        labels = index.labels if kept is None else index.labels[kept]
        return labels, kept, held_out, None
    whole = np.arange(len(index)) if kept is None else kept
    weak = weak_labels(settings, index.labels, index.classes, whole)
    assert weak is not None
    return weak.labels, weak.index, held_out, weak


def _digest(images: str, weak: WeakLabels | None) -> str:
    """Return a digest of image files and of the labels to train on."""
    if weak is None or weak.digest is None:
        return images
    return hashlib.sha256(f"{images} {weak.digest}".encode()).hexdigest()


def _blank(name: str, item: Any) -> torch.Tensor:
    """Return zeros with the shape and dtype of the ``x`` of a sample, plus a batch dimension."""
    if isinstance(item, tuple | list) and len(item) == 2:
        x = default_collate([item])[0]
        if isinstance(x, torch.Tensor) and x.ndim > 1:
            return torch.zeros_like(x)
    raise InputError(
        f"expected items (x, y) with x of shape (channels, ...) from {name!r}, got {type(item)}"
    )


def _check_batches(recipe: Recipe, pruner: Pruner) -> None:
    """Raise InputError if every batch of an epoch would be dropped as incomplete."""
    samples, size = len(pruner.sampler), recipe.training.batch_size
    if recipe.training.drop_last and samples < size:
        raise InputError(
            f"expected training.batch_size of at most {samples}, the samples of each process, with "
            f"training.drop_last, got {size}: every batch would be dropped"
        )


def _evaluation_batch(device: str) -> int:
    return _EVALUATION_BATCH.get(device.partition(":")[0], 500)


def _split(num_samples: int, validation: int) -> tuple[Any, Any]:
    """Return the indices of the samples to train on, and of those held out for validation."""
    if validation >= num_samples:
        raise InputError(
            f"expected data.validation to be below {num_samples}, the number of training samples, "
            f"got {validation}"
        )
    order = stream(_FIXED_SEED, 0, "validation").permutation(num_samples)
    return np.sort(order[validation:]), np.sort(order[:validation])


def _watched(recipe: Recipe, num_samples: int) -> list[int]:
    size = min(recipe.run.watch, num_samples)
    chosen = stream(_FIXED_SEED, 0, "watch").choice(num_samples, size=size, replace=False)
    return sorted(int(index) for index in chosen)
