"""What would undo the pruning in a ``Trainer``. Each is an InputError before the training."""

import inspect
from typing import Any

import transformers
from transformers import Trainer

from fineprune.errors import InputError, warn_user
from fineprune.pruning.indexed import Indexed

# The private methods that are overridden, with their parameters in all releases that were tested.
OVERRIDDEN = {
    "_get_dataloader": "dataset description batch_size sampler_fn is_training dataloader_key",
    "_get_collator_with_removed_columns": "data_collator description",
    "_get_train_sampler": "train_dataset",
    "_init_training_state": "max_steps num_update_steps_per_epoch num_train_epochs "
    "resume_from_checkpoint trial",
    "_run_epoch": "model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial "
    "ignore_keys_for_eval start_time resume_from_checkpoint epochs_trained "
    "steps_trained_in_current_epoch",
    "_save_optimizer_and_scheduler": "output_dir",
}
# What must be off, where it is set, and why.
_REFUSED = {
    "auto_find_batch_size": ("args", "the plans need a fixed batch size"),
    "ignore_data_skip": ("args", "a resumed epoch would train its first batches twice"),
    "enable_jit_checkpoint": (
        "args",
        "it saves between the losses of a batch and its optimizer step; use save_steps",
    ),
    "padding_free": (  # TRL also sets it if texts are packed.
        "trainer",
        "several texts in one row have no losses of their own; pack them with "
        "packing_strategy='wrapped', if at all",
    ),
}
OLDEST, NEWEST = (5, 19), (5, 24)


def check_release() -> None:
    """Raise InputError if this release of transformers has other private methods.

    Warns:
        UserWarning: The release is newer than the newest one that was tested.
    """
    found = transformers.__version__
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST, NEWEST))
    release = tuple(map(int, found.split(".")[:2]))
    fits = True
    for name, parameters in OVERRIDDEN.items():
        method = getattr(Trainer, name, None)
        expected = ["self", *parameters.split()]
        fits &= method is not None and list(inspect.signature(method).parameters) == expected
    if release < OLDEST or not fits:
        other = "which has other ones" if not fits else "which was not tested"
        raise InputError(
            f"expected transformers {oldest} to {newest}, whose private methods the pruning "
            f"overrides, got {found}, {other}: install 'transformers=={newest}.*'"
        )
    if release > NEWEST:
        warn_user(
            f"the pruning was tested with transformers {oldest} to {newest}, not with {found}: "
            f"compare the number of steps with trainer.pruner.total_steps()",
            UserWarning,
        )


def check_is_trainer(trainer: Any) -> None:
    """Raise InputError if a class with the pruning is not derived from ``transformers.Trainer``."""
    if not isinstance(trainer, Trainer):
        raise InputError(
            f"expected a class derived from PruningMixin and transformers.Trainer, got "
            f"{type(trainer).__name__}, which is not derived from the latter: use a Pruner in a "
            f"loop of your own instead"
        )


def remedy_of_loader(trainer: Any) -> str:
    """Return which class makes another loader than ``Trainer``, and what to do."""
    made_by = next(of for of in type(trainer).__mro__ if "get_train_dataloader" in vars(of))
    return (
        f"{made_by.__name__} overrides get_train_dataloader; put get_train_dataloader = "
        f"transformers.Trainer.get_train_dataloader into your class, and give a data_collator"
    )


def check_arguments(trainer: Any) -> None:
    """Raise InputError if an argument of the training would undo the pruning."""
    args = trainer.args
    if trainer.train_dataset is None:
        raise InputError("expected a train_dataset, got None: give it to the trainer")
    if isinstance(trainer.train_dataset, Indexed):
        raise InputError(
            "expected a train_dataset without fp.Indexed, got one with it: give the trainer your "
            "own data set, since it adds the indices itself"
        )
    for name, (owner, reason) in _REFUSED.items():
        if getattr(args if owner == "args" else trainer, name, False):
            raise InputError(f"expected {name}=False, got True: {reason}")
    strategy = args.train_sampling_strategy
    if strategy not in ("random", "group_by_length"):
        raise InputError(
            f"expected train_sampling_strategy 'random' or 'group_by_length', got {strategy!r}: "
            f"the pruner shuffles the samples that it keeps"
        )
    even = args.accelerator_config.even_batches or args.dataloader_drop_last
    if args.world_size > 1 and not even:
        raise InputError(
            "expected even_batches=True in accelerator_config, got False: processes with different "
            "numbers of batches would wait for each other forever; set it, or "
            "dataloader_drop_last=True"
        )
    if args.n_gpu > 1:
        raise InputError(
            f"expected one GPU per process, got {args.n_gpu}: start the script with torchrun"
        )
    sizes = (trainer.get_tp_size(), trainer.get_cp_size(), trainer.get_sp_size())
    if max(sizes) > 1:
        raise InputError(
            f"expected data parallelism only, got tensor, context and sequence parallelism of "
            f"{', '.join(map(str, sizes))} processes, which would record each sample several times"
        )


def check_pruner(trainer: Any) -> None:
    """Raise InputError unless the pruner fits the training set and the arguments of the training.

    These may change after the trainer was made, such as in a hyperparameter search.
    """
    args, pruner = trainer.args, trainer.pruner
    for name, value in trainer._shape_of_plan().items():
        given = getattr(pruner.shape, name)
        if given != value:
            raise InputError(
                f"expected a Pruner with {name}={value} for these TrainingArguments, got {given}: "
                f"give Pruner {name}={value}, or make a new trainer if they have changed"
            )
    if pruner.num_samples != len(trainer.train_dataset):
        raise InputError(
            f"expected a pruner of the {len(trainer.train_dataset)} samples of train_dataset, got "
            f"one of {pruner.num_samples}: give the trainer and the pruner the same data set"
        )
    if args.max_steps <= 0 and args.num_train_epochs != pruner.policy.epochs:
        raise InputError(
            f"expected num_train_epochs={pruner.policy.epochs}, the epochs of the policy, got "
            f"{args.num_train_epochs:g}: make both equal, in a new trainer if they have changed"
        )


def warn_of_other_samples(trainer: Any, given: Any) -> None:
    """Warn if a trainer has dropped or packed samples of the data set that it was given."""
    made = trainer.train_dataset
    if hasattr(given, "__len__") and hasattr(made, "__len__") and len(given) != len(made):
        warn_user(
            f"{type(trainer).__name__} made {len(made)} training samples of the {len(given)} that "
            f"it was given, so the indices of the pruner do not refer to your data: look them up "
            f"in trainer.train_dataset",
            UserWarning,
        )


def check_sampler(trainer: Any, method: Any) -> None:
    """Raise InputError unless the sampler that the pruner replaces is that of ``Trainer``.

    ``method`` is the ``_get_train_sampler`` that the trainer would have without the pruning.
    """
    if method.__func__ is not Trainer._get_train_sampler:
        raise InputError(
            f"expected a trainer with the sampler of Trainer, which the pruner replaces, got "
            f"{type(trainer).__name__}, which needs its own: train it without pruning"
        )
