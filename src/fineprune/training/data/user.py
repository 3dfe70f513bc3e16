"""User-defined datasets: what the function that a recipe names returns, checked and read.

The random numbers that a transform draws depend only on the run's seed, the epoch and the index of
the sample. They are therefore the same with any number of loader workers or ranks and after a
resume, and evaluation does not change the random numbers of the training.
"""

import functools
import hashlib
import itertools
import operator
import random
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import default_collate

from fineprune.errors import InputError, first_line, shown
from fineprune.importing import call_attribute, imported
from fineprune.labels.dataset_attributes import (
    keys_of,
    labels_of,
    own_names,
    same_random_numbers,
)
from fineprune.runs.training_set import UNKNOWN
from fineprune.training.data.loaded import Keys, Loaded, LoadedBatches
from fineprune.training.data.source import check_same, evaluation_batch
from fineprune.training.evaluate import check_evaluated
from fineprune.training.recipe import Recipe

# The number of samples that are read twice to detect random transforms, and for the fingerprint.
_COMPARED_SAMPLES = 4
_DIGESTED_SAMPLES = 8

_KEY, _SEED = struct.Struct("<QQQ"), struct.Struct("<I")

# What is drawn while the function runs, which is the same for all seeds of a run.
_FIXED_SEED = 0


