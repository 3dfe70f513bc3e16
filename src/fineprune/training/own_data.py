"""Data sets of the user's own: read by a ``DataLoader``, and repeatable sample by sample.

What a transform draws at random depends on the run's seed, the epoch and the sample's index alone.
So the number of loader workers, the number of ranks and a resume change nothing, and evaluation
takes no random number from the training.
"""

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, default_collate

from fineprune.errors import InputError
from fineprune.importing import import_attribute
from fineprune.pruning.sampler import PruningSampler

# Enough samples to notice a random transform.
_TRIED = 4


class SeededSamples(Dataset[tuple[int, Any]]):
    """The samples of a map-style data set, with the random numbers of one (seed, epoch, index).

    The key of an item is ``(epoch, index)``, and the item is ``(index, sample)``.

    Args:
        dataset: The user's data set.
        seed: Seeds the random transforms.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, Any]:
        epoch, index = key
        with _random_numbers(self._seed, epoch, index):
            return index, self.dataset[index]


class EpochIndices(Sampler[tuple[int, int]]):
    """A sampler's indices, each with the epoch that it is drawn for.

    Args:
        sampler: The pruner's sampler.
    """

    def __init__(self, sampler: PruningSampler) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch = self._sampler.epoch
        return ((epoch, index) for index in self._sampler)


class PlainSamples(Dataset[Any]):
    """Samples of a data set that are the same whenever they are read, for evaluation.

    Args:
        dataset: The user's data set.
        indices: The samples to read; None for all.
    """

    def __init__(self, dataset: Any, indices: Sequence[int] | None = None) -> None:
        self._samples = SeededSamples(dataset, seed=0)
        self._indices = range(len(dataset)) if indices is None else indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, place: int) -> Any:
        return self._samples[0, int(self._indices[place])][1]


def load_own(name: str, needs_plain: bool) -> tuple[Any, Any, Any]:
    """Call the user's function ``module:function`` for its data sets.

    Args:
        name: The function. It returns a training and a test set, and may return a third: the
            training samples, in the same order, without random transforms.
        needs_plain: Whether training samples will be evaluated on.

    Returns:
        The training set, the test set, and the training set to evaluate on.

    Raises:
        InputError: The function returns something else, or random transforms would be evaluated.
    """
    function = import_attribute(name)
    if not callable(function):
        raise InputError(f"expected {name!r} to be a function, got {type(function).__name__}")
    returned = function()
    if not isinstance(returned, tuple | list) or len(returned) not in (2, 3):
        raise InputError(
            f"expected {name} to return (train, test) or (train, test, plain), got "
            f"{type(returned).__name__}"
        )
    for dataset in returned:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise InputError(
                f"expected map-style data sets, with __len__ and __getitem__, from {name!r}, got "
                f"{type(dataset).__name__}"
            )
        if not len(dataset):
            raise InputError(f"expected data sets with samples from {name!r}, got an empty one")
    train, test, *rest = returned
    plain = rest[0] if rest else train
    if len(plain) != len(train):
        raise InputError(
            f"expected {name} to return the same {len(train)} training samples once more without "
            f"random transforms, got {len(plain)}"
        )
    if needs_plain and _is_random(plain):
        raise InputError(
            f"expected {name} to return (train, test, plain) with data.validation, got a training "
            f"set with random transforms only: return the training samples without them as a third"
        )
    return train, test, plain


def number_of_classes(train: Any, name: str, given: int | None) -> int:
    """Return the number of classes that a recipe or the training set names.

    Raises:
        InputError: Neither does, or the recipe names fewer than the training set.
    """
    named = len(getattr(train, "classes", ()))
    if given is not None and given < named:
        raise InputError(
            f"expected network.classes to be at least {named}, the classes of {name}, got {given}"
        )
    classes = given or named
    if not classes:
        raise InputError(
            f"expected network.classes for {name}, whose training set has no attribute classes: "
            f"add --set network.classes=..."
        )
    return classes


def training_loader(
    dataset: Any,
    sampler: PruningSampler,
    *,
    seed: int,
    batch_size: int,
    drop_last: bool,
    workers: int,
    pin_memory: bool,
) -> Any:
    """Return a ``DataLoader`` of ``(index, (x, y))`` in the sampler's order."""
    return DataLoader(
        SeededSamples(dataset, seed),
        batch_size=batch_size,
        sampler=EpochIndices(sampler),
        drop_last=drop_last,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=pin_memory,
        # By default, an epoch would draw its workers' seeds from torch's random state.
        generator=torch.Generator(),
    )


def fetch(dataset: Any, seed: int, index: torch.Tensor, epoch: int) -> Any:
    """Return one collated batch ``(x, y)`` of given samples.

    Args:
        dataset: The user's training set.
        seed: Seeds the random transforms.
        index: The samples; int64, shape (B,).
        epoch: The epoch, from 0.
    """
    samples = SeededSamples(dataset, seed)
    return default_collate([samples[epoch, i][1] for i in index.tolist()])


def evaluation_loader(dataset: Any, batch_size: int, indices: Sequence[int] | None = None) -> Any:
    """Return batches ``(x, y)`` to evaluate on, the same whenever they are read."""
    plain = PlainSamples(dataset, indices)
    return DataLoader(plain, batch_size=batch_size, generator=torch.Generator())


def subset(dataset: Any, indices: Any) -> Any:
    """Return the samples of a data set at an array of indices."""
    return Subset(dataset, indices.tolist())


@contextlib.contextmanager
def _random_numbers(seed: int, epoch: int, index: int) -> Iterator[None]:
    """Seed the global generators that transforms draw from, and restore them afterwards."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    own = int(np.random.SeedSequence([seed, epoch, index]).generate_state(1)[0])
    torch.default_generator.manual_seed(own)
    np.random.seed(own)  # noqa: NPY002
    random.seed(own)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])


def _is_random(dataset: Any) -> bool:
    samples = [SeededSamples(dataset, seed) for seed in (0, 1)]
    return not all(
        _equal(samples[0][0, index], samples[1][0, index])
        for index in range(min(_TRIED, len(dataset)))
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return bool(np.all(np.asarray(one) == np.asarray(other)))
