"""Pruning in the ``Trainer`` of Lightning 2.6, as a callback.

    from fineprune.integrations.lightning import DataPruning, record

    pruning = DataPruning(fp.Adaptive(40, save=0.35))
    trainer = lightning.Trainer(max_epochs=40, callbacks=[pruning])

In ``training_step``, ``record`` replaces the mean of the losses::

    return record(self, F.cross_entropy(self(x), y, reduction="none"))

The user's loader keeps its batches: the callback replaces its sampler and carries the indices of
each batch past the module. Lightning reads the length of the loader anew before each epoch, because
from it follow the length of the progress bar and the batch after which it validates.

Lightning has no public hook for the loader that a user gives to ``fit``. The private attributes
that are used are ``fit_loop._data_source`` and ``fit_loop._combined_loader``, and the progress of
the loops in a checkpoint; the tests fail if a release changes them.
"""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from fineprune.errors import InputError
from fineprune.pruning.indexed import Indexed, IndexedCollate
from fineprune.pruning.loader import check_in_order
from fineprune.pruning.loop_checks import check_batch
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.pruner import Pruner
from fineprune.pruning.step_counts import BatchShape, batches_of

try:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import (
        BatchSizeFinder,
        GradientAccumulationScheduler,
        LearningRateFinder,
        StochasticWeightAveraging,
    )
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise InputError(
        f"expected the package lightning, but {error.name} is not installed: "
        f"pip install 'fineprune[lightning]'"
    ) from error

# Callbacks that change what the pruning is planned from, and what to do instead.
_REFUSED: dict[type[pl.Callback], str] = {
    BatchSizeFinder: "find the batch size with a Trainer without pruning",
    LearningRateFinder: "find the learning rate with a Trainer without pruning",
    GradientAccumulationScheduler: "set Trainer(accumulate_grad_batches=...) to one number",
    StochasticWeightAveraging: "average with WeightAveraging, which adds no epoch",
}


def record(module: pl.LightningModule, losses: torch.Tensor) -> torch.Tensor:
    """Record the losses of a batch in ``training_step``, and return the scalar to backpropagate.

    Outside of the training, and with a ``Trainer`` without pruning, this is the mean of the losses,
    so a step that training and validation share may call it.

    Args:
        module: The module whose step calls this, ``self``.
        losses: One loss per sample, floating point, shape (B,) (``reduction="none"``).

    Returns:
        The mean of the losses, shape (). If the policy weights them, it is that of the weighted
        losses.

    Raises:
        InputError: A shape or a type is wrong, or the losses of this batch were recorded already.
    """
    mean: torch.Tensor = _record_untraced(module, losses)
    return mean


def _record(module: pl.LightningModule, losses: torch.Tensor) -> torch.Tensor:
    try:
        trainer = module.trainer
    except RuntimeError:  # The module is used without a Trainer.
        return losses.mean()
    if isinstance(trainer, pl.Trainer) and trainer.training:
        for callback in trainer.callbacks:
            if isinstance(callback, DataPruning):
                return callback.record(losses)
    return losses.mean()


# A compiled training step must not trace the bookkeeping.
_record_untraced = torch.compiler.disable(_record)


