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
from fineprune.runs.training_set import UNKNOWN, TrainingSet
from fineprune.training.data.files import open_files
from fineprune.training.data.labels import (
    TrainingLabels,
    digest_of,
    training_labels,
    without_suspects,
)
from fineprune.training.data.memory import open_memory
from fineprune.training.data.source import EpochLoader, Source
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
        chosen: The labels of ``train``, and which samples of ``whole`` it has.
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
    chosen: TrainingLabels
    digests: dict[str, str | None]

    @property
    def num_samples(self) -> int:
        """The number of training samples, N."""
        return len(self.train)

    @property
    def labels(self) -> npt.NDArray[np.integer] | None:
        """The class of each training sample, integers, shape (N,); None if it is not known."""
        labels = self.train.labels
        return None if labels is None or (labels == UNKNOWN).any() else labels

    @property
    def wrong(self) -> npt.NDArray[np.bool_] | None:
        """Which training labels are wrong; bool, shape (N,). None if this is not known."""
        return self.chosen.wrong

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
        chosen, whole = self.chosen, self.whole
        return TrainingSet(chosen.index, chosen.whole, whole.classes, whole.keys())

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
        begun: The digests with which the run began; None for a new run.
        folder: The folder of the run that continues, if it can be read; None for a new run.

    Raises:
        InputError: The data are missing, wrong, or others than when the run began.
    """
    settings = recipe.data
    whole, test = open_sources(recipe, folder)
    digests: dict[str, str | None] = {"data": data_fingerprint(whole, test)}
    _check_same(settings, begun, digests)
    classes = _number_of_classes(whole, recipe.network.classes)
    kept, held_out = split(len(whole), settings.validation)
    chosen = _labelled(settings, whole, classes, _limited(settings, whole, kept))
    from_file = settings.labels is not None
    digests["labels"] = digest_of(chosen.index, chosen.labels) if from_file else None
    evaluated = whole.part(held_out) if settings.validation else test
    assert evaluated is not None
    if settings.without is not None:
        training_set = TrainingSet(chosen.index, chosen.whole)
        rest = without_suspects(Path(settings.without), training_set, str(digests["data"]))
        chosen = chosen.only(rest)
    digests["suspects"] = None if settings.without is None else digest_of(chosen.index)
    _check_same(settings, begun, digests)
    changed = from_file or settings.label_noise is not None
    train = whole.part(chosen.index, chosen.labels if changed else None)
    evaluated_on = "validation" if settings.validation else "test"
    return Data(whole, train, evaluated.plain(train), evaluated_on, classes, chosen, digests)


def _check_same(
    settings: DataSettings, begun: Mapping[str, str | None] | None, found: Mapping[str, str | None]
) -> None:
    """Raise InputError if data have other digests than those with which a run began."""
    seeded = " (a function of your own must return the same on every call, so seed the split)"
    for name, place, remedy in (
        ("data", settings.train or settings.name, f"restore them{seeded if settings.own else ''}"),
        ("labels", settings.labels, "restore the file"),
        ("suspects", f"data.without = {settings.without}", "restore that run"),
    ):
        if begun is not None and name in found and begun[name] != found[name]:
            raise InputError(
                f"expected in {place} the {name} with which the run began, got different ones: "
                f"{remedy}, or train into a new folder"
            )


def data_fingerprint(train: Source, test: Source | None) -> str:
    """Return the digest of a training set and of a test set, if one is used, in hexadecimal."""
    parts = [train.fingerprint(), "" if test is None else test.fingerprint()]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def split(num_samples: int, validation: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the indices of the samples to train on, and of those held out for validation.

    Both are sorted and the same in every run.
    """
    if validation >= num_samples:
        raise InputError(
            f"expected data.validation to be below {num_samples}, the number of training samples, "
            f"got {validation}"
        )
    order = stream(_FIXED_SEED, 0, "validation").permutation(num_samples)
    return np.sort(order[validation:]), np.sort(order[:validation])


def open_sources(recipe: Recipe, folder: Path | None = None) -> tuple[Source, Source | None]:
    """Return the whole training set and the test set, which is None with ``data.validation``.

    ``folder`` is that of a run which continues. No other function asks for the name of the data.
    """
    if recipe.data.name == "images":
        return open_files(recipe, folder)
    train: Source
    test: Source
    train, test = open_user(recipe) if recipe.data.own else open_memory(recipe)
    return train, None if recipe.data.validation else test


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


def _limited(
    settings: DataSettings, whole: Source, kept: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the samples that ``data.train_size`` leaves of those that are not held out."""
    limit = settings.limited(len(kept))
    if limit < len(kept) and whole.sorted_by_class:
        order = stream(_FIXED_SEED, 0, "train_size").permutation(len(kept))
        return kept[np.sort(order[:limit])]
    return kept[:limit]


def _labelled(
    settings: DataSettings, whole: Source, classes: int, index: npt.NDArray[np.int64]
) -> TrainingLabels:
    """Return the labels to train with."""
    own, names = whole.labels, whole.classes
    if own is None:
        if settings.true_labels is not None:
            raise InputError(
                f"expected the training set of {whole.place} to have an attribute targets or "
                f"labels, since data.true_labels needs the class of each sample, got none: add "
                f"one, or leave out this setting"
            )
        own = np.full(len(whole), UNKNOWN)
    keys = None
    if settings.labels is not None:
        names += tuple(str(number) for number in range(len(names), classes))
        keys = whole.keys()
    return training_labels(settings, own, names, index, keys)
