"""Pruning in the ``Trainer`` of ``transformers``.

    from fineprune.integrations.transformers import PruningTrainer

    policy = fp.Adaptive(epochs=8, save=0.3)
    trainer = PruningTrainer(model, args, train_dataset=train_set, pruning=policy)

The model's own loss is backpropagated, so that a policy that skips nothing gives the same weights
as the ``Trainer`` alone. The losses of the samples are computed beside it, without gradients.

A callback cannot change the sampler, the loss or the number of steps, so methods of the ``Trainer``
are overridden. Some of them are private. ``OVERRIDDEN`` names them; the tests compare their
parameters with those of the release for which this module was written.
"""

import copy
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import Trainer, TrainerCallback
from transformers.utils import is_datasets_available

from fineprune.errors import InputError
from fineprune.integrations.length_grouping import GroupedByLength
from fineprune.integrations.sample_losses import (
    SampleLosses,
    for_model,
    labeled_tokens,
)
from fineprune.pruning.indexed import Indexed
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.pruner import Pruner

# The file of a checkpoint that holds the pruner's state.
STATE_FILE = "pruner.pt"

# The private methods that are overridden, and the release in which they were tested.
OVERRIDDEN = (
    "_get_dataloader",
    "_get_collator_with_removed_columns",
    "_get_train_sampler",
    "_init_training_state",
    "_run_epoch",
    "_save_optimizer_and_scheduler",
)
TESTED = "5.23"

# The key of the indices in a batch. It is removed before the model receives the batch.
_INDEX = "index"