class DataPruning(pl.Callback):
    """Prunes the training samples of ``Trainer.fit``.

    It takes the training loader from the module, from the data module or from ``fit``, with any
    batch size, collate function and number of workers. The ``Trainer`` must train as many epochs as
    the policy has. At the end of each epoch, its loggers receive the values of ``Pruner.log``.

    Args:
        policy: Chooses the samples of each epoch.
        seed: Seeds the order of the samples. The default is the seed of the loader's
            ``DistributedSampler``, or else that of ``seed_everything``, or else 0; with two or more
            ranks, this is the order that Lightning alone has.
        labels: The class of each sample, for a policy with the option ``keep_per_class``: integers,
            shape (N,).

    Raises:
        InputError: A ``Pruner`` was given in place of a policy, or the policy needs losses of
            samples that it skipped.
    """

    def __init__(self, policy: Policy, *, seed: int | None = None, labels: Any = None) -> None:
        if isinstance(policy, Pruner):
            raise InputError(
                "expected a policy, got a Pruner: give its policy, since the callback makes the "
                "Pruner inside fit(), when the ranks know each other"
            )
        if not isinstance(policy, Policy):
            raise InputError(f"expected a policy such as Adaptive, got {type(policy).__name__}")
        if policy.rescores:
            raise InputError(
                f"expected a policy that learns from the trained samples, got {policy.name!r}, "
                f"which evaluates the skipped ones: use it in a loop of your own"
            )
        self.policy = policy
        self._seed = seed
        self._labels = labels
        self._pruner: Pruner | None = None
        self._loader: _PrunedLoader | None = None
        self._batch: _Batch | None = None  # The one that the optimizer has not used yet.
        self._state: dict[str, Any] | None = None  # A state to load.
        self._has_started = False
        self._max_steps: int | None = None  # The user's, while it is another number.

    @property
    def pruner(self) -> Pruner:
        """The ``Pruner``, which exists as soon as ``fit`` has asked for the training loader.

        Raises:
            InputError: It does not exist yet.
        """
        if self._pruner is None:
            raise InputError(
                "expected a training that has begun, since the callback makes the Pruner inside "
                "fit(), got none: in configure_optimizers, use trainer.estimated_stepping_batches"
            )
        return self._pruner

    def record(self, losses: torch.Tensor) -> torch.Tensor:
        """Do what the function ``record`` does in the training."""
        assert self._loader is not None
        index, self._loader.index = self._loader.index, None
        if index is None:
            raise InputError(
                "expected one call of record() in each training_step, got a second one: record "
                "the losses of a sample as their sum"
            )
        check_batch(index, losses)
        mean = self.pruner.weighted(index, losses).mean()
        self._batch = _Batch(index, losses.detach().clone())
        if mean.requires_grad:
            mean.register_hook(self._batch.note_use)
        return mean

    # -- Lightning's hooks ----------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the settings of the ``Trainer``, and take over its training loader."""
        if stage != TrainerFn.FITTING:
            return
        _check_trainer(trainer, self.policy)
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            raise InputError(
                "expected training_step(self, batch, ...), got one that takes dataloader_iter: "
                "take the batch, since the indices belong to the last batch that was fetched"
            )
        self._pruner = self._loader = self._batch = self._state = self._max_steps = None
        self._has_started = False
        source = _PrunedSource(trainer.fit_loop._data_source, self, trainer)
        trainer.fit_loop._data_source = source

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget the loader that was shown to ``configure_optimizers``."""
        self._has_started = True
        if self._max_steps is not None:
            self._restore_max_steps(trainer)
            trainer.fit_loop._combined_loader = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that no other callback has changed the number of epochs."""
        _check_epochs(trainer, self.policy)

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
            raise InputError(
                "expected training_step to return record(self, losses), got a step that recorded "
                'nothing: give it one loss per sample (reduction="none")'
            )
        skipped = pl_module.automatic_optimization and not outputs
        weighted = self.pruner.plan.weights is not None
        if self._batch is not None and weighted and not (self._batch.used or skipped):
            raise InputError(
                "expected the scalar that record() returns to be backpropagated, since the policy "
                "weights the losses, got another one: return what record() returns"
            )
        self._settle()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the epoch, before checkpoints are saved, and let Lightning read the next length."""
        self.pruner.end_epoch()
        trainer.reload_dataloaders_every_n_epochs = 1

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the setting of the ``Trainer`` as it was."""
        trainer.reload_dataloaders_every_n_epochs = 0

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Leave the ``Trainer`` as it was."""
        self._detach(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the ``Trainer`` as it was."""
        if stage == TrainerFn.FITTING:
            self._detach(trainer)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the state of the pruner with the losses of all ranks."""
        if self._pruner is None:
            if self._state is not None:  # It was loaded, but no epoch has begun.
                checkpoint["callbacks"][self.state_key] = self._state
            return
        # A batch counts for Lightning once the optimizer has used it. If an exception comes before
        # that, the resumed run trains the batch again.
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        if batches.processed == batches.ready:
            self._settle()
        self._pruner.synchronize()
        checkpoint["callbacks"][self.state_key] = self._pruner.state_dict()

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

    def _train_loader(self, trainer: pl.Trainer, source: Any) -> "_PrunedLoader":
        """Return the loader of the next epoch, whenever Lightning asks for it.

        Args:
            trainer: The ``Trainer``.
            source: Where Lightning gets the user's loader.
        """
        if self._loader is None:
            self._loader = self._make_loader(trainer, source.dataloader())
        if self._has_started:
            self._start_epoch(trainer)
        else:
            self._show_all_steps(trainer)
        return self._loader

    def _make_loader(self, trainer: pl.Trainer, given: Any) -> "_PrunedLoader":
        loader = _checked_loader(given)
        self._pruner = Pruner(
            loader.dataset,
            self.policy,
            labels=self._labels,
            seed=_order_seed(loader) if self._seed is None else self._seed,
            batch_size=loader.batch_size,
            accumulation=trainer.accumulate_grad_batches,
            drop_last=loader.drop_last,
            log=_to_loggers(trainer),
        )
        if self._pruner.sampler.num_replicas != trainer.world_size:
            raise InputError(
                f"expected a process group of {trainer.world_size} ranks, as the Trainer has, got "
                f"one of {self._pruner.sampler.num_replicas}: let the Trainer start the ranks"
            )
        _check_validation(trainer, self._pruner)
        if self._state is not None:
            self._pruner.load_state_dict(self._state)
        return _PrunedLoader(loader, self._pruner)

    def _show_all_steps(self, trainer: pl.Trainer) -> None:
        """Let ``trainer.estimated_stepping_batches`` be the exact number in configure_optimizers.

        Lightning multiplies the batches of the first epoch by the number of epochs. The result is
        at most ``max_steps``.
        """
        assert self._loader is not None
        if self._max_steps is None:
            self._max_steps = trainer.max_steps
            self._loader.shows_all = True
            if not trainer.fast_dev_run:
                trainer.fit_loop.epoch_loop.max_steps = self.pruner.total_steps()

    def _restore_max_steps(self, trainer: pl.Trainer) -> None:
        if self._max_steps is not None:
            trainer.fit_loop.epoch_loop.max_steps = self._max_steps
            self._max_steps = None
        if self._loader is not None:
            self._loader.shows_all = False

    def _start_epoch(self, trainer: pl.Trainer) -> None:
        """Begin the epoch that Lightning is about to train, or continue it after a resume."""
        # ``trainer.current_epoch`` is one less if the checkpoint was saved at the end of an epoch.
        epochs = trainer.fit_loop.epoch_progress.current
        epoch = epochs.processed
        if epoch >= self.policy.epochs:  # The training has ended, and Lightning will notice it.
            return
        position = self.pruner.position
        in_progress, trained = position.epoch, position.samples
        if epoch != in_progress and not (epoch == in_progress + 1 and trained):
            raise InputError(
                f"expected to train epoch {in_progress}, got epoch {epoch}: call fit() of a new "
                f"Trainer, with ckpt_path to resume"
            )
        self.pruner.start_epoch(epoch)
        resumed, self._state = self._state is not None, None
        if not (resumed and epoch == in_progress and epochs.ready > epochs.processed):
            return
        loader = self._loader
        assert loader is not None
        assert loader.batch_size is not None
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        if trained != min(batches * loader.batch_size, len(self.pruner.sampler)):
            raise InputError(
                f"expected a checkpoint from within epoch {epoch} with the same batch size and "
                f"number of ranks, got one in which a rank trained {trained} samples in {batches} "
                f"batches of {loader.batch_size}: resume with the numbers of that training, or "
                f"from the end of an epoch"
            )

    def _settle(self) -> None:
        batch, self._batch = self._batch, None
        if batch is not None:
            self.pruner.record(batch.index, batch.losses)

    def _detach(self, trainer: pl.Trainer) -> None:
        trainer.reload_dataloaders_every_n_epochs = 0
        self._restore_max_steps(trainer)
        source: Any = trainer.fit_loop._data_source
        if isinstance(source, _PrunedSource):
            trainer.fit_loop._data_source = source.source


@dataclass
class _Batch:
    """The losses of a batch that the optimizer has not used yet.

    Attributes:
        index: Indices of the samples, integers, shape (B,).
        losses: Their losses, floating point, shape (B,).
        used: Whether their mean was backpropagated.
    """

    index: torch.Tensor
    losses: torch.Tensor
    used: bool = False

    def note_use(self, gradient: torch.Tensor) -> None:
        self.used = True


class _PrunedLoader(DataLoader[Any]):
    """The user's loader with the samples of the plan. Its batches are those of the user.

    Lightning makes an iterator for each epoch and another one before, and uses only one of them.
    Workers are started and random numbers are drawn when the first batch is asked for.

    Attributes:
        index: The indices of the last batch, int64, shape (B,); None if they were recorded.
        shows_all: Whether the length is that of an epoch on all samples.
    """

    def __init__(self, loader: DataLoader[Any], pruner: Pruner) -> None:
        options = {
            name: getattr(loader, name)
            for name in (
                "batch_size",
                "num_workers",
                "pin_memory",
                "drop_last",
                "timeout",
                "worker_init_fn",
                "multiprocessing_context",
                "generator",
                "prefetch_factor",
                "persistent_workers",
            )
        }
        collate_fn = IndexedCollate(loader.collate_fn)
        super().__init__(pruner.dataset, sampler=pruner.sampler, collate_fn=collate_fn, **options)
        self.index: torch.Tensor | None = None
        self.shows_all = False
        replicas = pruner.sampler.num_replicas
        shape = BatchShape(loader.batch_size, num_replicas=replicas, drop_last=loader.drop_last)
        self._all = batches_of(len(pruner.dataset), shape)

    def __iter__(self) -> Any:
        # This is a generator, so the iterator of the loader is made at the first batch.
        for index, batch in super().__iter__():
            self.index = index
            yield batch

    def __len__(self) -> int:
        return self._all if self.shows_all else super().__len__()

    # With these two methods, Lightning does not warn that a resumed run repeats batches.
    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the position is in the state of the pruner."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the position is in the state of the pruner."""


