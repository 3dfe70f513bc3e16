"""What a run records about an epoch: one line of ``metrics.jsonl``, and the counts of a window."""

import logging
import math
import time
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from fineprune.errors import TrainingDiverged
from fineprune.pruning.policies.scheduled import ScheduledPolicy
from fineprune.runs.files import append_metrics, epoch_file, write_array
from fineprune.runs.folder import RunFolder
from fineprune.runs.history import EVALUATED, EVIDENCE, Records, pack_classes, pack_epoch
from fineprune.runs.training_set import TRAINING_SET, UNKNOWN, write_training_set
from fineprune.training.evaluate import Evaluation, evaluate
from fineprune.training.learning_rate import rate_at
from fineprune.training.suspicion import Suspicion, detection, suspicion_by_evidence, suspicion_of
from fineprune.training.train_state import EpochTotals, TrainState
from fineprune.writing import replacing

_LOGGER = logging.getLogger(__name__)


class EpochEnd(NamedTuple):
    """What is read from all ranks after the last batch of an epoch, before ``Pruner.end_epoch()``.

    Attributes:
        loss: The mean loss, in nats; None if all batches were lost because a server failed.
        counts: The counts of the window that ends with the epoch, as integers of shape (N,); None
            if the epoch does not end a window.
        suspicion: What the policy suspects in the window that ends with the epoch; None if the
            epoch does not end a window, or if it is not known which labels are wrong.
        history: The losses and predictions of the samples, shape (N,); None if the run does not
            keep them.
    """

    loss: float | None
    counts: torch.Tensor | None
    suspicion: Suspicion | None
    history: Records | None


def end_of_epoch(state: TrainState, epoch: int, totals: EpochTotals) -> EpochEnd:
    """Read what ``Pruner.end_epoch()`` changes, and the mean loss. Every rank must call it.

    The evidence on the labels is merged where ``write_epoch`` needs it.
    """
    policy, wrong_known = state.pruner.policy, state.data.wrong is not None
    keeps_evidence = _is_last(state, epoch) and state.recipe.run.history
    if state.pruner.watch is not None and (wrong_known or keeps_evidence):
        state.pruner.synchronize()
    ends_window = isinstance(policy, ScheduledPolicy) and policy.schedule.clears(epoch)
    suspicion = suspicion_of(policy) if wrong_known and ends_window else None
    loss = _mean_loss(state, epoch, totals)
    history = None
    if totals.history is not None:
        losses, predictions = totals.history.merged(state.ranks)
        history = pack_epoch(losses.numpy(), predictions.numpy(), state.data.classes)
    counts = state.pruner.counts if ends_window else None
    return EpochEnd(loss, counts, suspicion, history)


def _is_last(state: TrainState, epoch: int) -> bool:
    return epoch == state.recipe.training.epochs - 1


def _mean_loss(state: TrainState, epoch: int, totals: EpochTotals) -> float | None:
    samples = state.of_all_ranks(totals.samples)
    if not samples:
        return None
    loss: float = state.ranks.sum(totals.loss_sum).item() / samples
    if not math.isfinite(loss):
        data = state.recipe.data
        own = f", or check that all samples of {data.name} are finite" if data.own else ""
        raise TrainingDiverged(
            f"the mean loss of epoch {epoch + 1} is {loss}: the training diverged, so try a "
            f"smaller training.lr than {state.recipe.training.lr:g}{own}"
        )
    return loss


def epoch_metrics(
    state: TrainState, epoch: int, totals: EpochTotals, loss: float | None
) -> dict[str, Any]:
    """Return the metrics of an epoch, with no evaluation yet. Every rank must call it.

    If the policy weights the losses, ``mean_weight`` is the mean over the kept samples.
    With image files, ``broken`` is the number of samples that replaced one whose file is broken.
    """
    training, plan = state.recipe.training, state.pruner.plan
    kept = plan.kept
    samples = state.of_all_ranks(totals.samples)
    metrics: dict[str, Any] = {
        "epoch": epoch,
        "lr": rate_at(training, epoch + max(totals.planned - 1, 0) / max(totals.planned, 1)),
        "pruned": len(kept) < state.data.num_samples,
        "samples": samples,
        "skipped": state.data.num_samples - len(kept),
        "steps": totals.steps_so_far(state.recipe.accumulation),
        "train_loss": loss,
        "nonfinite": state.pruner.nonfinite,
        "seconds": totals.seconds,
        "bookkeeping_seconds": totals.bookkeeping_seconds,
        "evaluate_seconds": 0.0,
    }
    names = [f"{kind}_{what}" for kind in ("test", "validation") for what in ("loss", "accuracy")]
    metrics |= dict.fromkeys(names)
    if plan.weights is not None:
        metrics["mean_weight"] = plan.weights[kept].double().mean().item()
    if totals.broken is not None:
        metrics["broken"] = state.of_all_ranks(totals.broken)
    if totals.distributed:
        metrics["distributed"] = totals.distributed
    return metrics


