"""What a run keeps at its end: evidence on its labels, how wrong ones are found, and a summary."""

import platform
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

import fineprune
from fineprune.labels.label_watch import LabelWatch
from fineprune.networks.weights import weights_digest
from fineprune.runs.files import read_metrics, write_array
from fineprune.runs.history import EVALUATED, EVIDENCE, pack_classes
from fineprune.runs.summary import LEFT_OUT, Detection, Summary
from fineprune.runs.training_set import TRAINING_SET, UNKNOWN, write_training_set
from fineprune.training.data import Data
from fineprune.training.evaluate import Evaluation
from fineprune.training.hardware import describe
from fineprune.training.own_code import code_digest
from fineprune.training.recipe import Recipe
from fineprune.writing import replacing

if TYPE_CHECKING:
    from fineprune.training.trainer import Trainer


def write_evidence(
    folder: Path, data: Data, watch: LabelWatch | None, evaluation: Evaluation
) -> None:
    """Write what is known after the last epoch into the folder of the history, which exists.

    Args:
        folder: The folder.
        data: The data of the run.
        watch: The evidence on the labels; None if no logits were recorded.
        evaluation: The last evaluation.
    """
    if watch is not None:  # Before anything reads the evidence, which rounds it.
        with replacing(folder / EVIDENCE) as file:
            torch.save(watch.state_dict(), file)
    training_set = data.training_set()
    labels = training_set.trained_labels
    if (labels == UNKNOWN).any():
        labels = np.full_like(labels, UNKNOWN)
    if watch is not None:
        # What was recorded is what was trained, whatever the data set says.
        seen = watch.evidence().labels.long().cpu().numpy()
        labels = np.where(seen >= 0, seen, labels)
    if not (labels == UNKNOWN).any():
        whole = training_set.labels.copy()
        whole[training_set.index] = labels
        write_training_set(folder / TRAINING_SET, replace(training_set, labels=whole))
    both = np.stack([evaluation.labels.numpy(), evaluation.predictions.numpy()])
    write_array(folder / EVALUATED, pack_classes(both, data.classes))


def detection(
    scores: npt.NDArray[np.floating], suspects: int, wrong: npt.NDArray[np.bool_]
) -> Detection:
    """Return how well a ranking finds the wrong labels.

    Args:
        scores: The score of each sample, the larger the more suspicious, NaN the least; shape (N,).
        suspects: The number of samples that are called suspicious.
        wrong: Which labels are wrong; bool, shape (N,).
    """
    order = np.argsort(-np.where(np.isnan(scores), -np.inf, scores), kind="stable")
    hits = wrong[order]
    number, right = int(hits.sum()), int((~hits).sum())
    # The pairs of a wrong and a right label in which the wrong one is the more suspicious (the
    # statistic of Mann and Whitney).
    ordered = int((right - np.cumsum(~hits))[hits].sum())
    found = int(hits[:suspects].sum())
    precisions = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    return Detection(
        wrong=number,
        wrong_share=number / len(wrong),
        roc_area=ordered / (number * right) if number and right else None,
        average_precision=float((hits * precisions).sum()) / number if number else None,
        suspects=suspects,
        precision=found / suspects if suspects else None,
        # With no suspects, it is 0. If it were None, a mean over seeds would be too high.
        recall=found / number if number else None,
        r_precision=int(hits[:number].sum()) / number if number else None,
    )


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
