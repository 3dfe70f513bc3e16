"""User-defined datasets: what the function that a recipe names returns, checked and loaded."""

import functools
import hashlib
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from fineprune.datasets.loader_process import TrainingLoader
from fineprune.errors import InputError, first_line, shown
from fineprune.importing import call_attribute, imported
from fineprune.labels.dataset_attributes import given_labels, keys_of, labels_of, own_names
from fineprune.pruning.pruner import Pruner
from fineprune.runs.training_set import UNKNOWN, TrainingSet
from fineprune.training.data.run_data import (
    FIXED_SEED,
    Data,
    Fetch,
    class_names,
    evaluation_batch,
    number_of_classes,
    split,
)
from fineprune.training.data.seeded_samples import (
    EpochIndices,
    PlainSamples,
    SeededSamples,
    sample_fetch,
    seeded_generators,
)
from fineprune.training.evaluate import check_evaluated
from fineprune.training.left_out import LeftOut, left_out
from fineprune.training.recipe import Recipe
from fineprune.training.settings.data import DataSettings
from fineprune.training.weak_labels import weak_labels

# The number of samples that are read twice to detect random transforms, and for the digest.
_COMPARED_SAMPLES = 4
_DIGESTED_SAMPLES = 8


def own_data(recipe: Recipe, begun: str | None = None) -> Data:
    """Load user-defined datasets, which are read through a ``DataLoader``.

    ``begun`` is the ``samples_digest`` with which the run began; None for a new run.
    """
    settings, run = recipe.data, recipe.run
    whole, test, plain = load_own(settings.name, needs_plain=settings.validation > 0)
    classes = number_of_classes(whole, settings.name, recipe.network.classes)
    names = tuple(map(str, class_names(whole, settings.name)))
    if not settings.validation:
        _check_classes(names, test, settings.name)
    keys = checked_keys(whole, settings.name)
    training_set_name = f"the training set of {settings.name}"
    kept, held_out = split(len(whole), settings.validation)
    if settings.validation:
        labelled = Labelled(plain, classes, training_set_name)
        evaluated: Any = Subset(labelled, held_out.tolist())
    else:
        evaluated = Labelled(test, classes, f"the test set of {settings.name}")
    weak = None
    if settings.labels is not None:
        known = names + tuple(str(number) for number in range(len(names), classes))
        own = np.full(len(whole), UNKNOWN)
        if settings.true_labels is not None:
            own = np.asarray(needed_labels(whole, settings.name), np.int64)
        weak = weak_labels(settings, own, known, kept, keys)
        kept = weak.index
    digest = samples_digest(settings, whole, test, plain)
    if begun not in (None, digest):
        raise InputError(
            f"expected {settings.name} to return the data with which the run began, got different "
            f"data: return the same on every call (seed the split), or train into a new folder"
        )

    def training_set() -> TrainingSet:
        labels = np.full(len(whole), UNKNOWN) if weak is None else weak.whole
        if weak is None:
            own = labels_of(whole)
            if own is not None:
                labels = np.where((own >= 0) & (own < classes), own, UNKNOWN)
        return TrainingSet(kept, labels, names, keys)

    left = left_out(settings, training_set, lambda: digest)
    if left is not None:
        # From here on, ``training_set`` returns what stays.
        kept = kept[left.kept]
        weak = None if weak is None else weak.only(left.kept)
    given = None if weak is None else weak.whole
    train: Any = Labelled(whole, classes, training_set_name, given)
    if len(kept) < len(whole):
        train = Subset(train, kept.tolist())
    blank = _blank(settings.name, PlainSamples(train)[0][0])
    x, y = PlainSamples(evaluated)[0]
    check_evaluated(y)
    first = _blank(settings.name, x)
    if (first.shape, first.dtype) != (blank.shape, blank.dtype):
        raise InputError(
            f"expected samples of {settings.name} to evaluate on with the shape "
            f"{tuple(blank.shape[1:])} and dtype {blank.dtype} of those to train on, got "
            f"{tuple(first.shape[1:])} and {first.dtype}"
        )

    def make_loader(pruner: Pruner) -> Any:
        return TrainingLoader(
            SeededSamples(train, run.seed),
            batch_size=recipe.training.batch_size,
            sampler=EpochIndices(pruner.sampler),
            drop_last=recipe.training.drop_last,
            num_workers=settings.workers,
            persistent_workers=settings.workers > 0,
            pin_memory=run.device.startswith("cuda"),
        )

    @functools.cache  # It may start processes.
    def make_fetch() -> Fetch:
        again = functools.partial(_training_samples, recipe, digest, left)
        make = again if settings.workers else lambda: train
        return sample_fetch(make, seed=run.seed, workers=settings.workers, device=run.device)

    return Data(
        train=train,
        make_loader=make_loader,
        make_fetch=make_fetch,
        # In this process, transforms draw from the same generators as a step.
        fetch_overlaps=settings.workers > 0,
        # With a generator of its own, a pass draws nothing from that of the training.
        evaluation=DataLoader(
            PlainSamples(evaluated),
            batch_size=evaluation_batch(run.device),
            generator=torch.Generator(),
        ),
        evaluated_on="validation" if settings.validation else "test",
        num_samples=len(train),
        labels=functools.partial(needed_labels, train, settings.name),
        training_set=training_set,
        classes=classes,
        blank=blank,
        wrong=None if weak is None else weak.wrong,
        labels_digest=None if weak is None else weak.digest,
        left_out_digest=None if left is None else left.digest,
        samples_digest=digest,
        digest=lambda: digest,
    )


