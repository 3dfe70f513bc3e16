"""Which samples of a training set a run trains, and with which labels.

The labels are those of the data set, those of a file (``data.labels``), or wrong ones
(``data.label_noise``). A second training leaves out the suspects of a finished run
(``data.without``).
"""

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fineprune.datasets.label_file import DROP, read_labels
from fineprune.datasets.label_noise import class_map, mapped_noise, symmetric_noise
from fineprune.errors import InputError
from fineprune.runs.history import read_evidence
from fineprune.runs.run import read_run
from fineprune.runs.training_set import UNKNOWN, TrainingSet, read_training_set
from fineprune.training.data.source import Array, Source
from fineprune.training.settings import DataSettings


def training_labels(
    settings: DataSettings, whole: Source, classes: int, index: Array
) -> tuple[Array, Array, npt.NDArray[np.bool_] | None]:
    """Return which samples to train, with which labels, and which of these are wrong.

    Args:
        settings: The data section of the recipe.
        whole: The whole training set, of N samples.
        classes: The number of classes of the network.
        index: The indices of the samples to train on, sorted; int64, shape (n,).

    Returns:
        The indices that are left, int64, shape (m,); the label of each sample of the whole set,
        ``DROPPED`` for one that is left out and ``UNKNOWN`` for one that the data hide, int64,
        shape (N,); and which of the labels to train with are wrong, bool, shape (m,), or None if
        this is not known.
    """
    own, names = whole.labels, whole.classes
    if own is None:
        if settings.true_labels is not None:
            raise InputError(
                f"expected the training set of {whole.place} to have an attribute targets or "
                f"labels, since data.true_labels needs the class of each sample, got none: add "
                f"one, or leave out this setting"
            )
        own = np.full(len(whole), UNKNOWN)
    if settings.labels is not None:
        names += tuple(str(number) for number in range(len(names), classes))
        given = read_labels(Path(settings.labels), names, len(own), whole.keys())
        index = index[given[index] != DROP]
        if not len(index):
            raise InputError(
                f"expected labels of images to train on in {settings.labels}, got only images to "
                f"leave out or hold out"
            )
        known = settings.true_labels == "dataset"
        return index, given, (given != own)[index] if known else None
    labels = own.astype(np.int64)
    if settings.label_noise is None:
        return index, labels, None
    right, share, seed = labels[index], settings.label_noise, settings.label_noise_seed
    if settings.label_noise_map:
        noisy = mapped_noise(right, class_map(settings.label_noise_map, names), share, seed)
    else:
        noisy = symmetric_noise(right, len(names), share, seed)
    labels[index] = noisy
    return index, labels, noisy != right


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
    same = summary.data_sha256 == fingerprint and np.array_equal(theirs.index, training_set.index)
    if not same or ((labels != others) & (labels != UNKNOWN) & (others != UNKNOWN)).any():
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
