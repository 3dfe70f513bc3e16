"""RunFolder: writes one run's folder, line by line and file by file, so that nothing is lost."""

import json
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fineprune
from fineprune.errors import InputError
from fineprune.training.hardware import describe
from fineprune.training.train_state import Job
from fineprune.training.recipe import Recipe
from fineprune.runs.files import (
    METRICS,
    RECIPE,
    SUMMARY,
    append_metrics,
    read_metrics,
    write_atomically,
    write_json_atomically,
)

SUMMARY_VERSION = 1


class RunFolder:
    """The folder that a run writes.

    ``recipe.toml`` (complete, as run), ``metrics.jsonl`` (a line an epoch), ``counts/*.npy`` (each
    window's counts), ``checkpoint.pt`` and, when the run is done, ``summary.json``.

    Args:
        folder: made if it is not there.
        recipe: the recipe as run, nothing "auto" left in it.
    """

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder = folder
        self.recipe = recipe
        self.checkpoint = folder / "checkpoint.pt"
        self._metrics = folder / METRICS
        self._summary = folder / SUMMARY

    def checkpoint_to_resume(self, resume: bool) -> Path | None:
        """Return the checkpoint to go on from, if there is one. Writes nothing.

        Raises:
            InputError: the folder holds a run already and ``resume`` is not asked for.
        """
        if not resume and (self._metrics.exists() or self._summary.exists()):
            raise InputError(
                f"expected a new folder for the run, but {self.folder} holds one: give another "
                f"--out, or --resume to continue it"
            )
        return self.checkpoint if resume and self.checkpoint.exists() else None

    def begin(self) -> None:
        """Make the folder and write the recipe; epochs before a first checkpoint go."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._metrics.unlink(missing_ok=True)
        write_atomically(self.folder / RECIPE, self.recipe.to_toml())

    def forget_from(self, epoch: int) -> None:
        """Drop the metrics of ``epoch`` and later ones: a resumed run trains them again."""
        kept = [line for line in read_metrics(self._metrics) if line["epoch"] < epoch]
        write_atomically(self._metrics, "".join(json.dumps(line) + "\n" for line in kept))

    def append(self, metrics: dict[str, Any]) -> None:
        """Write an epoch's metrics."""
        append_metrics(self._metrics, metrics)

    def write_counts(self, epoch: int, counts: torch.Tensor) -> None:
        """Write the counts of the window that ``epoch`` (from 0) closes."""
        folder = self.folder / "counts"
        folder.mkdir(exist_ok=True)
        temporary = folder / "counts.tmp"
        with temporary.open("wb") as file:
            np.save(file, counts.numpy(), allow_pickle=False)
        temporary.replace(folder / f"epoch-{epoch + 1:04d}.npy")

    def finish(self, job: Job, arm: str | None) -> dict[str, Any]:
        """Write ``summary.json`` from the metrics and return it.

        Args:
            job: as it ended.
            arm: the run's name in a comparison; by default the policy's.
        """
        recipe = self.recipe
        num_samples = job.data.num_samples
        evaluated_on = job.data.evaluated_on
        metrics = read_metrics(self._metrics)
        accuracies = [
            line[f"{evaluated_on}_accuracy"]
            for line in metrics
            if line[f"{evaluated_on}_accuracy"] is not None
        ]
        full = [line["seconds"] for line in metrics if not line["pruned"]]
        pruned = [line["seconds"] for line in metrics if line["pruned"]]
        samples_full = num_samples * recipe.training.epochs
        skipped = sum(line["skipped"] for line in metrics)
        best = sorted(accuracies)[-3:]
        summary = {
            "version": SUMMARY_VERSION,
            "arm": arm or recipe.pruning.policy,
            "policy": recipe.pruning.policy,
            "seed": recipe.run.seed,
            "epochs": recipe.training.epochs,
            "network": recipe.network.name,
            "dataset": recipe.data.name,
            "parameters": sum(p.numel() for p in job.model.parameters()),
            "train_samples": num_samples,
            "samples_trained": sum(line["samples"] for line in metrics),
            "samples_full": samples_full,
            "skipped_share": skipped / samples_full,
            "steps": sum(line["steps"] for line in metrics),
            "pruned_epochs": len(pruned),
            "seconds_train": sum(line["seconds"] for line in metrics),
            "seconds_bookkeeping": sum(line["bookkeeping_seconds"] for line in metrics),
            "seconds_evaluate": sum(line["evaluate_seconds"] for line in metrics),
            "median_full_epoch_seconds": statistics.median(full) if full else None,
            "median_pruned_epoch_seconds": statistics.median(pruned) if pruned else None,
            "accuracy_last": accuracies[-1],
            "accuracy_best3": sum(best) / len(best),
            "evaluated_on": evaluated_on,
            "hardware": describe(recipe.run.device, recipe.run.threads),
            "versions": {
                "fineprune": fineprune.__version__,
                "torch": torch.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
            "precision": recipe.run.precision,
            "ranks": job.processes,
            "git": _git_revision(),
        }
        write_json_atomically(self._summary, summary)
        return summary


def _git_revision() -> str | None:
    """The revision of the user's working folder, where it is a git checkout."""
    try:
        asked = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip() or None if asked.returncode == 0 else None