def _training_samples(recipe: Recipe, begun: str, left: LeftOut | None) -> Any:
    """Load the training set in a loader process, which nothing but the arguments reaches."""
    train = own_data(recipe.replaced("data", without=None), begun).train
    return train if left is None else Subset(train, left.kept.tolist())


class Labelled(Dataset[Any]):
    """A user's dataset whose samples are checked when they are loaded, or get other labels.

    A label is a whole number, which becomes an int, or a vector of the classes' probabilities, and
    all samples have the shape of the first one that was loaded. Otherwise, the batch or the loss
    would fail with a message that names no sample, and on a GPU with none.

    Args:
        name: What the dataset is, for the error message.
        labels: The label of each sample; int64, shape (N,). None for those of the items ``(x, y)``.
    """

    def __init__(
        self,
        dataset: Any,
        classes: int,
        name: str,
        labels: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.dataset = dataset
        self._given = labels
        self._classes = classes
        self._name = name
        self._shape: tuple[int, ...] | None = None

    @property
    def labels(self) -> Any:
        """The label of each sample; None if neither this nor the dataset says it."""
        return given_labels(self.dataset) if self._given is None else self._given

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise InputError(
                f"expected items (x, y) from {self._name}, got {type(item).__name__} for sample "
                f"{index}"
            )
        x, y = item
        shape = tuple(x.shape) if hasattr(x, "shape") else None  # ``_blank`` refuses the latter.
        if self._shape is None:
            self._shape = shape
        if shape != self._shape:
            raise InputError(
                f"expected samples of one shape from {self._name}, got {self._shape} and, for "
                f"sample {index}, {shape}: crop, resize or pad them in the dataset"
            )
        if self._given is not None:
            return x, int(self._given[index])
        if np.shape(y) == (self._classes,) and np.asarray(y).dtype.kind == "f":
            return x, y
        try:
            label = operator.index(y)
        except TypeError:
            label = -1
        if not 0 <= label < self._classes:
            raise InputError(
                f"expected a class from 0 to {self._classes - 1} as y of each item (x, y) from "
                f"{self._name}, got {shown(first_line(y))} for sample {index}: correct it, or set "
                f"network.classes"
            )
        return x, label


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
    with seeded_generators(FIXED_SEED):
        imported(name)
    with seeded_generators(FIXED_SEED):
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


def needed_labels(train: Any, name: str) -> Any:
    """Return the class of each sample of the training set of the user's function ``name``.

    The samples are not read.
    """
    labels = given_labels(train)
    if labels is None:
        raise InputError(
            f"expected the training set of {name} to have an attribute targets or labels, since "
            f"data.true_labels needs the class of each sample, got none: add one, or leave out "
            f"this setting"
        )
    return labels


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


def _blank(name: str, x: Any) -> torch.Tensor:
    """Return zeros with the shape and dtype of the ``x`` of a sample, plus a batch dimension."""
    batch = default_collate([x])
    if not isinstance(batch, torch.Tensor) or batch.ndim < 2:
        raise InputError(
            f"expected items (x, y) with x of shape (channels, ...) from {name!r}, got {type(x)}"
        )
    return torch.zeros_like(batch)


def _constant(dataset: Any, indices: Iterable[int]) -> list[Any] | None:
    """Read some samples twice, and return them; None if one of them changes with the seed."""
    samples = [SeededSamples(dataset, seed) for seed in (0, 1)]
    pairs = [[samples[seed][0, index][1] for seed in (0, 1)] for index in indices]
    return [one for one, _ in pairs] if all(_equal(*pair) for pair in pairs) else None


def samples_digest(settings: DataSettings, train: Any, test: Any, plain: Any) -> str:
    """Return what tells the datasets of ``load_own`` from others, as they are trained."""
    kept, held_out = split(len(train), settings.validation)
    if settings.labels is not None:
        # A table of labels may leave samples out because they are unreadable.
        kept = kept[:0]
    evaluated = Subset(plain, held_out.tolist()) if settings.validation else test
    parts = _digest(train, kept) + _digest(evaluated, range(len(evaluated)))
    return hashlib.sha256(parts.encode()).hexdigest()


@seeded_generators(FIXED_SEED)
def _digest(dataset: Any, indices: Sequence[int] | npt.NDArray[np.int64]) -> str:
    """Return what tells a user's dataset from another one: its labels, and some of its samples.

    Samples with random transforms are left out, because a transform may have a generator of its
    own.
    """
    chosen = np.linspace(0, len(indices) - 1, min(_DIGESTED_SAMPLES, len(indices))).astype(int)
    labels = labels_of(dataset)
    known = None if labels is None else hashlib.sha256(labels.data).hexdigest()
    samples = _constant(dataset, [int(indices[place]) for place in chosen])
    return repr((len(dataset), known, _outline(samples)))


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
