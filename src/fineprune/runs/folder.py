"""RunFolder: what a run writes while it trains, in the order in which it must be on disk.

The folder holds ``recipe.toml`` (complete, as run), ``metrics.jsonl`` (one line per epoch),
``counts/*.npy`` (the counts of each window), ``checkpoint.pt`` and, when the run is finished,
``summary.json``. Its only writer is the process that holds the folder's lock (``runs.lock``).
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError
from fineprune.runs.files import (
    CHECKPOINT,
    COUNTS,
    METRICS,
    RECIPE,
    SUMMARY,
    append_metrics,
    digest,
    replacing,
    whole_lines,
    write_atomically,
    write_json,
)


class RunFolder:
    """The files of one run.

    Args:
        path: The folder; it need not exist.

    Attributes:
        path: The folder.
        recipe, metrics, checkpoint, summary: The paths of its files.
        counts: The folder of the counts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / RECIPE
        self.metrics = path / METRICS
        self.checkpoint = path / CHECKPOINT
        self.summary = path / SUMMARY
        self.counts = path / COUNTS

    def files(self) -> list[str]:
        """Return the names of the files of a run that are there."""
        known = (self.recipe, self.metrics, self.checkpoint, self.summary, self.counts)
        return [path.name for path in known if path.exists()]

    def begin(self, recipe: str) -> None:
        """Start a run: write its recipe and remove the epochs of a start without a checkpoint.

        Args:
            recipe: The recipe as run, in TOML.
        """
        self._clean(from_epoch=0)
        self.metrics.unlink(missing_ok=True)
        write_atomically(self.recipe, recipe)

    def go_on(self, epochs: int, metrics_digest: str) -> None:
        """Go on from a checkpoint: check the metrics before it, and remove what came after it.

        Args:
            epochs: The number of epochs that had ended when the checkpoint was made.
            metrics_digest: The value of ``metrics_digest()`` at that time.

        Raises:
            InputError: The metrics are not those that the checkpoint was made with.
        """
        lines = whole_lines(self.metrics)
        if len(lines) < epochs:
            raise InputError(
                f"expected the metrics of {epochs} epochs in {self.metrics}, as {CHECKPOINT} "
                f"beside it has, got {len(lines)}: restore the file, or train into a new folder"
            )
        if digest(lines[:epochs]) != metrics_digest:
            raise InputError(
                f"expected {self.metrics} as it was when {CHECKPOINT} beside it was written, but "
                f"its first {epochs} lines differ: restore the file, or train into a new folder"
            )
        write_atomically(self.metrics, "".join(lines[:epochs]))
        self._clean(from_epoch=epochs)

    def append(self, metrics: dict[str, Any]) -> None:
        """Append the metrics of an epoch."""
        append_metrics(self.metrics, metrics)

    def metrics_digest(self) -> str:
        """Return the digest of all lines of the metrics, for the checkpoint that follows them."""
        return digest(whole_lines(self.metrics))

    def write_counts(self, epoch: int, counts: npt.NDArray[np.integer]) -> None:
        """Write the counts of the window that ``epoch`` (from 0) closes; integers, shape (N,)."""
        self.counts.mkdir(exist_ok=True)
        with replacing(self.counts / f"epoch-{epoch + 1:04d}.npy") as file:
            np.save(file, counts, allow_pickle=False)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary, which makes the run a finished one."""
        write_json(self.summary, summary)

    def _clean(self, from_epoch: int) -> None:
        """Remove unfinished files of a killed process, and the counts of epochs to come."""
        for path in [*self.path.glob("*.tmp"), *self.counts.glob("*.tmp")]:
            path.unlink()
        for path in self.counts.glob("epoch-*.npy"):
            if int(path.stem.removeprefix("epoch-")) > from_epoch:
                path.unlink()
