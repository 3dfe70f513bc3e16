"""The suspected wrong labels of a run, ranked, each with a suggested label."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError
from fineprune.inspection.inspected import Inspected
from fineprune.labels.label_watch import LabelWatch
from fineprune.runs.history import History

# The weight of an epoch's loss in the average, as in the suspicion of ``Adaptive``.
_WEIGHT = 0.2

# The number of last epochs of a sample in which predictions may agree with a suggestion.
_VOTES = 10

# The predictions for this many samples are read at once, which limits the memory.
_CHUNK = 10_000


@dataclass(frozen=True, eq=False)
class Suspects:
    """Training samples, the most suspicious first.

    Attributes:
        index: The indices of the samples; int64, shape (n,).
        score: How suspicious each sample is; float32, shape (n,). With the evidence on the labels,
            this is the log odds of ``LabelWatch.suspects``; else the moving average of the loss.
        suggestion: The class that contradicts the label most, int64, shape (n,); -1 without
            evidence.
        agreement: The share of the last epochs that trained the sample in which the network
            predicted this class; float32, shape (n,).
        number: How many of the samples, from the first one, are called suspicious: the estimated
            number of wrong labels; without evidence, those whose loss is above chance.
    """

    index: npt.NDArray[np.int64]
    score: npt.NDArray[np.float32]
    suggestion: npt.NDArray[np.int64]
    agreement: npt.NDArray[np.float32]
    number: int

    def __len__(self) -> int:
        return len(self.index)

    def at(self, place: npt.NDArray[np.int64] | slice) -> "Suspects":
        """Return the suspects at some places of the ranking. ``number`` stays that of all."""
        names = ("index", "score", "suggestion", "agreement")
        return replace(self, **{name: getattr(self, name)[place] for name in names})


def suspects_of(*runs: Inspected, most: int | None = None) -> Suspects:
    """Return the samples whose labels should be checked, the most suspicious first.

    The evidence of several runs on the same labels is added.

    Args:
        runs: The runs, at least one.
        most: The largest number of samples to return; None for all that have been trained.
    """
    first = runs[0]
    watch = _added(runs)
    if watch is None:
        losses = smoothed_losses(first.history)
        known = np.flatnonzero(~np.isnan(losses))
        index = known[np.argsort(-losses[known], kind="stable")][:most]
        score = losses[index]
        suggestion = np.full(len(index), -1)
        number = int((losses > math.log(int(first.labels.max()) + 1)).sum())
    else:
        ranking = watch.ranking()
        ranked = [part.numpy() for part in ranking.suspects()]
        trained = np.isfinite(ranked[1])
        index, score, suggestion = (part[trained][:most] for part in ranked)
        number = ranking.num_suspects
    agreement = np.mean([_agreement(run.history, index, suggestion) for run in runs], axis=0)
    return Suspects(index, score, suggestion, agreement.astype(np.float32), number)


def suspicion_in(run: Inspected) -> npt.NDArray[np.float32]:
    """Return ``Suspects.score`` for each sample of a run; float32, shape (N,), NaN for none."""
    ranked = suspects_of(run)
    values = np.full(len(run.labels), np.nan, np.float32)
    values[ranked.index] = ranked.score
    return values


def _added(runs: Sequence[Inspected]) -> LabelWatch | None:
    """Return the evidence of all runs; None if a single run has kept none."""
    if len(runs) == 1:
        return runs[0].watch
    total: LabelWatch | None = None
    for run in runs:
        if run.watch is None:
            raise InputError(
                f"expected evidence on the labels in {run.run.path} to add it to that of other "
                f"runs, found none: give this run alone, or train it again with run.history = true"
            )
        if total is None:
            total = LabelWatch(run.watch.num_samples, run.watch.num_classes)
        try:
            total.merge(run.watch)
        except InputError as error:
            raise InputError(f"{runs[0].run.path} and {run.run.path}: {error}") from error
    return total


def _agreement(
    history: History, index: npt.NDArray[np.int64], suggestion: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """Return ``Suspects.agreement`` of some samples with these suggestions, shape (n,)."""
    parts = [np.empty(0, np.float32)]
    for begin in range(0, len(index), _CHUNK):
        predicted = history.predicted(index[begin : begin + _CHUNK])
        votes = predicted >= 0
        # Of the epochs that trained a sample, the last ones.
        votes &= np.cumsum(votes[::-1], axis=0)[::-1] <= _VOTES
        agreeing = votes & (predicted == suggestion[begin : begin + _CHUNK])
        parts.append((agreeing.sum(0) / np.maximum(votes.sum(0), 1)).astype(np.float32))
    return np.concatenate(parts)


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
