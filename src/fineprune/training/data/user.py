"""User-defined datasets: what the function that a recipe names returns, checked and read.

The random numbers that a transform draws depend only on the run's seed, the epoch and the index of
the sample. They are therefore the same with any number of loader workers or ranks and after a
resume, and evaluation does not change the random numbers of the training.
"""

import functools
import hashlib
import operator
import random
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from fineprune.errors import InputError, first_line, shown
from fineprune.importing import call_attribute, imported
from fineprune.labels.dataset_attributes import keys_of, labels_of, own_names, same_random_numbers
from fineprune.runs.training_set import UNKNOWN
from fineprune.training.data.loaded import Keys, Loaded, LoadedSource
from fineprune.training.data.source import evaluation_batch
from fineprune.training.recipe import Recipe

# The number of samples that are read twice to detect random transforms, and for the fingerprint.
_READ = 8

_KEY, _SEED = struct.Struct("<QQQ"), struct.Struct("<I")


@dataclass(frozen=True, eq=False, kw_only=True)
class UserSource(LoadedSource):
    """A ``Source`` of the samples of a user's map-style dataset, with items ``(x, y)``.

    Each sample is checked when it is read: its label is a class or a vector of the classes'
    probabilities, and it has the shape of the first one that was read. Otherwise, a batch would
    fail with a message that names no sample.

    Attributes:
        dataset: The user's dataset.
        unchanged: The same samples without random transforms, for evaluation.
        which: ``training`` or ``test``.
        seed: The seed of the run.
        num_classes: The number of classes.
    """

    dataset: Any
    unchanged: Any
    which: str
    seed: int
    num_classes: int
    _shape: list[Any] = field(default_factory=list)

    @property
    def _kind(self) -> str:
        return f"the {self.which} set of {self.place}"

    def keys(self) -> tuple[str, ...] | None:
        """Return what names each sample, if the dataset says it."""
        keys = keys_of(self.dataset)
        if keys is None:
            return None
        if not len(set(keys)) == len(keys) == len(self.dataset):
            raise InputError(
                f"expected a unique key for each of the {len(self.dataset)} samples in the "
                f"attribute keys of {self._kind}, got {len(keys)} keys, {len(set(keys))} of them "
                f"different"
            )
        return tuple(keys[item] for item in self.index)

    def blank(self) -> Tensor:
        """Return zeros with the shape and dtype of the ``x`` of the first sample."""
        x = self._first()[0]
        batch = default_collate([x])
        if not isinstance(batch, Tensor) or batch.ndim < 2:
            raise InputError(
                f"expected items (x, y) with x of shape (channels, ...) from {self.place!r}, got "
                f"{type(x)}"
            )
        return torch.zeros_like(batch)

    def fingerprint(self) -> str:
        """Return a digest of the number of samples, of their labels and of some samples.

        Samples with random transforms are left out, because a transform may have a generator of its
        own.
        """
        chosen = np.linspace(0, len(self.dataset) - 1, min(_READ, len(self.dataset))).astype(int)
        labels = labels_of(self.dataset)
        known = None if labels is None else hashlib.sha256(labels.data).hexdigest()
        outline = _outline(_constant(self.dataset, chosen.tolist()))
        return hashlib.sha256(repr((len(self.dataset), known, outline)).encode()).hexdigest()

    def plain(self, train: "UserSource") -> "UserSource":
        """Return the samples without random transforms, after looking at the first one."""
        plain = replace(super().plain(train), dataset=self.unchanged)
        if shape := tuple(np.shape(plain._first()[1])):
            raise InputError(
                f"expected one class for each sample that is evaluated, got {shape} values: "
                f"evaluate on samples whose y is a class, not probabilities"
            )
        first, blank = plain.blank(), train.blank()
        if (first.shape, first.dtype) != (blank.shape, blank.dtype):
            raise InputError(
                f"expected samples of {self.place} to evaluate on with the shape "
                f"{tuple(blank.shape[1:])} and dtype {blank.dtype} of those to train on, got "
                f"{tuple(first.shape[1:])} and {first.dtype}"
            )
        return plain

    def show(self, sample: int) -> Any:
        """Return an item of the user's dataset without random transforms."""
        return self.unchanged[int(self.index[sample])]

    def __getitems__(self, keys: Keys) -> Loaded:
        """Read a batch with the random numbers of each sample, and restore the generators."""
        seed = 0 if self.evaluated else self.seed
        with same_random_numbers():
            items = []
            for epoch, sample in keys:
                seed_generators(seed, epoch, sample)
                items.append(self._checked(sample))
        x, y = default_collate(items)
        return Loaded(torch.tensor([sample for _, sample in keys]), x, y)

    def _first(self) -> Any:
        """Return the first sample as in an evaluation."""
        with same_random_numbers():
            seed_generators(0)
            return self._checked(0)

    def _checked(self, sample: int) -> Any:
        item = int(self.index[sample])
        read = self.dataset[item]
        if not isinstance(read, tuple | list) or len(read) != 2:
            raise InputError(
                f"expected items (x, y) from {self._kind}, got {type(read).__name__} for sample "
                f"{item}"
            )
        x, y = read
        shape = tuple(x.shape) if hasattr(x, "shape") else None  # ``blank`` refuses the latter.
        if not self._shape:
            self._shape.append(shape)
        if shape != self._shape[0]:
            raise InputError(
                f"expected samples of one shape from {self._kind}, got {self._shape[0]} and, for "
                f"sample {item}, {shape}: crop, resize or pad them in the dataset"
            )
        if self.relabelled and self.labels is not None:
            return x, int(self.labels[sample])
        if np.shape(y) == (self.num_classes,) and np.asarray(y).dtype.kind == "f":
            return x, y
        try:
            label = operator.index(y)
        except TypeError:
            label = -1
        if not 0 <= label < self.num_classes:
            raise InputError(
                f"expected a class from 0 to {self.num_classes - 1} as y of each item (x, y) from "
                f"{self._kind}, got {shown(first_line(y))} for sample {item}: correct it, or set "
                f"network.classes"
            )
        return x, label