def write_epoch(
    state: TrainState, files: RunFolder, metrics: dict[str, Any], end: EpochEnd
) -> None:
    """Evaluate the model if the recipe asks for it after this epoch, and write what is known of it.

    This is the history of the epoch, the counts of the window that it ends (the last epoch always
    ends one), and its metrics. To these are added the results of the evaluation and, if it is known
    which labels are wrong, how well the suspicion finds them.
    """
    evaluation, watch = _evaluated(state, metrics), state.pruner.watch
    if state.data.wrong is not None:
        if watch is not None:
            suspicion: Suspicion | None = suspicion_by_evidence(watch)
        else:
            suspicion = end.suspicion or suspicion_of(state.pruner.policy)
        if suspicion is not None:
            metrics["suspicion"] = detection(suspicion, state.data.wrong)
    epoch, counts = metrics["epoch"], end.counts
    last = _is_last(state, epoch)
    if counts is None and last and isinstance(state.pruner.policy, ScheduledPolicy):
        counts = state.pruner.counts
    if counts is not None:
        write_array(epoch_file(files.counts, epoch), counts.numpy())
    if end.history is not None:
        write_array(epoch_file(files.history, epoch), end.history)
        if last and watch is not None:  # Before anything reads the evidence, which rounds it.
            with replacing(files.history / EVIDENCE) as file:
                torch.save(watch.state_dict(), file)
        if last:
            _write_labels(state, files)
        if last and evaluation is not None:
            both = np.stack([evaluation.labels.numpy(), evaluation.predictions.numpy()])
            write_array(files.history / EVALUATED, pack_classes(both, state.data.classes))
    append_metrics(files.metrics, metrics)


def _evaluated(state: TrainState, metrics: dict[str, Any]) -> Evaluation | None:
    """Evaluate the model, or the moving average of its weights, and add the result to metrics."""
    training, epoch = state.recipe.training, metrics["epoch"]
    epochs_left = training.epochs - 1 - epoch
    if (epoch + 1) % training.evaluate_every and epochs_left >= training.evaluate_last:
        return None
    started = time.perf_counter()
    device, data = state.recipe.run.device, state.data
    evaluation = evaluate(state.evaluated, data.evaluation, device, state.autocast, data.classes)
    metrics[f"{data.evaluated_on}_loss"] = evaluation.loss
    metrics[f"{data.evaluated_on}_accuracy"] = evaluation.accuracy
    if evaluation.top5 is not None:
        metrics[f"{data.evaluated_on}_top5"] = evaluation.top5
    metrics["evaluate_seconds"] = time.perf_counter() - started
    unknown = int((evaluation.predictions < 0).sum())
    if unknown:
        _LOGGER.warning(
            "epoch %d: the network returns NaN for %d of %d samples of the %s set, which count as "
            "wrong, and its mean loss is not known: check that these samples are finite",
            *(epoch + 1, unknown, len(evaluation.predictions), data.evaluated_on),
        )
    return evaluation


def _write_labels(state: TrainState, files: RunFolder) -> None:
    """Write the labels that the run trained with, and of which training set they are a part."""
    training_set, watch = state.data.training_set(), state.pruner.watch
    labels = training_set.trained_labels
    if (labels == UNKNOWN).any():
        labels = np.full_like(labels, UNKNOWN)
    if watch is not None:
        # What was recorded is what was trained, whatever the data set says.
        seen = watch.ranking().labels.cpu().numpy()
        labels = np.where(seen >= 0, seen, labels)
    if (labels == UNKNOWN).any():
        return
    whole = training_set.labels.copy()
    whole[training_set.index] = labels
    write_training_set(files.history / TRAINING_SET, replace(training_set, labels=whole))
