"""What would undo the pruning in a ``Trainer``. Each is an InputError before the training."""

from typing import Any

import transformers
from transformers import Trainer

from fineprune.errors import InputError
from fineprune.integrations.transformers.indexed_batches import IndexedBatches
from fineprune.pruning.policies.policy import Policy

# The private methods that are overridden.
OVERRIDDEN = (
    "_get_train_sampler",
    "_init_training_state",
    "_run_epoch",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
)


def check_training(trainer: Any, policy: Policy) -> None:
    """Raise InputError if the release, or an argument of the training, would undo the pruning."""
    for name in OVERRIDDEN:
        if not hasattr(Trainer, name):
            raise InputError(
                f"expected transformers 5.19 to 5.24, whose private methods the pruning overrides, "
                f"got {transformers.__version__} without Trainer.{name}: install "
                f"'transformers==5.24.*'"
            )
    args = trainer.args
    own = next(
        made
        for made in type(trainer).__mro__
        if "_get_train_sampler" in vars(made) and not issubclass(made, IndexedBatches)
    )
    wanted = {
        "num_train_epochs": (args.num_train_epochs, policy.epochs),
        "max_steps": (max(args.max_steps, -1), -1),
        "auto_find_batch_size": (args.auto_find_batch_size, False),
        "ignore_data_skip": (args.ignore_data_skip, False),
        "enable_jit_checkpoint": (getattr(args, "enable_jit_checkpoint", False), False),
        "train_sampling_strategy": (args.train_sampling_strategy, "random"),
        "n_gpu": (max(args.n_gpu, 1), 1),
        "the class with the sampler": (own.__name__, Trainer.__name__),
    }
    if args.world_size > 1:
        config = args.accelerator_config
        wanted["even_batches"] = (config.even_batches or args.dataloader_drop_last, True)
        wanted["dispatch_batches"] = (bool(config.dispatch_batches), False)
        sizes = (trainer.get_tp_size(), trainer.get_cp_size(), trainer.get_sp_size())
        wanted["tensor, context and sequence parallelism"] = (max(sizes), 1)
    for name, (given, expected) in wanted.items():
        if given != expected:
            raise InputError(
                f"expected {name}={expected}, since the plan names the samples of each batch, got "
                f"{given}: set it so, or train without pruning"
            )