# The model's loss and the mean of the samples' losses differ by more than rounding.
_TOLERANCE = 0.01

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class PruningMixin(_Base):
    """Adds pruning to a ``Trainer``: ``class MyTrainer(PruningMixin, Seq2SeqTrainer)``.

    The order of the bases matters. All arguments of the ``Trainer`` keep their meaning.

    A subclass that overrides ``compute_loss`` and does not call ``super().compute_loss`` passes the
    losses of the samples to ``record``.

    Args:
        args: Positional arguments of the ``Trainer``.
        pruning: A policy, for as many epochs as ``num_train_epochs``, or a pruner of the training
            set. The pruner must have ``num_replicas=1``, the batch size of all processes together,
            and the arguments' accumulation and ``drop_last``, because the ``Trainer`` itself
            divides the batches among the processes.
        sample_losses: Computes the losses of the samples, float, shape (B,), from the outputs of
            the model and the inputs with the labels. It is needed for models whose losses are not
            known here, and with a ``compute_loss_func``.
        kwargs: Keyword arguments of the ``Trainer``.

    Attributes:
        pruner: The ``Pruner``.

    Raises:
        InputError: An argument of the training would undo the pruning, or the pruner does not fit.
    """

    train_dataset: Any

    def __init__(
        self,
        *args: Any,
        pruning: Policy | Pruner,
        sample_losses: SampleLosses | None = None,
        **kwargs: Any,
    ) -> None:
        missing = [name for name in OVERRIDDEN if not hasattr(Trainer, name)]
        if missing:
            raise InputError(
                f"expected a Trainer with {missing[0]}, as in transformers {TESTED}, got "
                f"transformers {transformers.__version__}: install 'transformers=={TESTED}.*'"
            )
        super().__init__(*args, **kwargs)
        if self.train_dataset is None and isinstance(pruning, Pruner):
            self.train_dataset = pruning.dataset.dataset
        _check_arguments(self)
        self.pruner = self._make_pruner(pruning)
        self._sample_losses = sample_losses
        self._compared = sample_losses is not None
        own = type(self).compute_loss is not PruningMixin.compute_loss
        if sample_losses is None and self.pruner.policy.needs_losses and not own:
            self._sample_losses = self._known_sample_losses()  # Raises its error now.
        # Each call of train() begins anew.
        self._untrained = copy.deepcopy(self.pruner.state_dict())
        self._index: torch.Tensor | None = None
        self._has_recorded = False
        self._batches_left = 0
        self.add_callback(_EndEpoch(self))
        self.pruner.log(self._log_epoch)
        self._epochs_and_steps()  # Raises its errors now.

    # -- the losses -----------------------------------------------------------------------------

    def record(self, losses: torch.Tensor) -> torch.Tensor:
        """Record the losses of a batch in ``compute_loss``, and return the scalar to backpropagate.

        In an evaluation, nothing is recorded.

        Args:
            losses: One loss per sample, floating point, shape (B,).

        Returns:
            The mean of the losses, with the weights of the plan, shape ().

        Raises:
            InputError: The ``Trainer`` would not divide the scalar by the number of accumulated
                batches, because the model's ``forward`` takes any keyword argument.
        """
        if self._index is None:
            return losses.mean()
        if (
            self.loss_is_scaled_for_ga is None
            and self.model_accepts_loss_kwargs
            and self.args.gradient_accumulation_steps > 1
        ):
            raise InputError(
                "expected loss_is_scaled_for_ga to be set in a trainer with a compute_loss of its "
                "own and gradient accumulation, got None: set it to False if compute_loss returns "
                "the mean of a batch, or to True if it divides by num_items_in_batch"
            )
        self._has_recorded = True
        return self.pruner.record(self._index, losses)

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute the loss as the ``Trainer`` does and, while training, record the samples' losses.

        If the plan has weights, the loss receives the difference that they make.
        """
        given = dict(inputs)  # The Trainer may remove the labels.
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if self._index is not None:
            loss = self._recorded(loss, outputs, given, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _recorded(self, loss: Any, outputs: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        assert self._index is not None
        self._has_recorded = True
        index, policy = self._index, self.pruner.policy
        weights = self.pruner.plan.weights
        if weights is None and not policy.needs_losses:
            self.pruner.record(index, torch.zeros(len(index)))
            return loss
        if self._sample_losses is None:
            self._sample_losses = self._known_sample_losses()
        with torch.set_grad_enabled(weights is not None):
            losses = self._sample_losses(outputs, inputs)
        if losses.shape != index.shape:
            raise InputError(
                f"expected one loss for each of the {len(index)} samples of a batch, got losses of "
                f"shape {tuple(losses.shape)}: samples that are packed into one row, or parts of "
                f"samples, have no losses of their own"
            )
        if not self._compared:
            self._compare(loss, losses, inputs, num_items_in_batch)
        if weights is None:
            self.pruner.record(index, losses)
            return loss
        return loss + self._weighted_difference(losses, inputs, num_items_in_batch)

    def _weighted_difference(self, losses: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        """Return what the weights of the plan add to the loss of a batch, shape ()."""
        assert self._index is not None
        # The loss as a whole is backpropagated, so the mean that ``record`` returns is not needed.
        self.pruner.record(self._index, losses.detach())
        added = self.pruner.weighted(self._index, losses) - losses
        return (self._shares(inputs, num_items_in_batch) * added).sum()

    def _shares(self, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """Return the factors of the samples' losses in the loss of the batch, shape (B,)."""
        assert self._index is not None
        labels = inputs.get(self._label_name)
        if isinstance(labels, torch.Tensor):
            tokens = labeled_tokens(labels[..., 1:] if self._loss_shifts_labels else labels)
        else:
            tokens = torch.ones_like(self._index)
        if num_items_in_batch is None:
            return tokens / tokens.sum().clamp(min=1)
        processes = self.accelerator.num_processes if self._averages_over_processes else 1
        shares: torch.Tensor = tokens * processes / num_items_in_batch
        return shares

    @property
    def _averages_over_processes(self) -> bool:
        return self.args.average_tokens_across_devices and (
            self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        )

    def _compare(self, loss: Any, losses: Any, inputs: Any, num_items_in_batch: Any) -> None:
        """Warn once if the loss of the batch is not made of the losses of its samples."""
        self._compared = True
        if self.label_smoother is not None:
            return  # Then they differ on purpose.
        with torch.no_grad():
            mean = (self._shares(inputs, num_items_in_batch) * losses).sum().item()
        given, accumulation = loss.item(), self.args.gradient_accumulation_steps
        if math.isclose(given, mean, rel_tol=_TOLERANCE) or not math.isfinite(given):
            return
        if math.isclose(given, mean * accumulation, rel_tol=_TOLERANCE):
            said = (
                f"{type(self.model).__name__} takes num_items_in_batch but does not divide by it, "
                f"so its gradients are {accumulation} times too large with accumulation: set "
                f"trainer.model_accepts_loss_kwargs = False"
            )
        else:
            said = (
                f"the model's loss of the first batch is {given:.4g}, but the mean of its samples' "
                f"losses, by which they are pruned, is {mean:.4g}: if the difference is not "
                f"intended, give the trainer sample_losses"
            )
        warnings.warn(said, RuntimeWarning, stacklevel=2)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Train a batch, whose indices are kept from the model."""
        if _INDEX not in inputs:
            raise InputError(
                "expected the batches of this trainer's own loader, got one without the indices of "
                "its samples: do not override get_train_dataloader; give data_collator instead"
            )
        self._index, self._has_recorded = inputs.pop(_INDEX), False
        try:
            loss = super().training_step(model, inputs, num_items_in_batch=num_items_in_batch)
        finally:
            self._index = None
        if not self._has_recorded:
            raise InputError(
                "expected compute_loss to record the losses of the samples, but it did not: call "
                "super().compute_loss, or return self.record(losses) with one loss per sample"
            )
        self._batches_left -= 1
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, beside the loss, the share of the samples that the epoch skips."""
        if self.is_in_train and "loss" in logs:
            number = len(self.train_dataset)
            logs["skipped_share"] = (number - len(self.pruner.plan.kept)) / number
        super().log(logs, *args, **kwargs)

    def _log_epoch(self, values: dict[str, float], step: int) -> None:
        # To log anything unsets what tells the Trainer to log the loss.
        wanted = self.control.should_log
        self.log(values)
        self.control.should_log = wanted

    # -- the data -------------------------------------------------------------------------------

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("is_training"):
            if is_datasets_available():
                import datasets

                if isinstance(dataset, datasets.Dataset):
                    dataset = self._remove_unused_columns(dataset, description="Training")
            dataset = Indexed(dataset)
        return super()._get_dataloader(dataset, *args, **kwargs)

    def _get_collator_with_removed_columns(
        self, data_collator: Any, description: str | None = None
    ) -> Any:
        collator = super()._get_collator_with_removed_columns(
            data_collator, description=description
        )
        return _Collate(collator) if description == "Training" else collator

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.args.train_sampling_strategy != "group_by_length":
            return self.pruner.sampler
        return GroupedByLength(self.pruner.sampler, self._lengths(), self._samples_per_step())

    def _lengths(self) -> list[int]:
        items, name = self.train_dataset, self.args.length_column_name
        if name in (getattr(items, "column_names", None) or ()):
            return list(items[name])
        processing = self.processing_class
        name = "input_ids" if processing is None else processing.model_input_names[0]
        return [len(items[position][name]) for position in range(len(items))]

    # -- the epochs -----------------------------------------------------------------------------

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Return what the ``Trainer`` does, with the epochs and steps of the policy."""
        values = list(super().set_initial_training_values(args, dataloader))
        self._check_length(dataloader)
        epochs, steps = self._epochs_and_steps()
        values[0], values[3], values[6] = epochs, steps * values[4], steps
        return tuple(values)

    def _epochs_and_steps(self) -> tuple[int, int]:
        """Return the number of epochs that are begun, and of optimizer steps."""
        policy, wanted = self.pruner.policy, self.args.max_steps
        if wanted <= 0:
            if policy.total_steps is None and None in map(
                self.pruner.num_kept, range(policy.epochs)
            ):
                raise InputError(
                    f"expected max_steps, at which the learning rate ends, since the number of "
                    f"steps of policy {policy.name!r} depends on data, got none: set max_steps in "
                    f"TrainingArguments"
                )
            return policy.epochs, self.pruner.total_steps()
        before = 0
        for epoch in range(policy.epochs):
            if self.pruner.num_kept(epoch) is None:  # It depends on data.
                return policy.epochs, wanted
            before += self.pruner.steps(epoch)
            if before >= wanted:
                return epoch + 1, wanted
        raise InputError(
            f"expected max_steps of at most {before}, the steps of the policy's {policy.epochs} "
            f"epochs, got {wanted}: make the policy longer, or leave max_steps out"
        )

    def _init_training_state(
        self,
        max_steps: Any,
        num_update_steps_per_epoch: Any,
        num_train_epochs: Any,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is None:
            self.pruner.load_state_dict(copy.deepcopy(self._untrained))
            return 0, 0
        file = Path(resume_from_checkpoint, STATE_FILE)
        if not file.exists():
            raise InputError(
                f"expected {STATE_FILE} in the checkpoint {resume_from_checkpoint}, found none: "
                f"resume from a checkpoint that this trainer saved without save_only_model"
            )
        state = torch.load(file, weights_only=True)
        self.pruner.load_state_dict(state)
        epoch, samples = _position(state)
        if samples is None:
            return epoch + 1, 0
        self.pruner.set_epoch(epoch)
        if math.ceil(samples / self._samples_per_batch()) >= self._num_batches():
            # Saved between the last batch of the epoch and its end.
            self.pruner.end_epoch()
            return epoch + 1, 0
        batches, rest = divmod(samples, self._samples_per_step())
        if rest:
            raise InputError(
                f"expected to resume epoch {epoch} after whole steps of "
                f"{self._samples_per_step()} samples, got {samples} trained samples: resume inside "
                f"an epoch with the batch size, accumulation and number of processes of before"
            )
        return epoch, batches * self.args.gradient_accumulation_steps

    def _run_epoch(self, **given: Any) -> None:
        epoch, loader = given["epoch"], given["train_dataloader"]
        self.pruner.set_epoch(epoch)
        self._check_length(loader)
        batches = len(loader)
        begun = epoch == given["epochs_trained"] and given["resume_from_checkpoint"] is not None
        skipped = given["steps_trained_in_current_epoch"] if begun else 0
        self._batches_left = batches - skipped
        given["steps_in_epoch"] = batches
        given["num_update_steps_per_epoch"] = math.ceil(
            batches / self.args.gradient_accumulation_steps
        )
        super()._run_epoch(**given)

    def _save_optimizer_and_scheduler(self, output_dir: Any) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self.pruner.synchronize()
        if self.args.should_save:
            torch.save(self.pruner.state_dict(), Path(output_dir, STATE_FILE))

    # -- the pruner -----------------------------------------------------------------------------

    def _make_pruner(self, pruning: Policy | Pruner) -> Pruner:
        wanted = {
            "batch_size": self._samples_per_batch(),
            "accumulation": self.args.gradient_accumulation_steps,
            "drop_last": self.args.dataloader_drop_last,
            "num_replicas": 1,
        }
        if not isinstance(pruning, Pruner):
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            pruner = Pruner(self.train_dataset, pruning, seed=seed, **wanted)
        else:
            pruner = pruning
            for name, value in wanted.items():
                given = getattr(pruner._shape, name)
                if given != value:
                    raise InputError(
                        f"expected a Pruner with {name}={value} for these TrainingArguments, got "
                        f"{given}: give Pruner {name}={value}"
                    )
        number = len(pruner.sampler.dataset)  # type: ignore[arg-type]
        if number != len(self.train_dataset):
            raise InputError(
                f"expected a pruner of the {len(self.train_dataset)} samples of train_dataset, got "
                f"one of {number}: give the trainer and the pruner the same data set"
            )
        epochs = self.args.num_train_epochs
        if self.args.max_steps <= 0 and epochs != pruner.policy.epochs:
            raise InputError(
                f"expected num_train_epochs={pruner.policy.epochs}, the epochs of the policy, got "
                f"{epochs:g}: make both equal"
            )
        return pruner

    def _known_sample_losses(self) -> SampleLosses:
        if self.compute_loss_func is not None:
            raise InputError(
                "expected sample_losses beside compute_loss_func, whose losses of the samples are "
                "not known, got None: give sample_losses=function(outputs, inputs)"
            )
        model = self.accelerator.unwrap_model(self.model)
        if hasattr(model, "get_base_model"):  # of peft
            model = model.get_base_model()
        return for_model(model, self._label_name, shifts_labels=self._loss_shifts_labels)

    @property
    def _label_name(self) -> str:
        names = self.label_names  # Empty for a forward with *args.
        return names[0] if names else "labels"

    def _samples_per_batch(self) -> int:
        """Return the number of samples per batch of all processes together."""
        split = self.args.accelerator_config.split_batches
        samples: int = self.args.train_batch_size * (1 if split else self.args.world_size)
        return samples

    def _samples_per_step(self) -> int:
        batches: int = self.args.gradient_accumulation_steps
        return self._samples_per_batch() * batches

    def _check_length(self, loader: Any) -> None:
        """Check that the loader follows the sampler."""
        if len(loader) != self._num_batches():
            raise InputError(
                f"expected a loader of {self._num_batches()} batches, since the plan keeps "
                f"{len(self.pruner.sampler)} samples, got one of {len(loader)}: do not override "
                f"get_train_dataloader"
            )

    def _num_batches(self) -> int:
        """Return the number of batches per process in the current epoch."""
        batches = len(self.pruner.sampler) / self._samples_per_batch()
        return math.floor(batches) if self.args.dataloader_drop_last else math.ceil(batches)


class PruningTrainer(PruningMixin, Trainer):
    """The ``Trainer`` of ``transformers`` with pruning; see ``PruningMixin`` for the arguments."""


class _EndEpoch(TrainerCallback):
    """Ends the epoch of the pruner, before the ``Trainer`` logs, evaluates and saves."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        if trainer._batches_left > 0 and not control.should_epoch_stop:
            return  # The training stops inside the epoch, and may be resumed there.
        trainer.pruner.end_epoch()


