"""What a run writes of an epoch: a line of ``metrics.jsonl``, and the counts of a window."""

import time
from typing import Any

import torch

from fineprune.pruning.policies.scheduled import ScheduledPolicy
from fineprune.runs.folder import RunFolder
from fineprune.training.evaluate import evaluate, sample_losses
from fineprune.training.train_state import EpochSoFar, Job


def epoch_metrics(job: Job, epoch: int, so_far: EpochSoFar) -> dict[str, Any]:
    """Return an epoch's metrics, not evaluated yet. With several ranks all must call it."""
    training = job.recipe.training
    kept = job.pruner.plan.kept
    samples = so_far.samples * job.ranks.size  # every rank has equally many
    metrics: dict[str, Any] = {
        "epoch": epoch,
        "lr": float(job.optimizer.param_groups[0]["lr"]),
        "pruned": len(kept) < job.data.num_samples,
        "samples": samples,
        "skipped": job.data.num_samples - len(kept),
        "steps": -(-so_far.batches // training.accumulation),
        "train_loss": job.ranks.sum(so_far.loss_sum).item() / samples,
        "nonfinite": job.pruner.nonfinite,
        "seconds": so_far.seconds,
        "bookkeeping_seconds": so_far.bookkeeping_seconds,
        "evaluate_seconds": 0.0,
    }
    names = [f"{kind}_{what}" for kind in ("test", "validation") for what in ("loss", "accuracy")]
    metrics |= dict.fromkeys([*names, "watched"])
    return metrics


def add_evaluation(job: Job, epoch: int, metrics: dict[str, Any]) -> None:
    """Add an evaluation to the metrics of an epoch that is evaluated."""
    training = job.recipe.training
    left = training.epochs - 1 - epoch
    if (epoch + 1) % training.evaluate_every == 0 or left < training.evaluate_last:
        started = time.perf_counter()
        device = job.recipe.run.device
        loss, accuracy = evaluate(job.model, job.data.evaluation, device, job.autocast)
        metrics[f"{job.data.evaluated_on}_loss"] = loss
        metrics[f"{job.data.evaluated_on}_accuracy"] = accuracy
        indices, batches = job.data.watched
        losses = sample_losses(job.model, batches, device, job.autocast)
        metrics["watched"] = {str(i): loss for i, loss in zip(indices, losses, strict=True)}
        metrics["evaluate_seconds"] = time.perf_counter() - started


def closing_counts(job: Job, epoch: int) -> torch.Tensor | None:
    """Return the counts that ``epoch``'s end clears, before it does: those of a whole window."""
    policy = job.pruner.policy
    if not isinstance(policy, ScheduledPolicy) or not policy.schedule.clears(epoch):
        return None
    return job.pruner.counts


def write_epoch(
    job: Job, log: RunFolder, metrics: dict[str, Any], closing: torch.Tensor | None
) -> None:
    """Write an ended epoch's metrics, and the counts of the window that it closes.

    Args:
        job: the run.
        log: its folder.
        metrics: of the epoch.
        closing: from ``closing_counts``. The last epoch closes its window in any case.
    """
    epoch = metrics["epoch"]
    if closing is None and epoch == job.recipe.training.epochs - 1:
        closing = job.pruner.counts
    if closing is not None:
        log.write_counts(epoch, closing)
    log.append(metrics)
