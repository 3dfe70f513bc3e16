"""``DataPruning``, whose epochs begin, resume and end with those of Lightning, and ``record``."""

import os
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from fineprune.errors import InputError
from fineprune.integrations.learning_rates import give_rates
from fineprune.integrations.lightning.checks import check_trainer, checked_loader
from fineprune.integrations.lightning.loader import PrunedLoader
from fineprune.integrations.resumed import check_same_batches
from fineprune.pruning.policies.policy import Policy, check_is_policy
from fineprune.pruning.pruner import Pruner


class DataPruning(pl.Callback):
    """Prunes the training samples of one call of ``Trainer.fit``.

    The training loader may come from the module, the data module or ``fit``. The callback replaces
    its sampler, and removes the indices before the module sees a batch. At the end of each epoch,
    the loggers of the ``Trainer`` receive the values of ``Pruner(log=...)``. If the policy uses
    learning rates and was given none, it receives those of the first scheduler that
    ``configure_optimizers`` returns, and one line says so. The seed of the order is that of the
    loader's ``DistributedSampler``, or else that of ``seed_everything``, or else 0, which with two
    or more ranks gives the order of Lightning alone.

    Args:
        policy: The policy that chooses the samples, of as many epochs as the ``Trainer``.

    Raises:
        TypeError: ``policy`` is not a policy.
    """

    def __init__(self, policy: Policy) -> None:
        check_is_policy(policy)
        self.policy = policy
        self._pruner: Pruner | None = None
        self._loader: PrunedLoader | None = None
        # What ``Pruner.record`` is given of a batch that the optimizer has not used yet.
        self._batch: tuple[Any, ...] | None = None
        self._state: dict[str, Any] | None = None  # A state to load.

    @property
    def pruner(self) -> Pruner:
        """The ``Pruner``, which exists as soon as ``fit`` has asked for the training loader.

        Raises:
            InputError: It does not exist yet.
        """
        if self._pruner is None:
            raise InputError(
                "expected a training that has begun in this process, since fit() makes the Pruner, "
                "got none: in configure_optimizers, use trainer.estimated_stepping_batches; with "
                "ddp_spawn, read the pruner in on_fit_end() of a callback"
            )
        return self._pruner

    # -- Lightning's hooks ----------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the settings of the ``Trainer``, and take over its training loader."""
        if stage != TrainerFn.FITTING:
            return
        if self._pruner is not None:
            raise InputError(
                "expected one call of fit() with a DataPruning, got a second one: make a new "
                "Trainer with a new DataPruning, and give fit() ckpt_path to go on"
            )
        if sum(isinstance(callback, DataPruning) for callback in trainer.callbacks) > 1:
            raise InputError("expected one DataPruning in callbacks, got several: leave one")
        check_trainer(trainer, pl_module, self.policy)
        # Each call of fit() makes another source of the loader.
        trainer.fit_loop._data_source.dataloader = partial(self._loader_of_epoch, trainer)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the pruner if there is none, give it the learning rates, and load its state."""
        loader = self._take_loader(trainer)
        if not trainer.fast_dev_run:
            trainer.fit_loop.epoch_loop.max_steps = -1
        loader.shows_all = False
        trainer.fit_loop._combined_loader = None  # It may have the length that was shown.
        # Afterwards, Lightning loads the state of the schedulers.
        # A fast_dev_run has a scheduler for its few batches.
        own = pl_module.automatic_optimization and not trainer.fast_dev_run
        if own and self.pruner.policy.without_rates:
            for config in trainer.lr_scheduler_configs[:1]:
                by = f"{config.interval}s" if config.frequency == 1 else None
                rank_zero_info(give_rates(self.pruner, config.scheduler, by))
        if self._state is not None:
            check_same_batches(self._state, self.pruner)
            self.pruner.load_state_dict(self._state)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the loaders for this epoch."""
        trainer.reload_dataloaders_every_n_epochs = 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Hand the losses of the batch to the pruner, now that the optimizer has used them."""
        if self._batch is None and self._loader is not None and self._loader.index is not None:
            raise InputError(
                "expected training_step to return record(self, losses), got a step that recorded "
                'nothing: give it one loss per sample (reduction="none"), also if the step returns '
                "None; and give a second Trainer, for validate() in between, copy.deepcopy(module)"
            )
        self._settle()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the epoch, before checkpoints are saved, and let Lightning read the next length."""
        self.pruner.end_epoch()
        trainer.reload_dataloaders_every_n_epochs = 1

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the ``Trainer`` as it was."""
        if vars(trainer.fit_loop._data_source).pop("dataloader", None) is not None:
            trainer.reload_dataloaders_every_n_epochs = 0

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the state of the pruner with the losses of all ranks."""
        if self._loader is None or self._loader.shows_all:
            return
        # A batch counts for Lightning once the optimizer has used it. If an exception comes before
        # that, the resumed run trains the batch again.
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        if batches.processed == batches.ready:
            self._settle()
        self.pruner.synchronize()
        checkpoint["callbacks"][self.state_key] = self.pruner.state_dict()

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the state of the pruner until there is one.

        Raises:
            InputError: The checkpoint comes from a training without pruning.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._state = checkpoint["callbacks"].get(self.state_key)
        if self._state is None:
            raise InputError(
                f"expected a checkpoint of a training with {self.state_key}, got one without it: "
                f"load its weights into the module, and call fit() without ckpt_path"
            )
        _finish_batch(checkpoint["loops"]["fit_loop"])

    # -- internals ------------------------------------------------------------------------------

    def _note(self, losses: torch.Tensor, *watched: torch.Tensor | None) -> torch.Tensor:
        """Keep the losses of a batch until the optimizer has used them; return their mean."""
        assert self._loader is not None
        index, self._loader.index = self._loader.index, None
        if index is None:
            raise InputError(
                "expected one call of record() for each batch, got a second one: record the sum of "
                "the losses of a sample, and use no optimizer that calls training_step more than "
                "once per step, as LBFGS does"
            )
        copies = (part if part is None else part.detach().clone() for part in (losses, *watched))
        self._batch = index, *copies
        return self.pruner.weighted(index, losses).mean()

    def _settle(self) -> None:
        """Record the losses of the batch that the optimizer has used, if there is one."""
        batch, self._batch = self._batch, None
        if batch is not None:
            self.pruner.record(*batch)

    def _loader_of_epoch(self, trainer: pl.Trainer) -> PrunedLoader:
        """Return the loader of the next epoch, whenever Lightning asks for it."""
        loader = self._take_loader(trainer)
        # ``trainer.current_epoch`` is one less if the checkpoint was saved at the end of an epoch.
        epoch = trainer.fit_loop.epoch_progress.current.processed
        if loader.shows_all:
            # Lightning estimates the steps from the batches of the first epoch, but never more than
            # ``max_steps``. So ``estimated_stepping_batches`` is exact in configure_optimizers.
            if not trainer.fast_dev_run:
                trainer.fit_loop.epoch_loop.max_steps = self.pruner.total_steps()
        elif epoch < self.policy.epochs:  # Otherwise, Lightning will notice the end.
            self.pruner.start_epoch(epoch)
        return loader

    def _take_loader(self, trainer: pl.Trainer) -> PrunedLoader:
        """Return the user's loader with the samples of the pruner; make both only once."""
        if self._loader is None:
            source = trainer.fit_loop._data_source
            given = checked_loader(trainer, type(source).dataloader(source))
            seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))  # ``seed_everything`` sets it.
            self._pruner = Pruner(
                given.dataset,
                self.policy,
                seed=getattr(given.sampler, "seed", seed),
                batch_size=given.batch_size,
                accumulation=trainer.accumulate_grad_batches,
                drop_last=given.drop_last,
                num_replicas=trainer.world_size,
                rank=trainer.global_rank,
                log=partial(_log, trainer),
            )
            self._loader = PrunedLoader(given, self._pruner)
        return self._loader


