"""What happens to each class: how much of it is skipped, and how well it is recognised."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fineprune.inspection.inspected import Inspected


@dataclass(frozen=True)
class ClassRow:
    """One class in one run.

    Attributes:
        number: The class.
        samples: The number of training samples with this label.
        skipped: The share of their sample-steps that was skipped.
        accuracy: The share of the evaluated samples of this class that were recognised at the end;
            None if this is not known, or if there are none.
        full_accuracy: The same in the ``full`` run with the same seed; None without such a run.
    """

    number: int
    samples: int
    skipped: float
    accuracy: float | None
    full_accuracy: float | None


def class_rows(run: Inspected, full: Inspected | None, classes: int) -> list[ClassRow]:
    """Return one row per class."""
    skipped = run.times_skipped() / len(run.history.epochs)
    samples = np.bincount(run.labels, minlength=classes)
    shares = np.bincount(run.labels, weights=skipped, minlength=classes) / np.maximum(samples, 1)
    own, others = _accuracies(run, classes), _accuracies(full, classes)
    return [
        ClassRow(number, int(samples[number]), float(shares[number]), own[number], others[number])
        for number in range(classes)
    ]


def confusion(run: Inspected, classes: int) -> npt.NDArray[np.int64] | None:
    """Return how often each label (row) was predicted as each class (column) at the end.

    Returns:
        The numbers; int64, shape (classes, classes). Samples for which the network returned NaN
        are left out. None if the run has not kept them.
    """
    if run.evaluated is None:
        return None
    labels, predictions = run.evaluated[:, run.evaluated[1] >= 0]
    pairs = np.bincount(labels * classes + predictions, minlength=classes * classes)
    return pairs.reshape(classes, classes)


def _accuracies(run: Inspected | None, classes: int) -> list[float | None]:
    if run is None or run.evaluated is None:
        return [None] * classes
    labels, predictions = run.evaluated
    totals = np.bincount(labels, minlength=classes)
    right = np.bincount(labels[labels == predictions], minlength=classes)
    return [
        float(right[number] / totals[number]) if totals[number] else None
        for number in range(classes)
    ]
