"""The metrics of an epoch: one line of ``metrics.jsonl``."""

from typing import Any

from fineprune.distributed.all_reduce import RankGroup
from fineprune.pruning.pruner import Pruner
from fineprune.training.epoch_totals import EpochTotals
from fineprune.training.learning_rate import rate_at
from fineprune.training.recipe import Recipe


def epoch_metrics(
    recipe: Recipe,
    pruner: Pruner,
    totals: EpochTotals,
    ranks: RankGroup,
    epoch: int,
    loss: float | None,
) -> dict[str, Any]:
    """Return the metrics of an epoch, with no evaluation yet. Every rank must call it.

    If the policy weights the losses, ``mean_weight`` is the mean over the kept samples. With image
    files, ``broken`` is the number of samples that replaced one whose file is broken. ``loss`` is
    the mean loss in nats; None if all batches were lost because a server failed.
    """
    plan, number = pruner.plan, pruner.num_samples
    kept = plan.kept
    metrics: dict[str, Any] = {
        "epoch": epoch,
        "lr": rate_at(recipe.training, epoch + max(totals.planned - 1, 0) / max(totals.planned, 1)),
        "pruned": len(kept) < number,
        "samples": totals.of_all_ranks(totals.samples, ranks),
        "skipped": number - len(kept),
        "steps": totals.steps_so_far(recipe.accumulation),
        "train_loss": loss,
        "nonfinite": pruner.nonfinite,
        "seconds": totals.seconds,
        "bookkeeping_seconds": totals.bookkeeping_seconds,
        "evaluate_seconds": 0.0,
    }
    names = [f"{kind}_{what}" for kind in ("test", "validation") for what in ("loss", "accuracy")]
    metrics |= dict.fromkeys(names)
    if plan.weights is not None:
        metrics["mean_weight"] = plan.weights[kept].double().mean().item()
    if totals.broken is not None:
        metrics["broken"] = totals.of_all_ranks(totals.broken, ranks)
    if totals.distributed:
        metrics["distributed"] = totals.distributed
    return metrics
