"""Computes the summary of a finished run from its metrics."""

import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import fineprune
from fineprune.networks.weights import weights_digest
from fineprune.runs.files import read_metrics
from fineprune.runs.summary import LEFT_OUT, Detection, Summary
from fineprune.training.data import Data
from fineprune.training.hardware import describe
from fineprune.training.own_code import code_digest
from fineprune.training.recipe import Recipe

if TYPE_CHECKING:
    from fineprune.training.trainer import Trainer


def input_digests(recipe: Recipe, data: Data) -> dict[str, str | None]:
    """Return what ``Summary.digests`` of a run that starts now will return."""
    weights = recipe.network.weights
    return {
        **data.digests,
        "weights": None if weights is None else weights_digest(Path(weights)),
        "code": code_digest(recipe),
    }


def summary(trainer: "Trainer") -> Summary:
    """Return the summary of a run, whose epochs are all trained."""
    recipe, data, digests = trainer.recipe, trainer.data, trainer.digests
    metrics, evaluated_on = read_metrics(trainer.files.metrics), data.evaluated_on
    found = [line[f"{evaluated_on}_accuracy"] for line in metrics]
    accuracies = [accuracy for accuracy in found if accuracy is not None]
    samples_full = data.num_samples * recipe.training.epochs
    best = sorted(accuracies)[-3:]
    suspicion = metrics[-1].get("suspicion")
    return Summary(
        arm=recipe.run.arm or recipe.pruning.policy,
        policy=recipe.pruning.policy,
        seed=recipe.run.seed,
        epochs=recipe.training.epochs,
        network=recipe.network.name,
        dataset=recipe.data.name,
        parameters=sum(p.numel() for p in trainer.model.parameters()),
        train_samples=data.num_samples,
        samples_trained=_total(metrics, "samples"),
        samples_full=samples_full,
        skipped_share=_total(metrics, "skipped") / samples_full,
        steps=_total(metrics, "steps"),
        pruned_epochs=sum(line["pruned"] for line in metrics),
        seconds_train=_total(metrics, "seconds"),
        seconds_bookkeeping=_total(metrics, "bookkeeping_seconds"),
        seconds_evaluate=_total(metrics, "evaluate_seconds"),
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
        ranks=recipe.distributed.workers if recipe.distributed.served else trainer.ranks.size,
        git=_git_revision(),
        weights_sha256=digests["weights"],
        labels_sha256=digests["labels"],
        data_sha256=digests["data"],
        left_out_sha256=digests[LEFT_OUT],
        code_sha256=recipe.run.code,
        suspicion=None if suspicion is None else Detection(**suspicion),
    )


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
