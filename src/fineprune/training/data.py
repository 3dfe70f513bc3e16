"""From a recipe's data section to what the loop needs: a training loader and evaluation batches."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, default_collate

from fineprune.datasets.augment import Augment
from fineprune.datasets.cifar import load_cifar10, load_cifar100
from fineprune.datasets.device_loader import DeviceImages, DeviceLoader, evaluation_batches
from fineprune.datasets.digits import load_digits
from fineprune.datasets.image_set import ImageSet, channel_statistics
from fineprune.datasets.synthetic import make_synthetic
from fineprune.errors import InputError
from fineprune.importing import import_attribute
from fineprune.pruning.pruner import Pruner
from fineprune.pruning.random_streams import stream
from fineprune.training.recipe import Recipe

# Larger batches than in training cost memory, not time: nothing is kept for a backward pass. On a
# CPU the batch's features had better stay in the cache. Both divide the test set of CIFAR.
_EVALUATION_BATCH = {"cpu": 500, "cuda": 2000}

# The held-back part and the watched samples are the same for every seed, so that runs compare.
_FIXED = 0

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]
Fetch = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Data:
    """What a run trains and evaluates on.

    Attributes:
        train: the training data set, or its number of samples where the loader needs no more.
        make_loader: makes the loader of ``(index, (x, y))`` from a pruner.
        make_fetch: makes a function that returns one batch ``(x, y)`` of given indices (int64,
            shape (B,)) in an epoch: for workers that are told their batches one by one.
        evaluation: batches ``(x, y)`` to evaluate on, to be iterated again and again.
        evaluated_on: ``test`` or ``validation``.
        watched: indices of watched training samples, and batches of them, in their order.
        num_samples: N, the number of training samples.
        classes, channels: of the network to build.
        blank: zeros like the x of one sample, shape (1, ...), to try the network on.
    """

    train: Any
    make_loader: Callable[[Pruner], Any]
    make_fetch: Callable[[], Fetch]
    evaluation: Batches
    evaluated_on: str
    watched: tuple[list[int], Batches]
    num_samples: int
    classes: int
    channels: int
    blank: torch.Tensor


def load_data(recipe: Recipe) -> Data:
    """Load the data that a recipe names.

    Raises:
        InputError: the data are not there or not as they should be.
    """
    if ":" in recipe.data.name:
        return _own_data(recipe)
    settings = recipe.data
    if settings.name == "digits":
        train, test = load_digits(settings.train_size)
        usual = Augment(padding=2, flip=False)  # a mirrored digit is another sign
    elif settings.name == "synthetic":
        train, test = make_synthetic(
            settings.train_size, size=settings.image_size, classes=recipe.network.classes or 10
        )
        usual = Augment(padding=4, flip=True)
    else:
        load = load_cifar10 if settings.name == "cifar10" else load_cifar100
        train, test = load(Path(settings.dir), download=settings.download)
        usual = Augment(padding=4, flip=True)
    padding = usual.padding if settings.crop_padding is None else settings.crop_padding
    flip = usual.flip if settings.flip is None else settings.flip
    kept, held = _split(len(train), settings.validation)
    evaluated = train.subset(torch.from_numpy(held)) if settings.validation else test
    train = train.subset(torch.from_numpy(kept)) if settings.validation else train
    return _device_data(recipe, train, evaluated, Augment(padding=padding, flip=flip))


def _device_data(recipe: Recipe, train: ImageSet, evaluated: ImageSet, augment: Augment) -> Data:
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
        evaluation=prepare(evaluated),
        evaluated_on="validation" if recipe.data.validation else "test",
        watched=(watched, prepare(samples) if watched else ()),
        num_samples=len(train),
        classes=_classes(recipe, len(train.classes)),
        channels=train.images.shape[1],
        blank=torch.zeros(1, *train.images.shape[1:]),
    )


def _own_data(recipe: Recipe) -> Data:
    """Data sets of the user's own, through a DataLoader."""
    train, test = _made(recipe.data.name)
    classes = _classes(recipe, len(getattr(train, "classes", ())))
    kept, held = _split(len(train), recipe.data.validation)
    evaluated = Subset(train, held.tolist()) if recipe.data.validation else test
    train = Subset(train, kept.tolist()) if recipe.data.validation else train
    watched = _watched(recipe, len(train))
    workers = recipe.data.workers
    blank = _blank(recipe.data.name, train)

    def make_loader(pruner: Pruner) -> Any:
        _check_batches(recipe, pruner)
        return DataLoader(
            pruner.dataset,  # type: ignore[arg-type]  # given below, so never None
            batch_size=recipe.training.batch_size,
            sampler=pruner.sampler,
            drop_last=recipe.training.drop_last,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=recipe.run.device.startswith("cuda"),
            # A generator of its own: by default each epoch would draw from torch's random state,
            # differently after a resume.
            generator=torch.Generator().manual_seed(recipe.run.seed),
        )

    def fetch(index: torch.Tensor, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = default_collate([train[int(i)] for i in index])
        return x.to(recipe.run.device), y.to(recipe.run.device)

    def batches(dataset: Any) -> Batches:
        size = _evaluation_batch(recipe.run.device)
        return DataLoader(dataset, batch_size=size, generator=torch.Generator())

    return Data(
        train=train,
        make_loader=make_loader,
        make_fetch=lambda: fetch,
        evaluation=batches(evaluated),
        evaluated_on="validation" if recipe.data.validation else "test",
        watched=(watched, batches(Subset(train, watched)) if watched else ()),
        num_samples=len(train),
        classes=classes,
        channels=blank.shape[1],
        blank=blank,
    )


def _made(name: str) -> tuple[Any, Any]:
    """Call the user's function, and check that it returns two data sets.

    Raises:
        InputError: It returns something else. What the function itself raises is passed on.
    """
    make = import_attribute(name)
    if not callable(make):
        raise InputError(f"expected {name!r} to be a function, got {type(make).__name__}")
    made = make()
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise InputError(
            f"expected {name!r} to return a training and a test data set, got {type(made).__name__}"
        )
    for dataset in made:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise InputError(
                f"expected map-style data sets, with __len__ and __getitem__, from {name!r}, got "
                f"{type(dataset).__name__}"
            )
        if not len(dataset):
            raise InputError(f"expected data sets with samples from {name!r}, got an empty one")
    return made[0], made[1]


def _blank(name: str, train: Any) -> torch.Tensor:
    """Return zeros like the x of one sample, with a dimension for the batch."""
    item = train[0]
    if isinstance(item, tuple | list) and len(item) == 2:
        x = default_collate([item])[0]
        if isinstance(x, torch.Tensor) and x.ndim > 1:
            return torch.zeros_like(x)
    raise InputError(
        f"expected items (x, y) with x of shape (channels, ...) from {name!r}, got {type(item)}"
    )


def _classes(recipe: Recipe, named: int) -> int:
    """Return the number of classes: as the recipe sets it, else as many as the data name."""
    classes = recipe.network.classes
    if classes is None and not named:
        raise InputError(
            f"expected network.classes for {recipe.data.name}, whose training set has no "
            f"attribute classes: add --set network.classes=..."
        )
    if classes is not None and classes < named:
        raise InputError(
            f"expected network.classes to be at least {named}, the classes of "
            f"{recipe.data.name}, got {classes}"
        )
    return classes or named


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


def _split(number: int, validation: int) -> tuple[Any, Any]:
    if validation >= number:
        raise InputError(
            f"expected data.validation to leave training images of {number}, got {validation}"
        )
    order = stream(_FIXED, 0, "validation").permutation(number)
    return np.sort(order[validation:]), np.sort(order[:validation])


def _watched(recipe: Recipe, number: int) -> list[int]:
    wanted = min(recipe.run.watch, number)
    chosen = stream(_FIXED, 0, "watch").choice(number, size=wanted, replace=False)
    return sorted(int(index) for index in chosen)
