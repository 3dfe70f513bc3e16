"""RunFolder: the files that a run writes while it trains.

The folder holds ``recipe.toml`` (complete, as run), ``metrics.jsonl`` (one line per epoch),
``counts/*.npy`` (the counts of each window), ``history/*.npy`` (the loss and the prediction of each
sample in each epoch, the labels and the evidence on them), ``checkpoint.pt`` and, when the run is
finished, ``summary.json``. Only the process that holds the folder's lock (``runs.lock``) may write
to it.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError, RunError
from fineprune.runs.files import (
    CHECKPOINT,
    COUNTS,
    HISTORY,
    METRICS,
    RECIPE,
    SUMMARY,
    append_metrics,
    cannot_write,
    digest,
    epoch_file,
    epoch_files,
    metrics_line,
    replacing,
    temporary_of,
    whole_lines,
    write_atomically,
)
from fineprune.runs.history import EVALUATED, EVIDENCE, LABELS, Records
from fineprune.runs.summary import Summary, write_summary
from fineprune.runs.training_set import TRAINING_SET, TrainingSet, write_training_set


class RunFolder:
    """The files of one run.

    Attributes:
        path: The folder.
        recipe, metrics, checkpoint, summary: The paths of the files.
        counts, history: The paths of the subfolders that hold the counts and the history.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / RECIPE
        self.metrics = path / METRICS
        self.checkpoint = path / CHECKPOINT
        self.summary = path / SUMMARY
        self.counts = path / COUNTS
        self.history = path / HISTORY
        self._written = hashlib.sha256()  # of the metrics that this process wrote or checked

    def files(self) -> list[str]:
        """Return the names of the run's files that exist."""
        files = (self.recipe, self.metrics, self.checkpoint, self.summary)
        return [path.name for path in (*files, self.counts, self.history) if path.exists()]

    def begin(self, recipe: str) -> None:
        """Start a run: write its recipe, and remove the epochs of a run that has no checkpoint."""
        self._clean(from_epoch=0)
        self.metrics.unlink(missing_ok=True)
        for name in (LABELS, EVALUATED, EVIDENCE, TRAINING_SET):
            (self.history / name).unlink(missing_ok=True)
        write_atomically(self.recipe, recipe)

    def go_on(self, epochs: int, metrics_digest: str) -> None:
        """Continue from a checkpoint: check the metrics, and remove those of later epochs.

        Args:
            epochs: The number of epochs that had ended when the checkpoint was written.
            metrics_digest: The value of ``metrics_digest()`` at that time.
        """
        lines = whole_lines(self.metrics)
        if len(lines) < epochs:
            raise InputError(
                f"expected the metrics of {epochs} epochs in {self.metrics}, as in {CHECKPOINT}, "
                f"got {len(lines)}: restore the file, or train into a new folder"
            )
        if digest(lines[:epochs]) != metrics_digest:
            raise InputError(
                f"expected {self.metrics} as it was when {CHECKPOINT} was written, got a file "
                f"whose first {epochs} lines differ: restore it, or train into a new folder"
            )
        write_atomically(self.metrics, "".join(lines[:epochs]))
        self._written.update("".join(lines[:epochs]).encode())
        self._clean(from_epoch=epochs)

    def append(self, metrics: dict[str, Any]) -> None:
        """Append the metrics of one epoch."""
        append_metrics(self.metrics, metrics)
        self._written.update(metrics_line(metrics).encode())

    def metrics_digest(self) -> str:
        """Return the digest of all metrics so far, which the next checkpoint stores."""
        if digest(whole_lines(self.metrics)) != self._written.hexdigest():
            raise RunError(
                f"{self.metrics} was changed while the run trained: restore it and add --resume, "
                f"or train into a new folder"
            )
        return self._written.hexdigest()

    def write_counts(self, epoch: int, counts: npt.NDArray[np.integer]) -> None:
        """Write the counts of a window.

        Args:
            epoch: The last epoch of the window, counted from 0.
            counts: The counts; integers, shape (N,).
        """
        _write(epoch_file(self.counts, epoch), counts)

    def write_history(self, epoch: int, records: Records) -> None:
        """Write the history of an epoch.

        Args:
            epoch: The epoch, counted from 0.
            records: The result of ``history.pack_epoch``, shape (N,).
        """
        _write(epoch_file(self.history, epoch), records)

    def write_evidence(self, state: dict[str, Any]) -> None:
        """Write the evidence on the labels: the state of a ``LabelWatch``."""
        with _replacing(self.history / EVIDENCE) as file:
            torch.save(state, file)

    def finish(self, summary: Summary) -> None:
        """Write the summary, which marks the run as finished."""
        write_summary(self.summary, summary)

    def write_training_set(self, training_set: TrainingSet) -> None:
        """Write which samples the run trained, out of which training set."""
        write_training_set(self.history / TRAINING_SET, training_set)

    def write_labels(self, labels: npt.NDArray[np.integer]) -> None:
        """Write the label of each training sample: ``history.pack_classes``, shape (N,)."""
        _write(self.history / LABELS, labels)

    def write_evaluated(self, classes: npt.NDArray[np.integer]) -> None:
        """Write the labels and the predictions of the last evaluation, shape (2, n)."""
        _write(self.history / EVALUATED, classes)

    def _clean(self, from_epoch: int) -> None:
        """Remove what a killed process left unfinished, and the arrays of later epochs."""
        others = [self.history / name for name in (LABELS, EVALUATED, EVIDENCE, TRAINING_SET)]
        for path in (self.recipe, self.metrics, self.checkpoint, self.summary, *others):
            temporary_of(path).unlink(missing_ok=True)
        for folder in (self.counts, self.history):
            for path in epoch_files(folder, unfinished=True).values():
                path.unlink()
            for epoch, path in epoch_files(folder).items():
                if epoch >= from_epoch:
                    path.unlink()


def _write(path: Path, array: npt.NDArray[Any]) -> None:
    with _replacing(path) as file:
        np.save(file, array, allow_pickle=False)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file of a subfolder, which is made if it is missing, as ``files.replacing`` does."""
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from None
    with replacing(path) as file:
        yield file