@dataclass(frozen=True, eq=False)
class UserSource:
    """A ``Source`` of the samples of a user's map-style dataset, with items ``(x, y)``.

    Each sample is checked when it is read: its label is a class or a vector of the classes'
    probabilities, and it has the shape of the first one that was read. Otherwise, the batch or the
    loss would fail with a message that names no sample, and on a GPU with none.

    Attributes:
        dataset: The user's dataset.
        unchanged: The same samples without random transforms, for evaluation.
        part_of: Which of the user's datasets it is: 0 for the training set, 1 for the test set.
        recipe: The recipe, whose function returns the datasets again in another process.
        num_classes: The number of classes.
        index: Which items are the samples; int64, shape (N,).
        given: The label of each sample in place of its own; int64, shape (N,), or None.
        evaluated: Whether the samples are for evaluation, and the same in every epoch.
    """

    dataset: Any
    unchanged: Any
    part_of: int
    recipe: Recipe
    num_classes: int
    index: npt.NDArray[np.int64]
    given: npt.NDArray[np.int64] | None = None
    evaluated: bool = False
    _shape: list[Any] = field(default_factory=list)

    sorted_by_class = False
    in_threads = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Send what finds the samples again: a process cannot be sent any dataset."""
        values = self.part_of, self.recipe, self.index, self.given, self.evaluated
        return _Elsewhere, (*values, self.fingerprint())

    @property
    def place(self) -> str:
        """The name of the user's function."""
        return self.recipe.data.name

    @property
    def _kind(self) -> str:
        return f"the {('training', 'test')[self.part_of]} set of {self.place}"

    @functools.cached_property
    def classes(self) -> tuple[str, ...]:
        """The name of each class; empty if the dataset does not say it."""
        return tuple(map(str, class_names(self.dataset, self.place)))

    @functools.cached_property
    def labels(self) -> npt.NDArray[np.int64] | None:
        """The class of each sample, -2 if it is none; int64, shape (N,). None if not known."""
        if self.given is not None:
            return self.given
        labels = labels_of(self.dataset)
        if labels is None:
            return None
        known = (labels >= 0) & (labels < self.num_classes)
        return np.where(known, labels, UNKNOWN)[self.index]

    @property
    def evaluation_batch(self) -> int:
        """How many samples to evaluate at once."""
        return evaluation_batch(self.device)

    @property
    def workers(self) -> int:
        """The number of loader processes."""
        return self.recipe.data.workers

    @property
    def device(self) -> str:
        """Where batches go."""
        return self.recipe.run.device

    @property
    def overlaps(self) -> bool:
        """In this process, transforms draw from the same generators as a step."""
        return self.workers > 0

    def __len__(self) -> int:
        return len(self.index)

    def keys(self) -> tuple[str, ...] | None:
        """Return what names each sample, if the dataset says it."""
        keys = checked_keys(self.dataset, self.place)
        return None if keys is None else tuple(keys[i] for i in self.index)

    def blank(self) -> Tensor:
        """Return zeros with the shape and dtype of the ``x`` of the first sample."""
        x = self._read(0, 0)[0]
        batch = default_collate([x])
        if not isinstance(batch, Tensor) or batch.ndim < 2:
            raise InputError(
                f"expected items (x, y) with x of shape (channels, ...) from {self.place!r}, got "
                f"{type(x)}"
            )
        return torch.zeros_like(batch)

    def fingerprint(self) -> str:
        """Return a digest of the labels and of some samples; see ``fingerprint``."""
        return fingerprint(self.dataset, read=self.recipe.data.labels is None)

    def part(
        self, index: npt.NDArray[np.int64], labels: npt.NDArray[np.int64] | None = None
    ) -> "UserSource":
        """Return some of the samples; see ``Source``."""
        if labels is None and self.given is not None:
            labels = self.given[index]
        return replace(self, index=self.index[index], given=labels)

    def plain(self, train: "UserSource") -> "UserSource":
        """Return the samples without random transforms, after looking at the first one."""
        plain = replace(self, dataset=self.unchanged, evaluated=True)
        check_evaluated(plain._read(0, 0)[1])
        first, blank = plain.blank(), train.blank()
        if (first.shape, first.dtype) != (blank.shape, blank.dtype):
            raise InputError(
                f"expected samples of {self.place} to evaluate on with the shape "
                f"{tuple(blank.shape[1:])} and dtype {blank.dtype} of those to train on, got "
                f"{tuple(first.shape[1:])} and {first.dtype}"
            )
        return plain

    def open(self) -> LoadedBatches:
        """Return what reads the batches."""
        return LoadedBatches(self)

    def show(self, sample: int) -> Any:
        """Return an item of the user's dataset without random transforms."""
        return self.unchanged[int(self.index[sample])]

    def save(self, name: str, folder: Any) -> None:
        """Write nothing: the function returns the same samples again."""

    def broken_files(self) -> None:
        """Return None: the user's code reads the files."""

    def on_device(self) -> Callable[[Tensor], Tensor]:
        """Return a function that changes nothing."""
        return lambda x: x

    def __getitems__(self, keys: Keys, map_all: Any = map) -> Loaded:
        """Read a batch with the random numbers of each sample, and restore the generators."""
        seed = 0 if self.evaluated else self.recipe.run.seed
        with same_random_numbers():
            items = []
            for epoch, sample in keys:
                seed_generators(seed, epoch, sample)
                items.append(self._checked(sample))
        x, y = default_collate(items)
        return Loaded(torch.tensor([sample for _, sample in keys]), x, y, [])

    def _read(self, epoch: int, sample: int) -> Any:
        """Return a sample as in an evaluation."""
        with same_random_numbers():
            seed_generators(0, epoch, sample)
            return self._checked(sample)

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
        if self.given is not None:
            return x, int(self.given[sample])
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
    """Call the user's function, and return its training and test set.

    The classes of both are checked, and samples without random transforms are needed for
    validation.
    """
    settings = recipe.data
    train, test, plain = load_own(settings.name, needs_plain=settings.validation > 0)
    names = class_names(train, settings.name)
    checked_keys(train, settings.name)
    if not settings.validation:
        _check_classes(names, test, settings.name)
    source = functools.partial(
        UserSource, recipe=recipe, num_classes=recipe.network.classes or len(names)
    )
    return (
        source(train, plain, 0, index=np.arange(len(train))),
        source(test, test, 1, index=np.arange(len(test))),
    )


@dataclass
class _Elsewhere:
    """A source in another process, which is found again when its first batch is read.

    An error is then one of this batch, which reaches the process that trains.
    """

    part_of: int
    recipe: Recipe
    index: npt.NDArray[np.int64]
    given: npt.NDArray[np.int64] | None
    evaluated: bool
    known: str

    @functools.cached_property
    def source(self) -> UserSource:
        found = open_user(self.recipe)[self.part_of]
        check_same(found.place, self.known, found.fingerprint())
        if self.evaluated:
            found = replace(found, dataset=found.unchanged, evaluated=True)
        return replace(found, index=self.index, given=self.given)

    def __getitems__(self, keys: Keys) -> Loaded:
        return self.source.__getitems__(keys)


def seed_generators(seed: int, epoch: int = 0, index: int = 0) -> None:
    """Seed the global generators that a user's code draws from: of torch, NumPy and Python."""
    key = _KEY.pack(seed, epoch, index)
    # A digest takes two microseconds, and a SeedSequence of NumPy seventeen.
    (sample_seed,) = _SEED.unpack(hashlib.blake2b(key, digest_size=_SEED.size).digest())
    torch.default_generator.manual_seed(sample_seed)
    np.random.seed(sample_seed)  # noqa: NPY002
    random.seed(sample_seed)