class _PrunedSource:
    """Takes the place of the object from which Lightning gets the training loader.

    Args:
        source: That object.
        pruning: The callback.
        trainer: The ``Trainer``.
    """

    def __init__(self, source: Any, pruning: DataPruning, trainer: pl.Trainer) -> None:
        self.source = source
        self._pruning = pruning
        self._trainer = trainer

    def dataloader(self) -> DataLoader[Any]:
        return self._pruning._train_loader(self._trainer, self.source)

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # It is missing while a copy is made.
            raise AttributeError(name)
        return getattr(self.source, name)


# -- what would undo the pruning ------------------------------------------------------------------


def _check_trainer(trainer: pl.Trainer, policy: Policy) -> None:
    """Raise InputError if a setting of the ``Trainer`` would undo the pruning."""
    if not isinstance(trainer, pl.Trainer):
        raise InputError(
            f"expected a Trainer of lightning.pytorch, got one of {type(trainer).__module__}: "
            f"import lightning.pytorch instead of pytorch_lightning"
        )
    callbacks: list[pl.Callback] = trainer.callbacks
    for callback in callbacks:
        for refused, remedy in _REFUSED.items():
            if isinstance(callback, refused):
                raise InputError(
                    f"expected no {refused.__name__} together with DataPruning, got one: {remedy}"
                )
    if sum(isinstance(callback, DataPruning) for callback in callbacks) > 1:
        raise InputError("expected one DataPruning in callbacks, got several: leave one of them")
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        raise InputError(
            f"expected one device or strategy='ddp', with which the pruning is tested, got "
            f"{type(trainer.strategy).__name__}: choose one of these, or use a loop of your own"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise InputError(
            f"expected reload_dataloaders_every_n_epochs=0, since the losses belong to the samples "
            f"of one data set, got {trainer.reload_dataloaders_every_n_epochs}: leave it out"
        )
    if trainer.fast_dev_run:  # It trains a few batches and nothing else.
        return
    _check_epochs(trainer, policy)
    if trainer.max_steps != -1:
        raise InputError(
            f"expected max_steps=-1, since max_epochs and the policy say how many steps there are, "
            f"got {trainer.max_steps}: leave it out"
        )
    if trainer.overfit_batches:
        raise InputError(
            f"expected overfit_batches=0, since it replaces the sampler, got "
            f"{trainer.overfit_batches}: leave out DataPruning to overfit"
        )
    limit = trainer.limit_train_batches
    if isinstance(limit, int) or limit != 1:
        raise InputError(
            f"expected limit_train_batches=1.0, since a limit saves nothing if it is below the "
            f"length of a pruned epoch, got {limit!r}: train on a Subset of the data set instead"
        )


def _check_epochs(trainer: pl.Trainer, policy: Policy) -> None:
    if trainer.max_epochs != policy.epochs and not trainer.fast_dev_run:
        raise InputError(
            f"expected max_epochs={policy.epochs}, as the policy has it, got "
            f"{trainer.max_epochs}: make both equal"
        )


def _to_loggers(trainer: pl.Trainer) -> Callable[[dict[str, float], int], None]:
    """Return a function that gives the values of an epoch to the loggers of the ``Trainer``."""

    def write(values: dict[str, float], step: int) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(values, step)

    return write


def _checked_loader(given: Any) -> DataLoader[Any]:
    """Return the user's training loader.

    Raises:
        InputError: The pruning cannot take over its sampler.
    """
    if not isinstance(given, DataLoader) or type(given).__iter__ is not DataLoader.__iter__:
        raise InputError(
            f"expected one DataLoader of torch as the training loader, got {type(given).__name__}: "
            f"give fit() a loader over one data set, without a sampler"
        )
    if isinstance(given.dataset, IterableDataset) or not hasattr(given.dataset, "__len__"):
        raise InputError(
            f"expected a map-style data set with a length, got {type(given.dataset).__name__}: "
            f"the samples of a stream have no indices"
        )
    if isinstance(given.dataset, Indexed):
        raise InputError(
            "expected a loader over the data set itself, got one over Indexed: leave it out, since "
            "the callback adds the indices"
        )
    if given.batch_size is None:
        raise InputError(
            "expected a training loader with batch_size, got one with batch_sampler or without "
            "batches: give it batch_size and shuffle=True"
        )
    sampler: Any = given.sampler
    usual = type(sampler) is RandomSampler and not sampler.replacement
    if usual:
        usual = sampler.num_samples == len(given.dataset)
    if not usual and not (type(sampler) is DistributedSampler and sampler.shuffle):
        raise InputError(
            f"expected a training loader with shuffle=True, since the pruning chooses the samples "
            f"and their order, got one with a {type(sampler).__name__}: leave out the sampler"
        )
    check_in_order(getattr(given, "in_order", True))
    return given


def _order_seed(loader: DataLoader[Any]) -> int:
    """Return the seed of the order that Lightning alone would have with several ranks."""
    if isinstance(loader.sampler, DistributedSampler):
        return loader.sampler.seed
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))  # ``seed_everything`` sets it.


