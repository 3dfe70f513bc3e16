"""The losses of a batch: from ``training_step`` to the callback."""

import lightning.pytorch as pl
import torch

from fineprune.errors import InputError
from fineprune.integrations.lightning.epochs import DataPruning


def record(
    module: pl.LightningModule,
    losses: torch.Tensor,
    logits: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
) -> torch.Tensor:
    """Record the losses of a batch in ``training_step``, and return the scalar to backpropagate.

    Outside the training, and in a ``Trainer`` without pruning, this only returns the mean of the
    losses, so training and validation may share a step that calls it. If you also give logits and
    labels, the training is watched for wrong labels: see ``DataPruning.pruner.watch``. With the
    policy ``fp.FullData``, this is all that happens.

    Args:
        module: The module whose step calls this: ``self``.
        losses: One loss per sample, floating point, shape (B,) (``reduction="none"``).
        logits: The output of a classifier for them; floating point, shape (B, C).
        labels: Their labels, required with ``logits``; integers, shape (B,).

    Returns:
        The mean of the losses, weighted if the policy has weights; shape ().

    Raises:
        InputError: A shape or a type is wrong, or the losses of this batch were recorded already.
    """
    mean: torch.Tensor = _record_untraced(module, losses, logits, labels)
    return mean


def _record(
    module: pl.LightningModule,
    losses: torch.Tensor,
    logits: torch.Tensor | None,
    labels: torch.Tensor | None,
) -> torch.Tensor:
    if not isinstance(module, pl.LightningModule):
        raise InputError(
            f"expected record(self, losses) in training_step, got {type(module).__name__} first"
        )
    try:
        trainer = module.trainer
    except RuntimeError:  # The module is used without a Trainer.
        return losses.mean()
    if isinstance(trainer, pl.Trainer) and trainer.training:
        for callback in trainer.callbacks:
            if isinstance(callback, DataPruning):
                return callback.record(losses, logits, labels)
    return losses.mean()


# A compiled training step must not trace the bookkeeping.
_record_untraced = torch.compiler.disable(_record)
