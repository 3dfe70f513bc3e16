"""Data: what a run trains and evaluates on, chosen in the same way from every source."""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fineprune.errors import InputError
from fineprune.pruning.random_streams import stream
from fineprune.runs.summary import LEFT_OUT
from fineprune.runs.training_set import TrainingSet
from fineprune.training.data.files import open_files
from fineprune.training.data.labels import digest_of, training_labels, without_suspects
from fineprune.training.data.memory import open_memory
from fineprune.training.data.source import Array, EpochLoader, Source
from fineprune.training.data.user import open_user
from fineprune.training.recipe import Recipe
from fineprune.training.settings import DataSettings

# The validation part is drawn from this seed instead of the run's, so that runs with different
# seeds can be compared.
_FIXED_SEED = 0


@dataclass(frozen=True, eq=False)
class Data:
    """The data that a run trains and evaluates on.

    Attributes:
        whole: The training set before any sample is held out or left out.
        train: The samples to train on, with the labels to train with.
        evaluated: The samples to evaluate on.
        evaluated_on: The name of this set, ``test`` or ``validation``.
        classes: The number of classes of the network to build.
        whole_labels: The label of each sample of ``whole``, as ``TrainingSet`` has it.
        wrong: Which labels of ``train`` are wrong; bool, shape (N,). None if this is not known.
        digests: What a run that continues and the other processes of a run must find again, as
            digests in hexadecimal: ``data`` (the training and test set), ``labels`` (the training
            labels if they come from a file of the user, else None) and ``suspects`` (the samples
            that ``data.without`` leaves; None without it).
    """

    whole: Source
    train: Source
    evaluated: Source
    evaluated_on: str
    classes: int
    whole_labels: Array
    wrong: npt.NDArray[np.bool_] | None
    digests: dict[str, str | None]

    @property
    def num_samples(self) -> int:
        """The number of training samples, N."""
        return len(self.train)

    @functools.cached_property
    def blank(self) -> Tensor:
        """Zeros with the shape (1, channels, ...) and dtype of the ``x`` of one sample."""
        return self.train.blank()

    @functools.cached_property
    def evaluation(self) -> EpochLoader:
        """The batches to evaluate on; they can be iterated more than once."""
        return EpochLoader(self.evaluated)

    def training_set(self) -> TrainingSet:
        """Return the whole training set, and which of its samples are trained."""
        whole = self.whole
        return TrainingSet(self.train.index, self.whole_labels, whole.classes, whole.keys())

    def save(self, folder: Path) -> None:
        """Write what a resumed run needs to find the same samples into its folder."""
        self.whole.save("train", folder)
        if self.evaluated_on == "test":
            self.evaluated.save("test", folder)


def load_data(
    recipe: Recipe, begun: Mapping[str, str | None] | None = None, folder: Path | None = None
) -> Data:
    """Load the data that a recipe names.

    Args:
        recipe: The recipe.
        begun: The digests with which a run began that continues; None for a new one.
        folder: The folder of a run that continues; None for a new one.

    Raises:
        InputError: The data are missing, wrong, or others than when the run began.
    """
    settings = recipe.data
    whole, test = open_sources(recipe, folder)
    digests: dict[str, str | None] = {"data": data_fingerprint(whole, test)}
    _check_same(settings, begun, digests)
    classes = _number_of_classes(whole, recipe.network.classes)
    kept, held_out = split(len(whole), settings.validation)
    kept = _limited(settings, whole, kept)
    index, labels, wrong = training_labels(settings, whole, classes, kept)
    from_file = settings.labels is not None
    digests["labels"] = digest_of(index, labels[index]) if from_file else None
    digests[LEFT_OUT] = None
    if settings.without is not None:
        before = TrainingSet(index, labels)
        rest = without_suspects(Path(settings.without), before, str(digests["data"]))
        index, wrong = index[rest], None if wrong is None else wrong[rest]
        digests[LEFT_OUT] = digest_of(index)
    _check_same(settings, begun, digests)
    changed = from_file or settings.label_noise is not None
    train = whole.part(index, labels[index] if changed else None)
    evaluated = whole.part(held_out) if settings.validation else test
    assert evaluated is not None
    evaluated_on = "validation" if settings.validation else "test"
    evaluated = evaluated.plain(train)
    return Data(whole, train, evaluated, evaluated_on, classes, labels, wrong, digests)


def open_sources(recipe: Recipe, folder: Path | None = None) -> tuple[Source, Source | None]:
    """Return the whole training set and the test set, which is None with ``data.validation``.

    ``folder`` is that of a run which continues.
    """
    if recipe.data.name == "images":
        return open_files(recipe, folder)
    train: Source
    test: Source
    train, test = open_user(recipe) if recipe.data.own else open_memory(recipe)
    return train, None if recipe.data.validation else test


def data_fingerprint(train: Source, test: Source | None) -> str:
    """Return the digest of a training set and of a test set, if one is used, in hexadecimal."""
    parts = [train.fingerprint(), "" if test is None else test.fingerprint()]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def split(num_samples: int, validation: int) -> tuple[Array, Array]:
    """Return the sorted indices of the samples to train on, and of those held out, in any run."""
    if validation >= num_samples:
        raise InputError(
            f"expected data.validation to be below {num_samples}, the number of training samples, "
            f"got {validation}"
        )
    order = stream(_FIXED_SEED, 0, "validation").permutation(num_samples)
    return np.sort(order[validation:]), np.sort(order[:validation])


def _limited(settings: DataSettings, whole: Source, kept: Array) -> Array:
    """Return the samples that ``data.train_size`` leaves of those that are not held out."""
    limit = settings.limited(len(kept))
    if limit < len(kept) and whole.sorted_by_class:
        order = stream(_FIXED_SEED, 0, "train_size").permutation(len(kept))
        return kept[np.sort(order[:limit])]
    return kept[:limit]


def _number_of_classes(train: Source, given: int | None) -> int:
    """Return the number of classes: the given one of the recipe, or else those that have names."""
    listed = len(train.classes)
    if given is not None and given < listed:
        raise InputError(
            f"expected network.classes to be at least {listed}, the classes of {train.place}, got "
            f"{given}"
        )
    classes = given or listed
    if classes < 2:
        raise InputError(
            f"expected at least two classes in {train.place}, got {classes}: set network.classes, "
            f"or add samples of another"
        )
    return classes


def _check_same(
    settings: DataSettings, begun: Mapping[str, str | None] | None, found: Mapping[str, str | None]
) -> None:
    """Raise InputError if data have other digests than those with which a run began."""
    seeded = " (a function of your own must return the same on every call, so seed the split)"
    for name, place, remedy in (
        ("data", settings.train or settings.name, f"restore them{seeded if settings.own else ''}"),
        ("labels", settings.labels, "restore the file"),
        (LEFT_OUT, f"data.without = {settings.without}", "restore that run"),
    ):
        if begun is not None and name in found and begun[name] != found[name]:
            raise InputError(
                f"expected in {place} the {name} with which the run began, got different ones: "
                f"{remedy}, or train into a new folder"
            )
