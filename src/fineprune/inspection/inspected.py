"""Inspected: finished runs on the same samples and labels, with the sum of their evidence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError
from fineprune.labels.dataset_attributes import unambiguous
from fineprune.labels.label_watch import LabelWatch
from fineprune.labels.ranking import Ranking
from fineprune.labels.review_page import Samples, Show
from fineprune.runs.files import HISTORY
from fineprune.runs.history import (
    EVALUATED,
    has_evidence,
    needed_evidence,
    read_evaluated,
    read_history,
)
from fineprune.runs.run import Run
from fineprune.runs.training_set import UNKNOWN, TrainingSet, read_training_set


@dataclass(frozen=True, eq=False)
class Inspected:
    """Finished runs on the same samples and labels, and what they say of these.

    Attributes:
        runs: The runs.
        training_set: Their training set, with the labels that they trained with.
        watch: The sum of the evidence of all runs.
        ranking: Its ranking, whose number of suspects every command and page gives.
    """

    runs: list[Run]
    training_set: TrainingSet
    watch: LabelWatch
    ranking: Ranking

    @property
    def classes(self) -> list[str]:
        """The name of each class, or its number."""
        return [self.training_set.name(number) for number in range(self.watch.num_classes)]

    def times_skipped(self) -> npt.NDArray[np.int64]:
        """Return in how many epochs of all runs each sample was skipped; int64, shape (N,).

        Epochs that keep all samples count for none, although ``training.drop_last`` or a broken
        file leaves some out. Such samples of a pruned epoch are not told from skipped ones.
        """
        times = np.zeros(self.watch.num_samples, np.int64)
        for run in self.runs:
            history = read_history(run.path, self.watch.num_samples)
            if history is not None:
                pruned = np.array([line["pruned"] for line in run.metrics], dtype=bool)
                times += (~history.trained[pruned[: len(history.epochs)]]).sum(axis=0)
        return times

    def recognised(self) -> list[float | None]:
        """Return the share of the evaluated samples of each class that the runs recognised at last.

        It is None for a class without such samples, or if no run has kept its predictions.
        """
        classes = self.watch.num_classes
        kept = [part for run in self.runs if (part := _evaluated(run, classes)) is not None]
        if not kept:
            return [None] * self.watch.num_classes
        labels, predictions = np.concatenate(kept, axis=1)
        totals = np.bincount(labels, minlength=self.watch.num_classes)
        right = np.bincount(labels[labels == predictions], minlength=self.watch.num_classes)
        return [float(r / t) if t else None for r, t in zip(right, totals, strict=True)]

    def review(
        self, most: int | None = None, show: Show | None = None, notes: Sequence[str] = ()
    ) -> str:
        """Return the section of a page that lists the suspects, as HTML.

        Args:
            most: The largest number of samples to list; None for all suspects up to 500.
            show: Returns what a page can show of a sample of the runs; None to show none.
            notes: Further sentences above the cards.
        """
        known = self.training_set
        labels = None if (known.labels == UNKNOWN).any() else known.labels
        names = unambiguous(self.classes)
        samples = Samples(names, labels, known.keys, known.index, show)
        several = f"The evidence of {len(self.runs)} runs is added."
        notes = [several, *notes] if len(self.runs) > 1 else notes
        return self.watch.review(self.ranking, samples, most, notes)


def read_inspected(runs: Sequence[Run]) -> Inspected:
    """Read what runs say of their samples.

    Runs with ``data.without`` did not train the suspects of another run. They are left out beside
    runs that did.

    Raises:
        InputError: There is no run, a run has kept no evidence, or two runs have other samples or
            labels.
    """
    whole = [run for run in runs if not run.recipe.get("data", {}).get("without")]
    runs = with_evidence(whole or runs)
    if not runs:
        raise InputError("expected at least one finished run to inspect, got none")
    first, total = None, None
    for run in runs:
        number = run.summary.train_samples
        watch = needed_evidence(run.path, number, "to know about its labels")
        training_set = read_training_set(run.path, number)
        training_set.check_recorded(watch.labels().numpy(), run.path)
        if first is None or total is None:
            first, total = training_set, watch
            continue
        same = (
            np.array_equal(first.index, training_set.index)
            and np.array_equal(first.labels, training_set.labels)
            and (first.classes, first.keys) == (training_set.classes, training_set.keys)
        )
        if not same:
            raise InputError(
                f"expected runs on the same samples and labels, got different ones in {run.path} "
                f"and {runs[0].path}: inspect one after the other"
            )
        total.merge(watch)
    assert first is not None and total is not None  # There is a run.  # noqa: PT018
    return Inspected(runs, first, total, total.ranking())


def _evaluated(run: Run, classes: int) -> npt.NDArray[np.int64] | None:
    """Return what ``read_evaluated`` does, after checking that it is of this run."""
    part = read_evaluated(run.path)
    if part is None:
        return None
    right, expected = float((part[0] == part[1]).mean()), run.summary.accuracy_last
    if part[0].min() < 0 or part.max() >= classes or not math.isclose(right, expected):
        raise InputError(
            f"expected predictions of {classes} classes with the accuracy {expected} in "
            f"{run.path / HISTORY / EVALUATED}, as in the summary, got others: the file is damaged "
            f"or of another run"
        )
    return part


def with_evidence(runs: Sequence[Run]) -> list[Run]:
    """Leave out the runs of a comparison that kept no evidence, unless none has kept any.

    Most arms of a comparison record no more than their policies need.
    """
    kept = [run for run in runs if run.comparison is None or has_evidence(run.path)]
    return kept or list(runs)


def facts_of_run(run: Run) -> list[str]:
    """Return sentences on what the evidence of a finished run says of its labels."""
    inspected = read_inspected([run])
    return inspected.watch.facts(inspected.classes)
