"""Computes the summary of a finished run from its metrics."""

import platform
import statistics
import subprocess
from typing import Any

import numpy as np
import torch

import fineprune
from fineprune.runs.run import SUMMARY_VERSION
from fineprune.training.hardware import describe
from fineprune.training.suspicion import detection
from fineprune.training.train_state import TrainState


def summary(state: TrainState, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of ``summary.json``.

    Args:
        state: The state of the run after its last epoch.
        metrics: The metrics of all epochs, in order.
    """
    recipe = state.recipe
    num_samples = state.data.num_samples
    evaluated_on = state.data.evaluated_on
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
    result = {
        "version": SUMMARY_VERSION,
        "arm": recipe.run.arm or recipe.pruning.policy,
        "policy": recipe.pruning.policy,
        "seed": recipe.run.seed,
        "epochs": recipe.training.epochs,
        "network": recipe.network.name,
        "dataset": recipe.data.name,
        "parameters": sum(p.numel() for p in state.model.parameters()),
        "train_samples": num_samples,
        "samples_trained": sum(line["samples"] for line in metrics),
        # Metrics of an older version do not contain the number.
        "forward_samples": sum(line.get("forward_samples", line["samples"]) for line in metrics),
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
        "ranks": state.processes,
        "git": _git_revision(),
    }
    top5 = metrics[-1].get(f"{evaluated_on}_top5")
    if top5 is not None:
        result["top5_last"] = top5
    if state.weights_digest is not None:
        result["weights_sha256"] = state.weights_digest
    wrong = state.data.wrong
    if wrong is not None:
        # From the metrics, because at the end of a window the policy has cleared its suspicion.
        figures = metrics[-1].get("suspicion") or detection(None, wrong)
        number = int(wrong.sum())
        result["suspicion"] = {"wrong": number, "wrong_share": number / num_samples, **figures}
    return result


def _git_revision() -> str | None:
    """Return the git revision of the working directory; None if it is not in a git repository."""
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None
