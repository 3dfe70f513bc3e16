"""What would undo the pruning in a ``Trainer`` of Lightning. Each is an InputError at the start."""

import inspect
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from fineprune.errors import InputError
from fineprune.pruning.indexed import Indexed
from fineprune.pruning.loader import check_in_order
from fineprune.pruning.policies.policy import Policy, check_is_policy
from fineprune.pruning.pruner import Pruner
from fineprune.pruning.step_counts import BatchShape

# Callbacks that change what the pruning is planned from, and what to do instead.
_CALLBACKS: dict[type[pl.Callback], str] = {
    BatchSizeFinder: "find the batch size with a Trainer without pruning",
    LearningRateFinder: "find the learning rate with a Trainer without pruning",
    GradientAccumulationScheduler: "set Trainer(accumulate_grad_batches=...) to one number",
    StochasticWeightAveraging: "average with WeightAveraging, which adds no epoch",
}

# Settings that must be as they are by default, why, and what to do instead.
_SETTINGS = {
    "reload_dataloaders_every_n_epochs": (
        0,
        "the losses belong to the samples of one data set",
        "leave it out",
    ),
    "max_steps": (-1, "max_epochs and the policy say how many steps there are", "leave it out"),
    "overfit_batches": (0, "it replaces the sampler", "leave out DataPruning to overfit"),
    "limit_train_batches": (
        1.0,
        "a limit saves nothing if it is below the length of a pruned epoch",
        "train on a Subset of the data set instead",
    ),
}


def check_policy(policy: Policy) -> None:
    """Raise InputError unless this is a policy that a callback can serve."""
    if isinstance(policy, Pruner):
        raise InputError(
            "expected a policy, got a Pruner: give its policy, since the callback makes the Pruner "
            "inside fit(), when the ranks know each other"
        )
    check_is_policy(policy)


def check_trainer(trainer: pl.Trainer, module: pl.LightningModule, own: pl.Callback) -> None:
    """Raise InputError if a setting of the ``Trainer`` would undo the pruning by ``own``."""
    if not isinstance(trainer, pl.Trainer):
        raise InputError(
            f"expected a Trainer of lightning.pytorch, got one of {type(trainer).__module__}: "
            f"import lightning.pytorch instead of pytorch_lightning"
        )
    callbacks: list[pl.Callback] = trainer.callbacks
    for callback in callbacks:
        for refused, remedy in _CALLBACKS.items():
            if isinstance(callback, refused):
                raise InputError(
                    f"expected no {refused.__name__} together with DataPruning, got one: {remedy}"
                )
    if sum(isinstance(callback, type(own)) for callback in callbacks) > 1:
        raise InputError("expected one DataPruning in callbacks, got several: leave one of them")
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise InputError(
            "expected training_step(self, batch, ...), got one that takes dataloader_iter: take "
            "batch instead, since the indices are those of the last batch that was fetched"
        )
    # DeepSpeed's and XLA's strategies are subclasses of these.
    if type(trainer.strategy) not in (SingleDeviceStrategy, DDPStrategy):
        raise InputError(
            f"expected one device or strategy='ddp', with which the pruning is tested, got "
            f"{type(trainer.strategy).__name__}: choose one of these, or use a loop of your own"
        )
    for name, (wanted, reason, remedy) in _SETTINGS.items():
        given = getattr(trainer, name)
        one_batch = isinstance(wanted, float) and isinstance(given, int)
        if (given != wanted or one_batch) and not trainer.fast_dev_run:
            raise InputError(f"expected {name}={wanted}, since {reason}, got {given!r}: {remedy}")


def check_epochs(trainer: pl.Trainer, policy: Policy) -> None:
    """Raise InputError unless the ``Trainer`` trains as many epochs as the policy has."""
    if trainer.max_epochs != policy.epochs and not trainer.fast_dev_run:
        raise InputError(
            f"expected max_epochs={policy.epochs}, the epochs of the policy, got "
            f"{trainer.max_epochs}: make both equal"
        )


