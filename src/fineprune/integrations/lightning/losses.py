"""The losses of a batch: from ``training_step`` to the pruner, once the optimizer has used them."""

from typing import Any

import lightning.pytorch as pl
import torch

from fineprune.errors import InputError
from fineprune.integrations.lightning.loader import PrunedLoader
from fineprune.pruning.pruner import Pruner


def record(
    module: pl.LightningModule,
    losses: torch.Tensor,
    logits: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
) -> torch.Tensor:
    """Record the losses of a batch in ``training_step``, and return the scalar to backpropagate.

    Outside of the training, and with a ``Trainer`` without pruning, this is the mean of the losses,
    so a step that training and validation share may call it. With the logits and labels, the
    training is watched for wrong labels: see ``DataPruning.pruner.watch``. With ``fp.FullData``,
    nothing else happens.

    Args:
        module: The module whose step calls this, ``self``.
        losses: One loss per sample, floating point, shape (B,) (``reduction="none"``).
        logits: The output of a classifier for them; floating point, shape (B, C).
        labels: Their labels; integers, shape (B,). They are given together with ``logits``.

    Returns:
        The mean of the losses, shape (). If the policy weights them, it is that of the weighted
        losses.

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
            if isinstance(callback, LossRecording):
                return callback.record(losses, logits, labels)
    return losses.mean()


# A compiled training step must not trace the bookkeeping.
_record_untraced = torch.compiler.disable(_record)


class LossRecording(pl.Callback):
    """The part of the callback that takes the losses."""

    _loader: PrunedLoader | None
    # What ``Pruner.record`` is given of a batch that the optimizer has not used yet.
    _batch: tuple[Any, ...] | None
    _is_backpropagated = False

    @property
    def pruner(self) -> Pruner:
        """The ``Pruner`` of the training."""
        raise NotImplementedError

    def record(
        self, losses: torch.Tensor, logits: torch.Tensor | None, labels: torch.Tensor | None
    ) -> torch.Tensor:
        """Do what the function ``record`` does in the training."""
        assert self._loader is not None
        index, self._loader.index = self._loader.index, None
        if index is None:
            if self._is_backpropagated:
                raise InputError(
                    "expected an optimizer that trains each batch once, got one that calls its "
                    "closure, and with it training_step, more than once in a step, as LBFGS does: "
                    "take another optimizer, or train without DataPruning"
                )
            raise InputError(
                "expected one call of record() in each training_step, got a second one: record "
                "the losses of a sample as their sum"
            )
        of_batch = (losses, logits, labels)
        copies = (None if part is None else part.detach().clone() for part in of_batch)
        self._batch = index, *copies
        self._is_backpropagated = False
        return self.pruner.weighted(index, losses).mean()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note that the step of the batch has ended. Its optimizer may still ask for another one.

        With manual optimization, a step may go on after this.
        """
        self._is_backpropagated = pl_module.automatic_optimization

    def on_train_batch_end(self, *args: Any) -> None:
        """Hand the losses of the batch to the pruner, now that the optimizer has used them."""
        if self._batch is None and self._loader is not None and self._loader.index is not None:
            raise InputError(
                "expected training_step to return record(self, losses), got a step that recorded "
                'nothing: give it one loss per sample (reduction="none"), also if the step returns '
                "None to leave out a batch"
            )
        self.settle()

    def settle(self) -> None:
        """Record the losses of the batch that the optimizer has used, if there is one."""
        batch, self._batch = self._batch, None
        if batch is not None:
            self.pruner.record(*batch)
