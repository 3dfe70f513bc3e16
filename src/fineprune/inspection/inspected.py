"""Inspected: finished runs on the same samples and labels, with the sum of their evidence."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError
from fineprune.labels.dataset_attributes import unambiguous
from fineprune.labels.facts import facts_of
from fineprune.labels.label_watch import LabelWatch
from fineprune.labels.ranking import Ranking
from fineprune.labels.review_page import Samples, Show, review_section
from fineprune.runs.history import has_evidence, read_evaluated, read_evidence, read_history
from fineprune.runs.run import Run
from fineprune.runs.training_set import UNKNOWN, TrainingSet


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

    @functools.cached_property
    def times_skipped(self) -> npt.NDArray[np.int64]:
        """In how many epochs of all runs each sample was skipped; int64, shape (N,).

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

    def facts(self) -> list[str]:
        """Return sentences on what the evidence says of the labels; see ``LabelWatch.facts``."""
        return facts_of(self.ranking, self.classes)

    def recognised(self) -> list[float | None]:
        """Return the share of the evaluated samples of each class that the runs recognised at last.

        It is None for a class without such samples, or if no run has kept its predictions.
        """
        number = self.watch.num_classes
        read = [read_evaluated(r.path, number, r.summary.accuracy_last) for r in self.runs]
        kept = [np.zeros((2, 0), np.int64), *(part for part in read if part is not None)]
        labels, predictions = np.concatenate(kept, axis=1)
        totals = np.bincount(labels, minlength=number)
        right = np.bincount(labels[labels == predictions], minlength=number)
        return [float(r / t) if t else None for r, t in zip(right, totals, strict=True)]

    def review(
        self, most: int | None = None, show: Show | None = None, notes: Sequence[str] = ()
    ) -> str:
        """Return the section of a page that lists the suspects, as HTML; see ``review_section``."""
        known = self.training_set
        labels = None if (known.labels == UNKNOWN).any() else known.labels
        samples = Samples(unambiguous(self.classes), labels, known.keys, known.index, show)
        if len(self.runs) > 1:
            notes = [f"The evidence of {len(self.runs)} runs is added.", *notes]
        return review_section(self.watch.evidence(), self.ranking, samples, most, notes)


def read_inspected(runs: Sequence[Run]) -> Inspected:
    """Read what runs say of their samples.

    Runs with ``data.without``, which did not train the suspects of another run, are left out beside
    runs that did.

    Raises:
        InputError: There is no run, a run has kept no evidence, or two runs have other samples or
            labels.
    """
    whole = [run for run in runs if not run.recipe.get("data", {}).get("without")]
    runs = with_evidence(whole or runs)
    if not runs:
        raise InputError("expected at least one finished run to inspect, got none")
    total, first = read_evidence(runs[0].path, runs[0].summary.train_samples)
    for run in runs[1:]:  # One at a time, since evidence can be large.
        watch, training_set = read_evidence(run.path, run.summary.train_samples)
        if not (
            np.array_equal(first.index, training_set.index)
            and np.array_equal(first.labels, training_set.labels)
            and (first.classes, first.keys) == (training_set.classes, training_set.keys)
        ):
            raise InputError(
                f"expected runs on the same samples and labels, got different ones in {run.path} "
                f"and {runs[0].path}: inspect one after the other"
            )
        total.merge(watch)
    return Inspected(runs, first, total, total.ranking())


def with_evidence(runs: Sequence[Run]) -> list[Run]:
    """Leave out the runs of a comparison that kept no evidence, unless none has kept any.

    Most arms of a comparison record no more than their policies need.
    """
    kept = [run for run in runs if run.comparison is None or has_evidence(run.path)]
    return kept or list(runs)


def facts_of_run(run: Run) -> list[str]:
    """Return sentences on what the evidence of a finished run says of its labels."""
    return read_inspected([run]).facts()
