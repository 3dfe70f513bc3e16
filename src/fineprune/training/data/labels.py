"""Which samples of a training set a run trains, and with which labels.

The labels are those of the data set, those of a file (``data.labels``), or wrong ones
(``data.label_noise``). A second training leaves out the suspects of a finished run
(``data.without``).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fineprune.datasets.label_file import DROP, read_labels
from fineprune.datasets.label_noise import class_map, mapped_noise, symmetric_noise
from fineprune.errors import InputError
from fineprune.runs.history import read_evidence
from fineprune.runs.run import read_run
from fineprune.runs.training_set import UNKNOWN, TrainingSet, read_training_set
from fineprune.training.settings import DataSettings

Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TrainingLabels:
    """The labels of the samples to train on.

    Attributes:
        index: The indices of these samples in the training set, sorted; int64, shape (M,).
        wrong: Which of their labels are wrong; bool, shape (M,). None if this is not known.
        whole: The label of each sample of the whole training set, -1 for one that is left out;
            int64, shape (N,).
    """

    index: Array
    wrong: npt.NDArray[np.bool_] | None
    whole: Array

    @property
    def labels(self) -> Array:
        """The labels of these samples; int64, shape (M,)."""
        return self.whole[self.index]

    def only(self, kept: Array) -> "TrainingLabels":
        """Return those of the samples at these positions, which are sorted; int64, shape (m,)."""
        wrong = None if self.wrong is None else self.wrong[kept]
        return replace(self, index=self.index[kept], wrong=wrong)


def training_labels(
    settings: DataSettings,
    own: npt.NDArray[np.integer],
    classes: Sequence[str],
    index: Array,
    keys: Sequence[str] | None = None,
) -> TrainingLabels:
    """Return the labels to train on.

    Args:
        settings: The data section of the recipe.
        own: The labels of the whole training set, which are those of the dataset; shape (N,).
        classes: The name of each class.
        index: The indices of the samples to train on, sorted; int64, shape (n,).
        keys: What names each sample of the training set in a table; None for their indices.
    """
    if settings.labels is not None:
        given = read_labels(Path(settings.labels), classes, len(own), keys)
        index = index[given[index] != DROP]
        if not len(index):
            raise InputError(
                f"expected labels of images to train on in {settings.labels}, got only images to "
                f"leave out or hold out"
            )
        known = settings.true_labels == "dataset"
        return TrainingLabels(index, given[index] != own[index] if known else None, given)
    whole = own.astype(np.int64)
    if settings.label_noise is None:
        return TrainingLabels(index, None, whole)
    labels = whole[index]
    share, seed = settings.label_noise, settings.label_noise_seed
    if settings.label_noise_map is None:
        noisy = symmetric_noise(labels, len(classes), share, seed)
    else:
        mapping = class_map(settings.label_noise_map, classes)
        noisy = mapped_noise(labels, mapping, share, seed)
    whole[index] = noisy
    return TrainingLabels(index, noisy != labels, whole)


def without_suspects(folder: Path, training_set: TrainingSet, fingerprint: str) -> Array:
    """Return the positions of the samples that a finished run does not suspect, sorted.

    Args:
        folder: The folder of the run (``data.without``).
        training_set: The training set of the second training, before anything is left out for this
            setting.
        fingerprint: The digest of its data.

    Returns:
        Positions among the samples of the first run; int64, shape (M,).

    Raises:
        InputError: The folder holds no finished run with evidence on the labels, the run was
            trained on other samples or labels, or it suspects none of them.
    """
    summary, number = read_run(folder).summary, len(training_set.index)
    theirs = read_training_set(folder, summary.train_samples)
    labels, others = training_set.trained_labels, theirs.trained_labels
    known = None
    if np.array_equal(theirs.index, training_set.index):
        known = (labels != UNKNOWN) & (others != UNKNOWN)
    if known is None or summary.data_sha256 != fingerprint or (labels != others)[known].any():
        raise InputError(
            f"expected for data.without a run on the same samples and labels, got {folder}, whose "
            f"{summary.train_samples} samples or their labels differ from these {number}: give a "
            f"run with the same data section"
        )
    watch, _ = read_evidence(folder, number, "for data.without")
    kept = np.array(watch.without_suspects())
    if len(kept) == number:
        raise InputError(
            f"expected for data.without a run that suspects some labels, got {folder}, which "
            f"suspects none: leave out data.without"
        )
    return kept


def digest_of(*arrays: Array) -> str:
    """Return the SHA-256 digest of integers, in hexadecimal."""
    return hashlib.sha256(np.stack(arrays).tobytes()).hexdigest()
