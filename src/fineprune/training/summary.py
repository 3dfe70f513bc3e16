"""Computes the summary of a finished run from its metrics."""

import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fineprune
from fineprune.networks.weights import weights_digest
from fineprune.runs.summary import LEFT_OUT, Detection, Summary
from fineprune.training.data import Data
from fineprune.training.hardware import describe
from fineprune.training.own_code import code_digest
from fineprune.training.recipe import Recipe
from fineprune.training.suspicion import FIGURES
from fineprune.training.train_state import TrainState


def input_digests(recipe: Recipe, data: Data) -> dict[str, str | None]:
    """Return what ``Summary.digests`` of a run that starts now will return."""
    weights = recipe.network.weights
    return {
        "data": data.fingerprint,
        "labels": data.labels_digest,
        "weights": None if weights is None else weights_digest(Path(weights)),
        LEFT_OUT: data.left_out_digest,
        "code": code_digest(recipe),
    }


def summary(state: TrainState, metrics: list[dict[str, Any]]) -> Summary:
    """Return the summary of a run."""
    recipe, strategy = state.recipe, state.recipe.distributed
    num_samples = state.data.num_samples
    evaluated_on = state.data.evaluated_on
    found = [line[f"{evaluated_on}_accuracy"] for line in metrics]
    accuracies = [accuracy for accuracy in found if accuracy is not None]
    full = [line["seconds"] for line in metrics if not line["pruned"]]
    pruned = [line["seconds"] for line in metrics if line["pruned"]]
    samples_full = num_samples * recipe.training.epochs
    best = sorted(accuracies)[-3:]
    return Summary(
        arm=recipe.run.arm or recipe.pruning.policy,
        policy=recipe.pruning.policy,
        seed=recipe.run.seed,
        epochs=recipe.training.epochs,
        network=recipe.network.name,
        dataset=recipe.data.name,
        parameters=sum(p.numel() for p in state.model.parameters()),
        train_samples=num_samples,
        samples_trained=_total(metrics, "samples"),
        samples_full=samples_full,
        skipped_share=_total(metrics, "skipped") / samples_full,
        steps=_total(metrics, "steps"),
        pruned_epochs=len(pruned),
        seconds_train=_total(metrics, "seconds"),
        seconds_bookkeeping=_total(metrics, "bookkeeping_seconds"),
        seconds_evaluate=_total(metrics, "evaluate_seconds"),
        median_full_epoch_seconds=statistics.median(full) if full else None,
        median_pruned_epoch_seconds=statistics.median(pruned) if pruned else None,
        accuracy_last=accuracies[-1],
        accuracy_best3=sum(best) / len(best),
        top5_last=metrics[-1].get(f"{evaluated_on}_top5"),
        evaluated_on=evaluated_on,
        hardware=describe(recipe.run.device, recipe.run.threads),
        versions={
            "fineprune": fineprune.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        precision=recipe.run.precision,
        ranks=strategy.workers if strategy.served else state.ranks.size,
        git=_git_revision(),
        weights_sha256=state.weights_digest,
        labels_sha256=state.data.labels_digest,
        data_sha256=state.data.fingerprint,
        left_out_sha256=state.data.left_out_digest,
        code_sha256=recipe.run.code,
        suspicion=_detection(state, metrics[-1]),
    )


def _detection(state: TrainState, last: dict[str, Any]) -> Detection | None:
    wrong = state.data.wrong
    if wrong is None:
        return None
    # From the metrics, because at the end of a window the policy has cleared its suspicion.
    figures = last.get("suspicion") or dict.fromkeys(FIGURES)
    number = int(wrong.sum())
    return Detection(wrong=number, wrong_share=number / len(wrong), **figures)


def _total(metrics: list[dict[str, Any]], name: str) -> Any:
    return sum(line[name] for line in metrics)


def _git_revision() -> str | None:
    """Return the git revision of the working directory; None if it is not in a git repository."""
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None