@torch.compiler.disable  # type: ignore[untyped-decorator]
def record(
    module: pl.LightningModule,
    losses: torch.Tensor,
    logits: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
) -> torch.Tensor:
    """Record the losses of a batch in ``training_step``, and return the scalar to backpropagate.

    Outside the training, and in a ``Trainer`` without ``DataPruning``, this only returns the mean
    of the losses, so training and validation may share a step that calls it.

    Args:
        module: The module whose step calls this: ``self``.
        losses: One loss per sample, floating point, shape (B,) (``reduction="none"``).
        logits: The output of a classifier for them; floating point, shape (B, C). With them, the
            labels are watched: see ``DataPruning.pruner.watch``.
        labels: Their labels, required with ``logits``; integers, shape (B,).

    Returns:
        The mean of the losses, weighted if the policy has weights; shape ().

    Raises:
        InputError: A shape or a type is wrong, or the losses of this batch were recorded already.
    """
    if not isinstance(module, pl.LightningModule):
        raise InputError(
            f"expected record(self, losses) in training_step, got {type(module).__name__} first: "
            f"give it the module"
        )
    try:
        trainer = module.trainer
    except RuntimeError:  # The module is used without a Trainer.
        return losses.mean()
    for callback in trainer.callbacks if getattr(trainer, "training", False) else ():
        if isinstance(callback, DataPruning):
            return callback._note(losses, logits, labels)
    return losses.mean()


def _log(trainer: pl.Trainer, values: dict[str, float], step: int) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(values, step)


def _finish_batch(fit_loop: dict[str, Any]) -> None:
    """Let a run go on after the last batch of its checkpoint, where Lightning leaves something out.

    Lightning saves after a batch and before the validation that follows it, and does not validate
    after a resume. If the batch was the last one of its epoch, Lightning also leaves out the hooks
    at the end of the epoch, and it compares the number of batches with the length of the next
    epoch: after a pruned epoch, it trains only the last batches of a full one.
    """
    batches = fit_loop["epoch_loop.batch_progress"]
    if batches["current"]["completed"] == batches["current"]["processed"]:
        return  # It was not saved between a batch and its validation.
    if batches["is_last_batch"]:
        for progress in (batches["current"], batches["total"]):
            progress["completed"] = progress["processed"]
    # A validation that was interrupted in its first batch is done again, if one is due.
    none = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
    interrupted = {**none, "ready": 1, "started": 1}
    validation = fit_loop["epoch_loop.val_loop.batch_progress"]
    validation.update(current=none, total=interrupted, is_last_batch=False)