def check_same_steps(trainer: pl.Trainer, pruner: Pruner, state: dict[str, Any]) -> None:
    """Raise InputError if a scheduler would go on counting steps of another size.

    Lightning restores its count, and all of OneCycleLR, so making a new scheduler changes nothing.
    """
    if "shape" not in state:  # The pruner will say so.
        return
    before, now = BatchShape(**state["shape"]).multiple, pruner.shape.multiple
    if before == now:
        return
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step":
            raise InputError(
                f"expected to resume with steps of {before} samples (batch x ranks x "
                f"accumulation), since {type(config.scheduler).__name__} counts steps, got steps "
                f"of {now}: resume with the same numbers as before, or load the weights into the "
                f"module and call fit() of a new Trainer without ckpt_path"
            )


def check_ranks(trainer: pl.Trainer, pruner: Pruner) -> None:
    """Raise InputError unless the pruner knows the ranks of the ``Trainer``."""
    known = pruner.shape.num_replicas
    if known != trainer.world_size:
        raise InputError(
            f"expected a process group of the {trainer.world_size} ranks of the Trainer, got one "
            f"of {known}: let the Trainer start the ranks"
        )


def check_shares(trainer: pl.Trainer, loader: DataLoader[object]) -> None:
    """Raise InputError unless each rank of Lightning alone trains its share of one data set."""
    sampler, ranks = loader.sampler, trainer.world_size
    if isinstance(sampler, DistributedSampler):
        if sampler.num_replicas != ranks:
            raise InputError(
                f"expected a DistributedSampler for the {ranks} ranks of the Trainer, which share "
                f"one data set, got one for {sampler.num_replicas}: give every rank the whole data "
                f"set, and a loader with shuffle=True and no sampler"
            )
    elif ranks > 1 and not trainer._accelerator_connector.use_distributed_sampler:
        raise InputError(
            "expected use_distributed_sampler=True with several ranks, since each would train a "
            "part of its own data set, got False: leave the option out, and give every rank the "
            "whole data set"
        )


def checked_loader(given: object) -> DataLoader[object]:
    """Return the user's training loader.

    Raises:
        InputError: The pruning cannot take over its sampler.
    """
    kind = type(given).__name__
    if not isinstance(given, DataLoader):
        remedy = "give fit() a DataLoader over one data set, with batch_size and shuffle=True"
        if _holds_one(given):
            kind += " of one"
            remedy = "give fit() the loader itself, whose batches training_step then receives"
        raise InputError(
            f"expected one torch DataLoader as the training loader, got {kind}: {remedy}"
        )
    if type(given).__iter__ is not DataLoader.__iter__:
        raise InputError(
            f"expected a training loader that iterates as DataLoader does, since the callback "
            f"makes one over its data set, got {kind}, which overrides __iter__: give fit() a "
            f"DataLoader, change batches in collate_fn, and leave the position to the checkpoint"
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
    if not _shuffles_all(given):
        raise InputError(
            f"expected a training loader that shuffles, since the pruning chooses the samples and "
            f"their order, got one with a {type(given.sampler).__name__}: give it shuffle=True and "
            f"no sampler"
        )
    check_in_order(getattr(given, "in_order", True))
    return given


def _holds_one(given: object) -> bool:
    """Return whether a list, another collection or a ``CombinedLoader`` holds only a loader."""
    loaders = (given if isinstance(given, CombinedLoader) else CombinedLoader(given)).flattened
    return len(loaders) == 1 and isinstance(loaders[0], DataLoader)


def _shuffles_all(loader: DataLoader[object]) -> bool:
    """Return whether a loader yields every sample once, in a random order."""
    sampler, length = loader.sampler, len(loader.dataset)  # type: ignore[arg-type]
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == length
    return type(sampler) is DistributedSampler and sampler.shuffle


def check_validation(trainer: pl.Trainer, pruner: Pruner) -> None:
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
