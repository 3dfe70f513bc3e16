"""User-defined datasets, which are read by a ``DataLoader`` and are reproducible for each sample.

The random numbers that a transform draws depend only on the run's seed, the epoch and the index of
the sample. They are therefore the same with any number of loader workers or ranks and after a
resume, and evaluation does not change the random numbers of the training.
"""

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, default_collate

from fineprune.datasets.loader_process import LoaderPool, TrainingLoader
from fineprune.errors import InputError
from fineprune.importing import import_attribute
from fineprune.pruning.sampler import PruningSampler

# The number of samples that are read twice to detect random transforms.
_COMPARED_SAMPLES = 4


class SeededSamples(Dataset[tuple[int, Any]]):
    """The samples of a map-style dataset, whose random transforms are seeded for each sample.

    A key is a pair ``(epoch, index)``, and an item is a pair ``(index, sample)``.

    Args:
        dataset: The user's dataset.
        seed: Seeds the random transforms, together with the epoch and the index.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, Any]:
        epoch, index = key
        with _seeded_generators(self._seed, epoch, index):
            return index, self.dataset[index]


class EpochIndices(Sampler[tuple[int, int]]):
    """Yields the indices of a sampler as pairs ``(epoch, index)``.

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
    """Samples of a dataset for evaluation, which are the same every time they are read.

    Args:
        dataset: The user's dataset.
        indices: The indices of the samples to read; None for all samples.
    """

    def __init__(self, dataset: Any, indices: Sequence[int] | None = None) -> None:
        self._samples = SeededSamples(dataset, seed=0)
        self._indices = range(len(dataset)) if indices is None else indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, position: int) -> Any:
        return self._samples[0, int(self._indices[position])][1]