class _Collate:
    """Passes the indices past the user's collate function, which returns a dict."""

    def __init__(self, collate_fn: Any) -> None:
        self._collate_fn = collate_fn

    def __call__(self, items: list[tuple[int, Any]]) -> Any:
        batch = self._collate_fn([item for _, item in items])
        if not hasattr(batch, "keys") or _INDEX in batch:
            raise InputError(
                f"expected batches that are dicts without a key {_INDEX!r}, got "
                f"{type(batch).__name__}: change the collate function or rename the column"
            )
        batch[_INDEX] = torch.tensor([index for index, _ in items])
        return batch


def _check_arguments(trainer: Any) -> None:
    """Raise InputError if an argument of the training would undo the pruning."""
    args = trainer.args
    if trainer.train_dataset is None:
        raise InputError("expected a train_dataset, got None: give it to the trainer")
    refused = {
        "auto_find_batch_size": (args.auto_find_batch_size, "the plans need a fixed batch size"),
        "ignore_data_skip": (
            args.ignore_data_skip,
            "a resumed epoch would train its first batches twice",
        ),
        "enable_jit_checkpoint": (
            args.enable_jit_checkpoint,
            "it saves between the losses of a batch and its optimizer step; use save_steps",
        ),
    }
    for name, (given, reason) in refused.items():
        if given:
            raise InputError(f"expected {name}=False, got True: {reason}")
    strategy = args.train_sampling_strategy
    if strategy not in ("random", "group_by_length"):
        raise InputError(
            f"expected train_sampling_strategy 'random' or 'group_by_length', got {strategy!r}: "
            f"the pruner shuffles the samples that it keeps"
        )
    uneven = not (args.accelerator_config.even_batches or args.dataloader_drop_last)
    if args.world_size > 1 and uneven:
        raise InputError(
            "expected even_batches=True in accelerator_config, got False: processes with different "
            "numbers of batches wait for each other forever; or set dataloader_drop_last=True"
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


def _position(state: dict[str, Any]) -> tuple[int, int | None]:
    """Return the epoch of a pruner's state, and its trained samples; None if it has ended."""
    if not state["open"]:
        return state["epoch"], None
    progress = state["progress"]
    return state["epoch"], 0 if progress is None else progress["samples"]
