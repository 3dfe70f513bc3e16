"""Inspected: a finished run together with its history."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError
from fineprune.labels.label_watch import LabelWatch
from fineprune.runs.history import (
    History,
    needed_evidence,
    read_evaluated,
    read_evidence,
    read_history,
)
from fineprune.runs.run import Run, split_by, told_apart
from fineprune.runs.training_set import TrainingSet, read_training_set


@dataclass(frozen=True, eq=False)
class Inspected:
    """A finished run, and what it has kept of each sample.

    Attributes:
        name: The network, the arm and the seed, such as ``resnet18 adaptive 0``, and the folder if
            another run has the same.
        run: The run.
        history: The losses and the predictions of the training samples in each epoch.
        labels: The labels that the run trained with; int64, shape (N,).
        evaluated: The labels (row 0) and the predictions (row 1) of the last evaluation; int64,
            shape (2, n). None if the run has not kept them.
        watch: The evidence on the labels; None if the run has kept none.
    """

    name: str
    run: Run
    history: History
    labels: npt.NDArray[np.int64]
    evaluated: npt.NDArray[np.int64] | None
    watch: LabelWatch | None

    def settings(self, besides: Sequence[str] = ()) -> str:
        """Return the settings in which runs of one arm and several seeds agree.

        The arms of a comparison may differ in theirs, so those of its runs are left out.
        """
        sections = {} if self.run.comparison is not None else self.run.recipe
        left_out = {"run", *besides}
        return repr({name: sections[name] for name in sections if name not in left_out})

    def training_set(self) -> TrainingSet:
        """Return the training set that the run knew, with the labels that it trained with."""
        return read_training_set(self.run.path, len(self.labels))

    def times_skipped(self) -> npt.NDArray[np.int64]:
        """Return in how many epochs each sample was skipped; int64, shape (N,).

        Epochs that keep all samples count for none, although ``training.drop_last`` or a broken
        file leaves some out. Such samples of a pruned epoch are not told from skipped ones.
        """
        pruned = np.array([line["pruned"] for line in self.run.metrics], dtype=bool)
        return np.asarray((~self.history.trained[pruned]).sum(axis=0), dtype=np.int64)


def facts_of_run(run: Run) -> list[str]:
    """Return sentences on what the evidence of a finished run says of its labels."""
    summary = run.summary
    watch = needed_evidence(run.path, summary.train_samples, "to know about its labels")
    names = read_training_set(run.path, summary.train_samples).classes
    return watch.facts(names or None)


def read_inspected(runs: Sequence[Run]) -> list[Inspected]:
    """Read the histories of runs, of which there is at least one."""
    if not runs:
        raise InputError("expected at least one finished run to inspect, got none")
    names = [f"{s.network} {s.arm} {s.seed}" for s in (run.summary for run in runs)]
    names = told_apart(names, [f" ({run.path})" for run in runs])
    return [_read(name, run) for name, run in zip(names, runs, strict=True)]


def runs_by_arm(runs: Sequence[Inspected]) -> list[list[Inspected]]:
    """Return the runs of each network and arm, for each dataset and comparison, in given order.

    Runs that belong to no comparison are of one arm only if they differ in nothing but their seeds.
    """

    def arm(run: Inspected) -> tuple[object, ...]:
        summary = run.run.summary
        names = summary.network, summary.dataset, summary.arm
        return *names, run.run.comparison, run.settings()

    return list(split_by(arm, runs).values())


def _read(name: str, run: Run) -> Inspected:
    samples = run.summary.train_samples
    history = read_history(run.path, samples)
    if history is None:
        raise InputError(
            f"expected the history of the samples in {run.path}, found none: train with "
            f"run.history = true and with data whose classes are known"
        )
    epochs = list(range(run.summary.epochs))
    if history.epochs != epochs:
        raise InputError(
            f"expected a history of {len(epochs)} epochs in {run.path}, got {len(history.epochs)}: "
            f"restore the files, or train again"
        )
    labels = read_training_set(run.path, samples).trained_labels
    evaluated, watch = read_evaluated(run.path), read_evidence(run.path, samples)
    return Inspected(name, run, history, labels, evaluated, watch)