def open_user(recipe: Recipe) -> tuple[UserSource, UserSource]:
    """Call the user's function, and return its training and test set, after checking both."""
    settings, device, workers = recipe.data, recipe.run.device, recipe.data.workers
    train, test, plain = _returned(settings.name)
    if settings.validation and _constant(plain, range(min(_READ, len(plain)))) is None:
        raise InputError(
            f"expected {settings.name} to return (train, test, plain) with data.validation, got "
            f"training samples with random transforms only: also return them without random "
            f"transforms"
        )
    named, others = own_names(train), own_names(test)
    if named and others and not settings.validation:
        for number in sorted({*named, *others}):
            ours, theirs = named.get(number), others.get(number)
            if ours != theirs:
                raise InputError(
                    f"expected the same attribute classes in the training and test set of "
                    f"{settings.name}, got {ours!r} and {theirs!r} as class {number}: number the "
                    f"labels of both in the same way"
                )
    # A class between others may have no name.
    names = tuple(named.get(label, str(label)) for label in range(max(named, default=-1) + 1))
    num_classes = recipe.network.classes or len(names)

    def source(dataset: Any, unchanged: Any, which: str) -> UserSource:
        labels = labels_of(dataset)
        if labels is not None:
            labels = np.where((labels >= 0) & (labels < num_classes), labels, UNKNOWN)
        return UserSource(
            place=settings.name,
            device=device,
            classes=names,
            index=np.arange(len(dataset)),
            labels=labels,
            workers=workers,
            evaluation_batch=evaluation_batch(device),
            overlaps=workers > 0,  # Else transforms draw from the same generators as a step.
            dataset=dataset,
            unchanged=unchanged,
            which=which,
            seed=recipe.run.seed,
            num_classes=num_classes,
        )

    made = source(train, plain, "training")
    made.keys()  # Which checks them.
    return made, source(test, test, "test")


def seed_generators(seed: int, epoch: int = 0, index: int = 0) -> None:
    """Seed the global generators that a user's code draws from: of torch, NumPy and Python."""
    key = _KEY.pack(seed, epoch, index)
    # A digest takes two microseconds, and a SeedSequence of NumPy seventeen.
    (sample_seed,) = _SEED.unpack(hashlib.blake2b(key, digest_size=_SEED.size).digest())
    torch.default_generator.manual_seed(sample_seed)
    np.random.seed(sample_seed)  # noqa: NPY002
    random.seed(sample_seed)


def _returned(name: str) -> tuple[Any, Any, Any]:
    """Call the user's function, and check the datasets that it returns: train, test and plain.

    The third one is the training samples in the same order, without random transforms. If there is
    none, the first one takes its place.
    """
    # A function that draws its split must return the same one in all processes and for all seeds,
    # also in a process that has run the module before.
    with same_random_numbers():
        seed_generators(0)
        imported(name)
        seed_generators(0)
        returned = call_attribute(name, "datasets")
    if not isinstance(returned, tuple | list) or len(returned) not in (2, 3):
        raise InputError(
            f"expected {name} to return (train, test) or (train, test, plain), got "
            f"{type(returned).__name__}"
        )
    for dataset in returned:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and len(dataset)):
            raise InputError(
                f"expected map-style datasets with samples, with __len__ and __getitem__, from "
                f"{name!r}, got {'an empty' if hasattr(dataset, '__len__') else 'a'} "
                f"{type(dataset).__name__}"
            )
    train, test, plain = [*returned, returned[0]][:3]
    if len(plain) != len(train):
        raise InputError(
            f"expected the third dataset from {name} to hold the same {len(train)} training "
            f"samples, without random transforms, got {len(plain)} samples"
        )
    return train, test, plain


def _constant(dataset: Any, indices: Iterable[int]) -> list[Any] | None:
    """Read some samples twice, and return them; None if one of them changes with the seed."""

    def read(seed: int) -> list[Any]:
        items = []
        for index in indices:
            seed_generators(seed, 0, index)
            items.append(dataset[index])
        return items

    with same_random_numbers():
        one, other = read(0), read(1)
    try:
        exact = functools.partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
        exact(one, other, check_device=False)
    except (AssertionError, TypeError, ValueError):
        return None
    return one


def _outline(sample: Any) -> Any:
    """Return the shapes and mean sizes in a sample, which nearly all machines compute equally."""
    if isinstance(sample, tuple | list):
        return [_outline(part) for part in sample]
    try:
        numbers = torch.as_tensor(sample).double().abs()
    except (TypeError, ValueError, RuntimeError):
        return None  # Not numbers.
    return tuple(numbers.shape), f"{numbers.mean():.2g}"