def load_own(name: str, needs_plain: bool) -> tuple[Any, Any, Any]:
    """Call the user's function, and check the datasets that it returns.

    Args:
        name: The name of the function, as ``module:function``. The function returns a training set
            and a test set, and may return a third dataset: the training samples in the same order,
            without random transforms.
        needs_plain: Whether samples without random transforms are needed for validation.

    Returns:
        The training set, the test set, and the training samples to use for evaluation.

    Raises:
        InputError: The function returns something else, or returns no samples without random
            transforms although they are needed.
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
                f"expected map-style datasets, with __len__ and __getitem__, from {name!r}, got "
                f"{type(dataset).__name__}"
            )
        if not len(dataset):
            raise InputError(f"expected datasets with samples from {name!r}, got an empty one")
    train, test, *rest = returned
    plain = rest[0] if rest else train
    if len(plain) != len(train):
        raise InputError(
            f"expected the third dataset from {name} to hold the same {len(train)} training "
            f"samples, without random transforms, got {len(plain)} samples"
        )
    if needs_plain and _is_random(plain):
        raise InputError(
            f"expected {name} to return (train, test, plain) with data.validation, got training "
            f"samples with random transforms only: also return them without random transforms"
        )
    return train, test, plain


def number_of_classes(train: Any, name: str, given: int | None) -> int:
    """Return the number of classes, from the recipe or else from the training set.

    Args:
        train: The training set. Its attribute ``classes``, if it has one, lists the classes.
        name: The name of the user's function, for the error message.
        given: The recipe's number of classes; None if the recipe does not set it.

    Raises:
        InputError: Neither the recipe nor the training set gives the classes, or the recipe gives
            fewer classes than the training set.
    """
    listed = len(getattr(train, "classes", ()))
    if given is not None and given < listed:
        raise InputError(
            f"expected network.classes to be at least {listed}, the classes of {name}, got {given}"
        )
    classes = given or listed
    if not classes:
        raise InputError(
            f"expected network.classes for {name}, whose training set has no attribute classes: "
            f"add --set network.classes=..."
        )
    return classes


def labels_of(train: Any, name: str) -> Any:
    """Return the class of each training sample, without reading the samples.

    Args:
        train: The training set. Its attribute ``targets`` or ``labels`` holds the classes, as in
            the datasets of torchvision. A ``Subset`` has those of the set that it comes from.
        name: The name of the user's function, for the error message.

    Raises:
        InputError: The training set has no such attribute.
    """
    if isinstance(train, Subset):
        return np.asarray(labels_of(train.dataset, name))[np.asarray(train.indices)]
    for attribute in ("targets", "labels"):
        if hasattr(train, attribute):
            return getattr(train, attribute)
    raise InputError(
        f"expected the training set of {name} to have an attribute targets or labels, since "
        f"keep_per_class needs the class of each sample, got none: add one, or set "
        f"pruning.keep_per_class to 0"
    )


class SampleLoader(TrainingLoader):
    """A ``DataLoader`` over ``SeededSamples`` that also yields any other samples of them."""

    def batches(self, index: torch.Tensor, epoch: int, batch_size: int) -> Any:
        """Return batches ``(index, (x, y))`` of given samples, transformed as in an epoch.

        Args:
            index: The indices of the samples in their order; int64, shape (n,).
            epoch: The epoch, counted from 0, that seeds the random transforms.
            batch_size: The number of samples per batch.
        """
        return TrainingLoader(
            self.dataset,
            batch_size=batch_size,
            sampler=[(epoch, i) for i in index.tolist()],
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),
        )


def training_loader(
    dataset: Any,
    sampler: PruningSampler,
    *,
    seed: int,
    batch_size: int,
    drop_last: bool,
    workers: int,
    pin_memory: bool,
) -> SampleLoader:
    """Return a loader that yields ``(index, (x, y))`` in the order of the sampler."""
    return SampleLoader(
        SeededSamples(dataset, seed),
        batch_size=batch_size,
        sampler=EpochIndices(sampler),
        drop_last=drop_last,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=pin_memory,
        # By default, the loader draws a seed for its workers from torch's global generator.
        generator=torch.Generator(),
    )


class SampleFetcher:
    """Loads any batch of a user's dataset, for workers of parameter servers.

    Args:
        dataset: The user's training set.
        seed: Seeds the random transforms, together with the epoch and the index.
        workers: The number of loader processes; with 0, this process loads.
    """

    def __init__(self, dataset: Any, seed: int, workers: int) -> None:
        self._samples = SeededSamples(dataset, seed)
        self._workers = workers
        self._pool = LoaderPool(workers, self._load) if workers else None

    def __call__(self, index: torch.Tensor, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the collated batch ``(x, y)`` of the given samples.

        Args:
            index: The indices of the samples; int64, shape (B,).
            epoch: The epoch, counted from 0.
        """
        keys = [(epoch, i) for i in index.tolist()]
        if self._pool is None:
            x, y = self._load(keys)
            return x, y
        size = -(-len(keys) // self._workers)
        parts = self._pool.map(keys[first : first + size] for first in range(0, len(keys), size))
        x, y = map(torch.cat, zip(*parts, strict=True))
        return x, y

    def _load(self, keys: Sequence[tuple[int, int]]) -> Any:
        return default_collate([self._samples[key][1] for key in keys])


def evaluation_loader(dataset: Any, batch_size: int, indices: Sequence[int] | None = None) -> Any:
    """Return a loader of batches ``(x, y)`` for evaluation, which are the same in every pass."""
    plain = PlainSamples(dataset, indices)
    return DataLoader(plain, batch_size=batch_size, generator=torch.Generator())


def subset(dataset: Any, indices: Any) -> Any:
    """Return the samples of a dataset at the given indices (an array of integers)."""
    return Subset(dataset, indices.tolist())


@contextlib.contextmanager
def _seeded_generators(seed: int, epoch: int, index: int) -> Iterator[None]:
    """Seed the global generators that transforms draw from, and restore them afterwards."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    sample_seed = int(np.random.SeedSequence([seed, epoch, index]).generate_state(1)[0])
    torch.default_generator.manual_seed(sample_seed)
    np.random.seed(sample_seed)  # noqa: NPY002
    random.seed(sample_seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])


def _is_random(dataset: Any) -> bool:
    """Return whether the first samples change with the seed."""
    samples = [SeededSamples(dataset, seed) for seed in (0, 1)]
    return not all(
        _equal(samples[0][0, index], samples[1][0, index])
        for index in range(min(_COMPARED_SAMPLES, len(dataset)))
    )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return bool(np.all(np.asarray(a) == np.asarray(b)))
