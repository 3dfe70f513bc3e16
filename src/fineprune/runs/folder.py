"""RunFolder: the files that a run writes while it trains.

The folder holds ``recipe.toml`` (complete, as run), ``metrics.jsonl`` (one line per epoch),
``counts/*.npy`` (the counts of each window), ``history/*.npy`` (the loss and the prediction of each
sample in each epoch, the labels and the evidence on them), ``checkpoint.pt`` and, when the run is
finished, ``summary.json``. Only the process that holds the folder's lock (``runs.lock``) may write
to it.
"""

import hashlib
from pathlib import Path
from typing import Any

from fineprune.errors import InputError, RunError
from fineprune.runs.files import (
    CHECKPOINT,
    COUNTS,
    HISTORY,
    METRICS,
    RECIPE,
    SUMMARY,
    append_metrics,
    digest,
    epoch_files,
    whole_lines,
)
from fineprune.runs.history import EVALUATED, EVIDENCE
from fineprune.runs.training_set import TRAINING_SET
from fineprune.writing import temporary_of, write_atomically

# The files of the history that are not of one epoch.
_OF_THE_RUN = (EVALUATED, EVIDENCE, TRAINING_SET)


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
        for name in _OF_THE_RUN:
            (self.history / name).unlink(missing_ok=True)
        write_atomically(self.recipe, recipe)

    def go_on(self, recipe: str, epochs: int, metrics_digest: str) -> None:
        """Continue from a checkpoint: check the metrics, and remove those of later epochs.

        Args:
            recipe: The recipe with which the run goes on. It replaces the earlier one, because what
                reads the folder later needs the places where the data are now.
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
        write_atomically(self.recipe, recipe)

    def append(self, metrics: dict[str, Any]) -> None:
        """Append the metrics of one epoch."""
        self._written.update(append_metrics(self.metrics, metrics).encode())

    def metrics_digest(self) -> str:
        """Return the digest of all metrics so far, which the next checkpoint stores."""
        if digest(whole_lines(self.metrics)) != self._written.hexdigest():
            raise RunError(
                f"{self.metrics} was changed while the run trained: restore it and add --resume, "
                f"or train into a new folder"
            )
        return self._written.hexdigest()

    def _clean(self, from_epoch: int) -> None:
        """Remove what a killed process left unfinished, and the arrays of later epochs."""
        others = [self.history / name for name in _OF_THE_RUN]
        for path in (self.recipe, self.metrics, self.checkpoint, self.summary, *others):
            temporary_of(path).unlink(missing_ok=True)
        for folder in (self.counts, self.history):
            for path in epoch_files(folder, unfinished=True).values():
                path.unlink()
            for epoch, path in epoch_files(folder).items():
                if epoch >= from_epoch:
                    path.unlink()