def checked_keys(train: Any, name: str) -> tuple[str, ...] | None:
    """Return what names each sample in tables of labels, if the training set says it."""
    keys = keys_of(train)
    if keys is None:
        return None
    if len(keys) != len(train) or len(set(keys)) != len(keys):
        raise InputError(
            f"expected a unique key for each of the {len(train)} samples in the attribute keys of "
            f"the training set of {name}, got {len(keys)} keys, {len(set(keys))} of them different"
        )
    return tuple(keys)


def load_own(name: str, needs_plain: bool) -> tuple[Any, Any, Any]:
    """Call the user's function with fixed seeds, and check the datasets that it returns.

    Args:
        name: The name of the function, as ``module:function``. The function returns a training set
            and a test set, and may return a third dataset: the training samples in the same order,
            without random transforms.
        needs_plain: Whether samples without random transforms are needed for validation.

    Returns:
        The training set, the test set, and the training samples to use for evaluation.
    """
    # A function that draws its split must return the same one in all processes and for all seeds,
    # also in a process that has run the module before.
    with same_random_numbers():
        seed_generators(_FIXED_SEED)
        imported(name)
        seed_generators(_FIXED_SEED)
        returned = call_attribute(name, "datasets")
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
    compared = range(min(_COMPARED_SAMPLES, len(plain)))
    if needs_plain and _constant(plain, compared) is None:
        raise InputError(
            f"expected {name} to return (train, test, plain) with data.validation, got training "
            f"samples with random transforms only: also return them without random transforms"
        )
    return train, test, plain


def class_names(train: Any, name: str) -> Sequence[Any]:
    """Return the names of the classes that a training set has; empty if there are none."""
    names = getattr(train, "classes", ())
    if isinstance(names, str) or not hasattr(names, "__len__"):
        raise InputError(
            f"expected the attribute classes of the training set of {name} to list the names of "
            f"the classes, got {names!r}: list them, or remove it and set network.classes"
        )
    named = own_names(train)  # By number, in which a class may be missing.
    return [named.get(label, str(label)) for label in range(max(named, default=len(names) - 1) + 1)]


def _check_classes(names: Sequence[str], test: Any, name: str) -> None:
    """Check that the same numbers are the same classes in the test set, if both sets say it."""
    if not names or not own_names(test):
        return
    others = class_names(test, name)
    for number, (ours, theirs) in enumerate(itertools.zip_longest(names, others)):
        if ours != theirs:
            raise InputError(
                f"expected the same attribute classes in the training and test set of {name}, got "
                f"{ours!r} and {theirs!r} as class {number}: number the labels of both in the same "
                f"way"
            )


def fingerprint(dataset: Any, *, read: bool = True) -> str:
    """Return what tells a user's dataset from another one: its labels, and some of its samples.

    Samples with random transforms are left out, because a transform may have a generator of its
    own. With ``read`` as False, no sample is read: a table of labels may leave some out because
    they cannot be.
    """
    number = min(_DIGESTED_SAMPLES, len(dataset)) if read else 0
    chosen = np.linspace(0, len(dataset) - 1, number).astype(int)
    labels = labels_of(dataset)
    known = None if labels is None else hashlib.sha256(labels.data).hexdigest()
    outline = _outline(_constant(dataset, chosen.tolist()))
    return hashlib.sha256(repr((len(dataset), known, outline)).encode()).hexdigest()


def _constant(dataset: Any, indices: Iterable[int]) -> list[Any] | None:
    """Read some samples twice, and return them; None if one of them changes with the seed."""

    def read(index: int, seed: int) -> Any:
        seed_generators(seed, 0, index)
        return dataset[index]

    with same_random_numbers():
        pairs = [(read(index, 0), read(index, 1)) for index in indices]
    return [one for one, _ in pairs] if all(_equal(*pair) for pair in pairs) else None


def _outline(sample: Any) -> Any:
    """Return the shapes and mean sizes in a sample, which nearly all machines compute equally."""
    if isinstance(sample, tuple | list):
        return [_outline(part) for part in sample]
    try:
        numbers = torch.as_tensor(sample).double().abs()
    except (TypeError, ValueError, RuntimeError):
        return None  # Not numbers.
    return tuple(numbers.shape), f"{numbers.mean():.2g}"


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if not isinstance(a, torch.Tensor):  # A tensor may be on another device.
        a, b = np.asarray(a), np.asarray(b)
    # NaN differs from itself.
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
