"""The suspected wrong labels of a run, ranked, each with a suggested label."""

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from fineprune.inspection.inspected import Inspected
from fineprune.runs.history import History

# The weight of an epoch's loss in the average, as in the suspicion of ``Adaptive``.
_WEIGHT = 0.2

# The number of last epochs of a sample whose predictions vote for a suggestion.
_VOTES = 10

# The votes of this many samples are counted at once, which limits the memory.
_CHUNK = 10_000


@dataclass(frozen=True, eq=False)
class Suspects:
    """Training samples, the most suspicious first.

    Attributes:
        index: The indices of the samples; int64, shape (n,).
        score: The moving average of the loss of each sample; float32, shape (n,).
        label: The label that each sample was trained with; int64, shape (n,).
        suggestion: The class that the network predicted most often instead of the label, in the
            last epochs that trained the sample; int64, shape (n,). -1 if it predicted no other one.
        agreement: The share of these epochs in which it predicted this class; float32, shape (n,).
    """

    index: npt.NDArray[np.int64]
    score: npt.NDArray[np.float32]
    label: npt.NDArray[np.int64]
    suggestion: npt.NDArray[np.int64]
    agreement: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.index)

    def at(self, place: npt.NDArray[np.int64]) -> "Suspects":
        """Return the suspects at some places of the ranking."""
        return Suspects(*(getattr(self, field.name)[place] for field in fields(self)))


def suspects_of(inspected: Inspected, most: int | None = None) -> Suspects:
    """Return the samples whose labels should be checked, the most suspicious first.

    Args:
        inspected: The run.
        most: The largest number of samples to return; None for all that have a loss.
    """
    score = smoothed_losses(inspected.history)
    known = np.flatnonzero(~np.isnan(score))
    index = known[np.argsort(-score[known], kind="stable")][:most]
    label = inspected.labels[index]
    suggestion, agreement = suggested_labels(inspected.history, index, label)
    return Suspects(index, score[index], label, suggestion, agreement)


def number_above_chance(inspected: Inspected, classes: int) -> int:
    """Return how many samples have a score above the loss of an untrained network.

    Args:
        inspected: The run.
        classes: The number of classes.
    """
    return int((smoothed_losses(inspected.history) > math.log(classes)).sum())


def smoothed_losses(history: History) -> npt.NDArray[np.float32]:
    """Return the moving average of each sample's loss over the epochs that trained it.

    Returns:
        The averages; float32, shape (N,). NaN for a sample without a finite loss.
    """
    average = np.full(history.losses.shape[1], np.nan, dtype=np.float32)
    for losses in history.losses:
        known = np.isfinite(losses)
        first = known & np.isnan(average)
        average[first] = losses[first]
        average[known] += np.float32(_WEIGHT) * (losses[known] - average[known])
    return average


def suggested_labels(
    history: History, index: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the class that the network predicted most often instead of each label.

    Args:
        history: The history of the run.
        index: The indices of the samples; int64, shape (n,).
        labels: Their labels; int64, shape (n,).

    Returns:
        ``Suspects.suggestion`` and ``Suspects.agreement``, both of shape (n,).
    """
    parts = [
        _voted(history.predicted(index[begin : begin + _CHUNK]), labels[begin : begin + _CHUNK])
        for begin in range(0, len(index), _CHUNK)
    ]
    if not parts:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    suggestions, agreements = zip(*parts, strict=True)
    return np.concatenate(suggestions), np.concatenate(agreements)


def _voted(
    predictions: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    samples = np.arange(len(labels))
    classes = int(max(predictions.max(initial=0), labels.max(initial=0))) + 1
    votes = np.zeros((len(labels), classes), dtype=np.int16)
    voters = np.zeros(len(labels), dtype=np.int16)
    for predicted in predictions[::-1]:
        votes_now = (predicted >= 0) & (voters < _VOTES)
        votes[samples[votes_now], predicted[votes_now]] += 1
        voters += votes_now
    votes[samples, labels] = 0
    suggestion = votes.argmax(axis=1)
    number = votes[samples, suggestion]
    agreement = (number / np.maximum(voters, 1)).astype(np.float32)
    return np.where(number > 0, suggestion, -1), agreement
