"""The callback, which begins, resumes and ends the epochs of the pruner with those of Lightning."""

import os
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from fineprune.errors import InputError
from fineprune.integrations.learning_rates import give_rates
from fineprune.integrations.lightning.checks import (
    check_epochs,
    check_policy,
    check_ranks,
    check_same_steps,
    check_shares,
    check_trainer,
    check_validation,
    checked_loader,
)
from fineprune.integrations.lightning.loader import PrunedLoader, PrunedSource
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.pruner import Pruner


class _Earlier(NamedTuple):
    """What the last training left. It is put back if the next one fails before it begins."""

    pruner: Pruner
    batch: tuple[Any, ...] | None
    optimizers: list[Optimizer]
    schedulers: list[LRSchedulerConfig]


class DataPruning(pl.Callback):
    """Prunes the training samples of ``Trainer.fit``.

    The training loader may come from the module, the data module or ``fit``, with any batch size,
    collate function and number of workers. The ``Trainer`` must train as many epochs as the policy.
    At the end of each epoch, its loggers receive the values of ``Pruner.log``.

    If the policy uses learning rates and was given none, it receives those of the first scheduler
    that ``configure_optimizers`` returns, and one line says so.

    Args:
        policy: The policy that chooses the samples of each epoch.
        seed: The seed of the order of the samples. By default, the seed of the loader's
            ``DistributedSampler``, or else that of ``seed_everything``, or else 0. With two or more
            ranks, this default gives the order of Lightning without pruning.
        labels: The class of each sample, as for ``Pruner``; by default, those of the data set.

    Raises:
        InputError: A ``Pruner`` was given in place of a policy, or the policy needs losses of
            samples that it skipped.
    """

    def __init__(self, policy: Policy, *, seed: int | None = None, labels: Any = None) -> None:
        check_policy(policy)
        self.policy = policy
        self._seed = seed
        self._labels = labels
        self._forget()

    def _forget(self) -> None:
        """Forget the last training."""
        self._pruner: Pruner | None = None
        self._loader: PrunedLoader | None = None
        # What ``Pruner.record`` is given of a batch that the optimizer has not used yet.
        self._batch: tuple[Any, ...] | None = None
        self._state: dict[str, Any] | None = None  # A state to load.
        self._has_started = False
        self._max_steps: int | None = None  # The user's, while it is another number.
        self._earlier: _Earlier | None = None

    @property
    def pruner(self) -> Pruner:
        """The ``Pruner``, which exists as soon as ``fit`` has asked for the training loader.

        Raises:
            InputError: It does not exist yet.
        """
        if self._pruner is None:
            raise InputError(
                "expected a training that has begun in this process, since the callback makes the "
                "Pruner inside fit(), got none: in configure_optimizers, use "
                "trainer.estimated_stepping_batches; if fit() trains in other processes, as with "
                "ddp_spawn and ddp_fork, read the pruner in on_fit_end() of a callback"
            )
        return self._pruner

    def record(
        self, losses: torch.Tensor, logits: torch.Tensor | None, labels: torch.Tensor | None
    ) -> torch.Tensor:
        """Do what the function ``record`` does in the training."""
        assert self._loader is not None
        index, self._loader.index = self._loader.index, None
        if index is None:
            raise InputError(
                "expected one call of record() for each batch, got a second one: record the sum of "
                "the losses of a sample, and use no optimizer that calls its closure, and so "
                "training_step, more than once per step, as LBFGS does"
            )
        of_batch = (losses, logits, labels)
        copies = (None if part is None else part.detach().clone() for part in of_batch)
        self._batch = index, *copies
        return self.pruner.weighted(index, losses).mean()

    def settle(self) -> None:
        """Record the losses of the batch that the optimizer has used, if there is one."""
        batch, self._batch = self._batch, None
        if batch is not None:
            self.pruner.record(*batch)

    # -- Lightning's hooks ----------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the settings of the ``Trainer``, and take over its training loader."""
        if stage != TrainerFn.FITTING:
            return
        check_trainer(trainer, pl_module, self)
        check_epochs(trainer, self.policy)
        earlier = None
        if self._pruner is not None:
            made = trainer.optimizers, trainer.lr_scheduler_configs
            earlier = _Earlier(self._pruner, self._batch, *made)
        self._forget()
        self._earlier = earlier
        source = trainer.fit_loop._data_source
        loader = partial(self._train_loader, trainer, source)
        trainer.fit_loop._data_source = PrunedSource(source, loader)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the pruner if there is none, give it the learning rates, and load its state."""
        self._take_loader(trainer, trainer.fit_loop._data_source.source)
        self._restore_max_steps(trainer)
        trainer.fit_loop._combined_loader = None  # It may have the length that was shown.
        # Afterwards, Lightning loads the state of the schedulers.
        # A fast_dev_run has a scheduler for its few batches.
        own = pl_module.automatic_optimization and not trainer.fast_dev_run
        if own and self.pruner.policy.without_rates:
            for config in trainer.lr_scheduler_configs[:1]:
                by = f"{config.interval}s" if config.frequency == 1 else None
                rank_zero_info(give_rates(self.pruner, config.scheduler, by))
        state = self._earlier_state(trainer) if self._state is None else self._state
        if state is not None:
            check_same_steps(trainer, self.pruner, state)
            self.pruner.load_state_dict(state)
        self._has_started = True
        self._earlier = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that no other callback has changed the number of epochs."""
        check_epochs(trainer, self.policy)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the loaders for this epoch."""
        trainer.reload_dataloaders_every_n_epochs = 0

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Hand the losses of the batch to the pruner, now that the optimizer has used them."""
        if self._batch is None and self._loader is not None and self._loader.index is not None:
            if pl_module.trainer is not trainer:
                raise InputError(
                    "expected the module to belong to the Trainer that trains it, got one that "
                    "validate(), test() or another method of a second Trainer has taken over, so "
                    "that record() finds no pruning: give that Trainer copy.deepcopy(module)"
                )
            raise InputError(
                "expected training_step to return record(self, losses), got a step that recorded "
                'nothing: give it one loss per sample (reduction="none"), also if the step returns '
                "None to leave out a batch"
            )
        self.settle()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the epoch, before checkpoints are saved, and let Lightning read the next length."""
        self.pruner.end_epoch()
        trainer.reload_dataloaders_every_n_epochs = 1

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Leave the ``Trainer`` as it was, and keep the last training if no other one has begun."""
        self._detach(trainer)
        earlier, self._earlier = self._earlier, None
        if earlier is not None:
            # A checkpoint that is saved now continues that training.
            self._pruner, self._batch, self._has_started = earlier.pruner, earlier.batch, True
            trainer.optimizers = earlier.optimizers
            trainer.strategy.lr_scheduler_configs = earlier.schedulers

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the ``Trainer`` as it was."""
        if stage == TrainerFn.FITTING:
            self._detach(trainer)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the state of the pruner with the losses of all ranks."""
        if not self._has_started:
            if self._state is not None:  # It was loaded, but no epoch has begun.
                checkpoint["callbacks"][self.state_key] = self._state
            return
        # A batch counts for Lightning once the optimizer has used it. If an exception comes before
        # that, the resumed run trains the batch again.
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        if batches.processed == batches.ready:
            self.settle()
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
        state = checkpoint["callbacks"].get(self.state_key)
        if state is None:
            raise InputError(
                f"expected a checkpoint of a training with {self.state_key}, got one without it: "
                f"load its weights into the module, and call fit() without ckpt_path"
            )
        _finish_batch(checkpoint["loops"]["fit_loop"])
        self._state = state

    # -- internals ------------------------------------------------------------------------------

    def _train_loader(self, trainer: pl.Trainer, source: Any) -> PrunedLoader:
        """Return the loader of the next epoch, whenever Lightning asks for it."""
        loader = self._take_loader(trainer, source)
        if self._has_started:
            self._start_epoch(trainer, loader)
        elif self._max_steps is None:
            # Lightning estimates the steps from the batches of the first epoch, but never more than
            # ``max_steps``. So ``estimated_stepping_batches`` is exact in configure_optimizers.
            self._max_steps = trainer.max_steps
            loader.shows_all = True
            if not trainer.fast_dev_run:
                trainer.fit_loop.epoch_loop.max_steps = self.pruner.total_steps()
        return loader

    def _take_loader(self, trainer: pl.Trainer, source: Any) -> PrunedLoader:
        """Return the user's loader with the samples of the pruner; make both only once."""
        if self._loader is not None:
            return self._loader
        given = checked_loader(source.dataloader())
        check_shares(trainer, given)
        self._pruner = Pruner(
            given.dataset,
            self.policy,
            labels=self._labels,
            seed=_order_seed(given) if self._seed is None else self._seed,
            batch_size=given.batch_size,
            accumulation=trainer.accumulate_grad_batches,
            drop_last=given.drop_last,
            log=partial(_log, trainer),
        )
        check_ranks(trainer, self._pruner)
        check_validation(trainer, self._pruner)
        self._loader = PrunedLoader(given, self._pruner)
        return self._loader

    def _earlier_state(self, trainer: pl.Trainer) -> dict[str, Any] | None:
        """Return the state with which a second ``fit`` goes on without a checkpoint, if it does.

        Lightning then trains the epochs that are left, which are none after a whole training. It
        begins an epoch that was interrupted with its first batch.

        Raises:
            InputError: The pruner would go on in another place.
        """
        epoch = trainer.fit_loop.epoch_progress.current.processed
        if self._earlier is None or epoch == 0:
            return None
        pruner = self._earlier.pruner
        before = pruner.position
        if epoch != before.epoch + (before.samples > 0):
            place = "within" if before.samples else "before"
            raise InputError(
                f"expected a second fit() to go on where the training stopped, {place} epoch "
                f"{before.epoch}, got one that would train epoch {epoch} from its start: to go on, "
                f"call trainer.save_checkpoint(path), then fit() with ckpt_path=path; to start "
                f"again, call fit() of a new Trainer"
            )
        pruner.synchronize()
        return pruner.state_dict()

    def _restore_max_steps(self, trainer: pl.Trainer) -> None:
        if self._max_steps is not None:
            trainer.fit_loop.epoch_loop.max_steps = self._max_steps
            self._max_steps = None
        if self._loader is not None:
            self._loader.shows_all = False

    def _start_epoch(self, trainer: pl.Trainer, loader: PrunedLoader) -> None:
        """Begin the epoch that Lightning is about to train, or continue it after a resume."""
        # ``trainer.current_epoch`` is one less if the checkpoint was saved at the end of an epoch.
        epochs = trainer.fit_loop.epoch_progress.current
        epoch = epochs.processed
        if epoch >= self.policy.epochs:  # The training has ended, and Lightning will notice it.
            return
        before = self.pruner.position
        if epoch != before.epoch and not (epoch == before.epoch + 1 and before.samples):
            raise InputError(
                f"expected to train epoch {before.epoch}, got epoch {epoch}: call fit() of a new "
                f"Trainer, with ckpt_path to resume"
            )
        self.pruner.start_epoch(epoch)
        resumed, self._state = self._state is not None, None
        if not (resumed and epoch == before.epoch and epochs.ready > epochs.processed):
            return
        assert loader.batch_size is not None
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        if before.samples != min(batches * loader.batch_size, len(self.pruner.sampler)):
            raise InputError(
                f"expected a checkpoint from within epoch {epoch} with the same batch size and "
                f"number of ranks, got one in which a rank trained {before.samples} samples in "
                f"{batches} batches of {loader.batch_size}: resume with the batch size and ranks "
                f"of that training, or from the end of an epoch"
            )

    def _detach(self, trainer: pl.Trainer) -> None:
        trainer.reload_dataloaders_every_n_epochs = 0
        self._restore_max_steps(trainer)
        source: Any = trainer.fit_loop._data_source
        if isinstance(source, PrunedSource):
            trainer.fit_loop._data_source = source.source


def _order_seed(loader: DataLoader[Any]) -> int:
    """Return the seed of the order that Lightning alone would have with several ranks."""
    if isinstance(loader.sampler, DistributedSampler):
        return loader.sampler.seed
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))  # ``seed_everything`` sets it.


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
