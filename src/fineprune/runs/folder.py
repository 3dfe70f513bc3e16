"""RunFolder: the files that a run writes while it trains.

The folder holds ``recipe.toml`` (complete, as run), ``metrics.jsonl`` (one line per epoch),
``counts/*.npy`` (the counts of each window), ``history/*`` (see ``runs.history``),
``checkpoint.pt`` and, when the run is finished, ``summary.json``. Only the process that holds the
folder's lock (``runs.lock``) may write to it.
"""

import hashlib
from pathlib import Path

from fineprune.errors import InputError
from fineprune.runs.files import (
    CHECKPOINT,
    COUNTS,
    HISTORY,
    METRICS,
    RECIPE,
    SUMMARY,
    epoch_files,
    read_metrics,
    whole_lines,
)
from fineprune.runs.history import EVALUATED, EVIDENCE
from fineprune.runs.run import check_metrics
from fineprune.runs.training_set import TRAINING_SET
from fineprune.writing import write_atomically


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

    def files(self) -> list[str]:
        """Return the names of the run's files that exist."""
        names = (RECIPE, METRICS, CHECKPOINT, SUMMARY, COUNTS, HISTORY)
        return [name for name in names if (self.path / name).exists()]

    def begin(self, recipe: str) -> None:
        """Start a run: write its recipe, and remove the epochs of a run that has no checkpoint."""
        self._clean(from_epoch=0)
        self.metrics.unlink(missing_ok=True)
        for name in (EVALUATED, EVIDENCE, TRAINING_SET):
            (self.history / name).unlink(missing_ok=True)
        write_atomically(self.recipe, recipe)

    def metrics_digest(self, epochs: int) -> str:
        """Return the SHA-256 digest of the metrics of the first epochs, in hexadecimal."""
        lines = whole_lines(self.metrics)[:epochs]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def go_on(self, recipe: str, epochs: int, digest: str) -> None:
        """Continue from a checkpoint, and remove the metrics of later epochs.

        Args:
            recipe: The recipe with which the run goes on. It replaces the earlier one, because what
                reads the folder later needs the places where the data are now.
            epochs: The number of epochs that had ended when the checkpoint was written.
            digest: The digest of their metrics.
        """
        metrics = read_metrics(self.metrics, epochs)
        check_metrics(self.path, metrics)
        found = [values["epoch"] for values in metrics]
        if found != list(range(epochs)):
            raise InputError(
                f"expected the metrics of {epochs} epochs in {self.metrics}, as in {CHECKPOINT}, "
                f"got those of the epochs {found}"
            )
        if self.metrics_digest(epochs) != digest:
            raise InputError(
                f"expected the metrics in {self.metrics} with which {CHECKPOINT} was written, got "
                f"others: restore the file, or train into a new folder"
            )
        write_atomically(self.metrics, "".join(whole_lines(self.metrics)[:epochs]))
        self._clean(from_epoch=epochs)
        write_atomically(self.recipe, recipe)

    def _clean(self, from_epoch: int) -> None:
        """Remove the arrays of later epochs."""
        for folder in (self.counts, self.history):
            for epoch, path in epoch_files(folder).items():
                if epoch >= from_epoch:
                    path.unlink()