def _check_validation(trainer: pl.Trainer, pruner: Pruner) -> None:
    """Raise InputError if Lightning would find ``val_check_interval`` too large for an epoch."""
    interval = getattr(trainer, "val_check_interval", 1.0)  # It is missing if it is a time.
    if not isinstance(interval, int) or trainer.check_val_every_n_epoch is None:
        return
    if not trainer.enable_validation:
        return
    remedy = "give a fraction of the epoch, or set check_val_every_n_epoch=None"
    epochs = range(pruner.policy.epochs)
    if None in map(pruner.num_kept, epochs):
        raise InputError(
            f"expected val_check_interval as a fraction, since the lengths of the epochs depend on "
            f"the losses, got {interval}: {remedy}"
        )
    shortest = min(map(pruner.batches, epochs))
    if interval > shortest:
        raise InputError(
            f"expected val_check_interval to be at most {shortest}, the batches of the shortest "
            f"epoch, got {interval}: {remedy}"
        )


# -- what a checkpoint says about its last batch --------------------------------------------------


def _finish_batch(fit_loop: dict[str, Any]) -> None:
    """Let a run go on after the last batch of its checkpoint, where Lightning leaves something out.

    Lightning saves after a batch and before the validation that follows it, and does not validate
    after a resume. If the batch was the last one of its epoch, Lightning also leaves out the hooks
    at the end of the epoch, and it compares the number of batches with the length of the next
    epoch: after a pruned epoch, it trains only the last batches of a full one.

    Args:
        fit_loop: The state of the fit loop, which is changed in place.
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
