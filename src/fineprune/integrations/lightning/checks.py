"""What would undo the pruning in a ``Trainer`` of Lightning. Each is an InputError at the start."""

import inspect
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from fineprune.errors import InputError
from fineprune.pruning.indexed import Indexed
from fineprune.pruning.loader import check_in_order
from fineprune.pruning.policies.policy import Policy

# Callbacks that change what the pruning is planned from, and what to do instead.
_CALLBACKS: dict[type[pl.Callback], str] = {
    callbacks.BatchSizeFinder: "find the batch size with a Trainer without pruning",
    callbacks.LearningRateFinder: "find the learning rate with a Trainer without pruning",
    callbacks.GradientAccumulationScheduler: "set accumulate_grad_batches to one number",
    callbacks.StochasticWeightAveraging: "average with WeightAveraging, which adds no epoch",
}


def check_trainer(trainer: pl.Trainer, module: pl.LightningModule, policy: Policy) -> None:
    """Raise InputError if a setting of the ``Trainer`` would undo the pruning by ``policy``."""
    for callback in trainer.callbacks:
        for refused, remedy in _CALLBACKS.items():
            if isinstance(callback, refused):
                raise InputError(
                    f"expected no {refused.__name__} together with DataPruning, got one: {remedy}"
                )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise InputError(
            "expected training_step(self, batch, ...), got one that takes dataloader_iter: take "
            "batch instead, since the indices are those of the last batch that was fetched"
        )
    # DeepSpeed's and XLA's strategies are subclasses of these.
    if type(trainer.strategy) not in (SingleDeviceStrategy, DDPStrategy):
        raise InputError(
            f"expected one device or strategy='ddp', got {type(trainer.strategy).__name__}: choose "
            f"one of these, or use a loop of your own"
        )
    if trainer.fast_dev_run:
        return
    for name, wanted, remedy in (
        ("max_epochs", policy.epochs, "give the Trainer as many epochs as the policy"),
        ("max_steps", -1, "leave it out, since max_epochs and the policy say how many there are"),
        ("overfit_batches", 0.0, "leave out DataPruning to overfit"),
        ("limit_train_batches", 1.0, "train on a Subset of the data set instead"),
        ("reload_dataloaders_every_n_epochs", 0, "losses belong to one data set"),
    ):
        given = getattr(trainer, name)
        if (given, type(given)) != (wanted, type(wanted)):  # One batch is 1, and all are 1.0.
            raise InputError(f"expected {name}={wanted}, got {given!r}: {remedy}")
    interval = getattr(trainer, "val_check_interval", 1.0)  # It is missing if it is a time.
    if isinstance(interval, int) and trainer.check_val_every_n_epoch is not None:
        raise InputError(
            f"expected val_check_interval as a fraction, since epochs differ in length, got "
            f"{interval}: give a fraction, or set check_val_every_n_epoch=None"
        )


def checked_loader(trainer: pl.Trainer, given: Any) -> DataLoader[Any]:
    """Return the user's training loader. InputError: the pruning cannot take over its sampler."""
    found = _unusable(trainer, given)
    if found is not None:
        raise InputError(
            f"expected one DataLoader over a map-style data set, with batch_size and "
            f"shuffle=True, since the pruning chooses the samples and their order, got {found}: "
            f"give fit() DataLoader(train_set, batch_size=..., shuffle=True) with the same data "
            f"set on every rank"
        )
    loader: DataLoader[Any] = given
    check_in_order(getattr(loader, "in_order", True))
    return loader


def _unusable(trainer: pl.Trainer, loader: Any) -> str | None:
    """Return what is wrong with a training loader; None if its sampler can be replaced."""
    kind, ranks = type(loader).__name__, trainer.world_size
    if not isinstance(loader, DataLoader):
        return kind
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"{kind}, which overrides __iter__"
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        return f"a stream ({type(loader.dataset).__name__})"
    if isinstance(loader.dataset, Indexed):
        return "one over fp.Indexed, which the callback adds itself"
    if loader.batch_size is None:
        return "one with a batch_sampler, or without batches"
    sampler = loader.sampler
    if type(sampler) is DistributedSampler and sampler.shuffle:
        if sampler.num_replicas == ranks:
            return None
        return f"a DistributedSampler for {sampler.num_replicas} of {ranks} ranks"
    if type(sampler) is not RandomSampler or sampler.replacement:
        return f"one with a {type(sampler).__name__}"
    if sampler.num_samples != len(loader.dataset):
        return "one that draws a part of the samples"
    if ranks > 1 and not trainer._accelerator_connector.use_distributed_sampler:
        return "use_distributed_sampler=False, so that each rank has a data set of its own"
    return None
