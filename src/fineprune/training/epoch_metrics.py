"""What a run records about an epoch: one line of ``metrics.jsonl``, and the counts of a window."""

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError, RunError
from fineprune.pruning.policies.scheduled import ScheduledPolicy
from fineprune.runs.folder import RunFolder
from fineprune.runs.history import Records, pack_classes, pack_epoch
from fineprune.training.evaluate import Evaluation, evaluate, sample_losses
from fineprune.training.learning_rate import rate_at
from fineprune.training.suspicion import Suspicion, detection, suspicion_by_evidence, suspicion_of
from fineprune.training.train_state import EpochTotals, TrainState


class TrainingDiverged(RunError):
    """The mean loss of an epoch is not finite, so the weights are no longer usable."""


def mean_loss(state: TrainState, epoch: int, totals: EpochTotals) -> float | None:
    """Return the mean loss of an epoch over all ranks, in nats. Every rank must call it.

    Args:
        state: The state of the run.
        epoch: The epoch that has ended, counted from 0.
        totals: The sums over the batches of the epoch.

    Returns:
        The mean loss; None if all batches of the epoch were lost because a server failed.

    Raises:
        TrainingDiverged: The mean loss is not finite.
    """
    samples = state.samples_of_all_ranks(totals)
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
    ``forward_samples`` includes the samples that were only evaluated for the policy. With image
    files, ``broken`` is the number of samples that replaced one whose file is broken.

    Args:
        state: The state of the run.
        epoch: The epoch that has ended, counted from 0.
        totals: The sums over the batches of the epoch.
        loss: The result of ``mean_loss``.
    """
    training, plan = state.recipe.training, state.pruner.plan
    kept = plan.kept
    samples = state.samples_of_all_ranks(totals)
    metrics: dict[str, Any] = {
        "epoch": epoch,
        "lr": rate_at(training, epoch + max(totals.planned - 1, 0) / max(totals.planned, 1)),
        "pruned": len(kept) < state.data.num_samples,
        "samples": samples,
        "forward_samples": samples + totals.rescored * state.ranks.size,
        "skipped": state.data.num_samples - len(kept),
        "steps": -(-totals.batches // state.recipe.accumulation),
        "train_loss": loss,
        "nonfinite": state.pruner.nonfinite,
        "seconds": totals.seconds,
        "bookkeeping_seconds": totals.bookkeeping_seconds,
        "evaluate_seconds": 0.0,
    }
    names = [f"{kind}_{what}" for kind in ("test", "validation") for what in ("loss", "accuracy")]
    metrics |= dict.fromkeys([*names, "watched"])
    if plan.weights is not None:
        metrics["mean_weight"] = plan.weights[kept].double().mean().item()
    if totals.broken is not None:
        metrics["broken"] = state.broken_of_all_ranks(totals)
    if totals.distributed:
        metrics["distributed"] = totals.distributed
    return metrics


def add_evaluation(state: TrainState, epoch: int, metrics: dict[str, Any]) -> Evaluation | None:
    """Evaluate the model if the recipe asks for it after this epoch, and add the result.

    With ``training.ema``, the moving average of the weights is evaluated.

    Args:
        state: The state of the run.
        epoch: The epoch that has ended, counted from 0.
        metrics: The metrics of the epoch. The result is added to them.

    Returns:
        The evaluation; None if there was none.
    """
    training = state.recipe.training
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
    indices, batches = data.watched
    losses = sample_losses(state.evaluated, batches, device, state.autocast)
    metrics["watched"] = {str(i): loss for i, loss in zip(indices, losses, strict=True)}
    metrics["evaluate_seconds"] = time.perf_counter() - started
    return evaluation


def closing_counts(state: TrainState, epoch: int) -> torch.Tensor | None:
    """Return the counts of the window that ends with ``epoch``, before they are cleared.

    Args:
        state: The state of the run, before ``Pruner.end_epoch()``.
        epoch: The epoch, counted from 0.

    Returns:
        The counts, as integers of shape (N,); None if the epoch does not end a window.
    """
    return state.pruner.counts if _ends_window(state, epoch) else None


def closing_suspicion(state: TrainState, epoch: int) -> Suspicion | None:
    """Return which samples are suspected at the end of ``epoch``. Every rank must call it.

    This is the ranking by the evidence on the labels. Without evidence, because logits are not
    recorded, it is what the policy suspects in the window that ends with this epoch.

    The arguments are those of ``closing_counts``.

    Returns:
        The suspicion; None if it is not known which labels are wrong; or if there is no evidence,
        and the epoch does not end a window or the policy suspects no samples.
    """
    if state.data.wrong is None:
        return None
    if state.pruner.watch is not None:
        state.pruner.synchronize()
        return suspicion_by_evidence(state.pruner.watch)
    return suspicion_of(state.pruner.policy) if _ends_window(state, epoch) else None


def add_suspicion(state: TrainState, metrics: dict[str, Any], closing: Suspicion | None) -> None:
    """Add how well the suspicion finds the wrong labels, if these are known.

    Args:
        state: The state of the run.
        metrics: The metrics of an epoch that has ended. The result is added to them.
        closing: The result of ``closing_suspicion``.
    """
    wrong = state.data.wrong
    if wrong is None:
        return
    suspicion = closing or suspicion_of(state.pruner.policy)
    if suspicion is not None:
        metrics["suspicion"] = detection(suspicion, wrong)


def _write_labels(state: TrainState, files: RunFolder) -> None:
    """Write the labels that the run trained with, and of which training set they are a part."""
    labels, watch = _known_labels(state), state.pruner.watch
    if watch is not None:
        # What was recorded is what was trained, whatever the data set says.
        seen = watch.labels().numpy()
        if labels is not None or (seen >= 0).all():
            labels = np.where(seen >= 0, seen, -1 if labels is None else labels)
    if labels is None:
        return
    files.write_labels(pack_classes(labels, state.data.classes))
    training_set = state.data.training_set()
    whole = training_set.labels.copy()
    whole[training_set.index] = labels
    files.write_training_set(replace(training_set, labels=whole))


def _known_labels(state: TrainState) -> npt.NDArray[np.integer] | None:
    """Return the class of each training sample, shape (N,); None if user-defined data hide it."""
    try:
        labels = np.asarray(state.data.labels())
    except (InputError, ValueError):  # There are none, or they are ragged.
        return None
    if labels.dtype.kind not in "iu" or labels.shape != (state.data.num_samples,):
        return None
    return labels if labels.min() >= 0 and labels.max() < state.data.classes else None


def epoch_history(state: TrainState, totals: EpochTotals) -> Records | None:
    """Return the losses and predictions of the epoch's samples. Every rank must call it.

    Args:
        state: The state of the run.
        totals: The sums over the batches of the epoch.

    Returns:
        The records of ``runs.history``, shape (N,); None if the run does not keep them.
    """
    if totals.history is None:
        return None
    losses, predictions = totals.history.merged(state.ranks)
    return pack_epoch(losses.numpy(), predictions.numpy(), state.data.classes)


def evidence_of_run(state: TrainState, epoch: int) -> dict[str, Any] | None:
    """Return the evidence on the labels after the last epoch. Every rank must call it.

    Returns:
        The state of the ``LabelWatch`` with the evidence of all ranks; None after any other epoch,
        and if the run keeps no history or records no logits.
    """
    last = epoch == state.recipe.training.epochs - 1
    if not last or not state.recipe.run.history or state.pruner.watch is None:
        return None
    state.pruner.synchronize()
    return state.pruner.watch.state_dict()


def _ends_window(state: TrainState, epoch: int) -> bool:
    policy = state.pruner.policy
    return isinstance(policy, ScheduledPolicy) and policy.schedule.clears(epoch)


def write_epoch(
    state: TrainState,
    files: RunFolder,
    metrics: dict[str, Any],
    closing: torch.Tensor | None,
    history: Records | None,
    evaluation: Evaluation | None,
    evidence: dict[str, Any] | None,
) -> None:
    """Write the metrics and the history of an epoch, and the counts of the window that it ends.

    Args:
        state: The state of the run.
        files: The folder of the run.
        metrics: The metrics of the epoch.
        closing: The result of ``closing_counts``. The last epoch of the run always ends a window.
        history: The result of ``epoch_history``.
        evaluation: The result of ``add_evaluation``.
        evidence: The result of ``evidence_of_run``.
    """
    epoch, classes = metrics["epoch"], state.data.classes
    last = epoch == state.recipe.training.epochs - 1
    if closing is None and last and isinstance(state.pruner.policy, ScheduledPolicy):
        closing = state.pruner.counts
    if closing is not None:
        files.write_counts(epoch, closing.numpy())
    if history is not None:
        files.write_history(epoch, history)
        if last:
            _write_labels(state, files)
        if last and evaluation is not None:
            both = np.stack([evaluation.labels.numpy(), evaluation.predictions.numpy()])
            files.write_evaluated(pack_classes(both, classes))
    if evidence is not None:
        files.write_evidence(evidence)
    files.append(metrics)
