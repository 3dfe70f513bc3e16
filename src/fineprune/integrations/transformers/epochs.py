"""The epochs of the ``Trainer``: which samples they train, how many steps, where they resume."""

import copy
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler
from transformers import SchedulerType, Trainer, TrainerCallback, TrainerState
from transformers.utils import is_datasets_available

from fineprune.errors import InputError, explaining
from fineprune.integrations.learning_rates import give_rates
from fineprune.integrations.transformers.checks import (
    check_arguments,
    check_pruner,
    remedy_of_loader,
)
from fineprune.integrations.transformers.losses import INDEX
from fineprune.pruning.indexed import Indexed, IndexedCollate
from fineprune.pruning.pruner import Pruner
from fineprune.pruning.rates import stand_in_of
from fineprune.pruning.sampler import PruningSampler

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

# The file of a checkpoint that holds the pruner's state.
STATE_FILE = "pruner.pt"

# As in ``transformers``: so many steps are sorted by length together.
_STEPS = 50


class PlannedEpochs(_Base):
    """The part of the mixin that trains the epochs as the pruner plans them."""

    pruner: Pruner
    train_dataset: Any
    _planned_dataset: Any
    optimizer: Any
    lr_scheduler: Any
    _created_lr_scheduler: bool
    _batches_left = 0
    _untrained: dict[str, Any] | None = None  # With it, each call of train() begins anew.
    _seed_of_plan: int | None  # None if the pruner was given.
    _schedule_of_rates: dict[str, Any] | None = None  # If the policy has the trainer's rates.

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("is_training"):
            if self.train_dataset is not self._planned_dataset:
                raise InputError(
                    "expected the train_dataset with which the trainer was made, since the plan "
                    "names its samples, got another one: make a new trainer for it"
                )
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
        return IndexedCollate(collator, INDEX) if description == "Training" else collator

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.args.train_sampling_strategy != "group_by_length":
            return self.pruner.sampler
        return GroupedByLength(self.pruner.sampler, self._lengths(), self.pruner.shape.multiple)

    def _lengths(self) -> list[int]:
        items, name = self.train_dataset, self.args.length_column_name
        if name in (getattr(items, "column_names", None) or ()):
            return list(items[name])
        processing = self.processing_class
        name = "input_ids" if processing is None else processing.model_input_names[0]
        return [len(items[position][name]) for position in range(len(items))]

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Return what the ``Trainer`` does, with the epochs and steps of the policy."""
        check_arguments(self)
        check_pruner(self)
        if self._seed_of_plan is not None:
            name = "seed" if self.args.data_seed is None else "data_seed"
            self._check_unchanged(name, self._seed_of_plan, self._seed_of_arguments())
        values = list(super().set_initial_training_values(args, dataloader))
        self._check_length(dataloader, self.pruner.sampler.epoch)
        epochs, steps = self._epochs_and_steps()
        values[0], values[3], values[6] = epochs, steps * values[4], steps
        return tuple(values)

    def _epochs_and_steps(self) -> tuple[int, int]:
        """Return the number of epochs that are begun, and of optimizer steps."""
        policy, wanted = self.pruner.policy, self.args.max_steps
        planned = self._planned_steps()
        if wanted <= 0:
            if planned is None:
                raise InputError(
                    f"expected max_steps, at which the learning rate ends, since the number of "
                    f"steps of policy {policy.name!r} depends on data, got none: set max_steps in "
                    f"TrainingArguments"
                )
            return policy.epochs, planned
        if planned is not None and wanted > planned:
            raise InputError(
                f"expected max_steps of at most {planned}, the steps of the policy's "
                f"{policy.epochs} epochs, got {wanted}: make the policy longer, or leave max_steps "
                f"out"
            )
        before = 0
        for epoch in range(policy.epochs):
            if self.pruner.num_kept(epoch) is None:  # It depends on data.
                break
            before += self.pruner.steps(epoch)
            if before >= wanted:
                return epoch + 1, wanted
        return policy.epochs, wanted

    def _planned_steps(self) -> int | None:
        """Return the number of optimizer steps of the policy; None if it depends on data."""
        try:
            return self.pruner.total_steps()
        except InputError:
            return None

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
        if self._untrained is None:
            self._find_rates(max_steps)
            self._untrained = copy.deepcopy(self.pruner.state_dict())
        elif self._schedule_of_rates is not None:
            for name, value in self._schedule_of_arguments().items():
                self._check_unchanged(name, self._schedule_of_rates[name], value)
        if resume_from_checkpoint is None:
            self.pruner.load_state_dict(copy.deepcopy(self._untrained))
            return 0, 0
        file = Path(resume_from_checkpoint, STATE_FILE)
        if not file.exists():
            raise InputError(
                f"expected {STATE_FILE} in the checkpoint {resume_from_checkpoint}, found none: "
                f"resume from a checkpoint that this trainer saved without save_only_model, or "
                f"from an earlier one, if saving was interrupted"
            )
        self._load(file, max_steps)
        position = self.pruner.position
        epoch, samples = position.epoch, position.samples * self.args.world_size
        if samples and math.ceil(samples / self._samples_per_batch()) >= self.pruner.batches(epoch):
            # Saved between the last batch of the epoch and its end.
            self.pruner.end_epoch()
            return epoch + 1, 0
        steps, rest = divmod(samples, self.pruner.shape.multiple)
        if rest:
            raise InputError(
                f"expected to resume epoch {epoch} after whole steps of "
                f"{self.pruner.shape.multiple} samples, got {samples} trained samples: to resume "
                f"within an epoch, keep the batch size, accumulation and number of processes"
            )
        config = self.args.accelerator_config
        dispatches = config.dispatch_batches and not config.split_batches
        if steps and dispatches and self.args.world_size > 1:
            # Accelerate joins one batch per process of its sampler, but skips them one by one.
            raise InputError(
                "expected dispatch_batches=False in accelerator_config to resume within an epoch "
                "with several processes, got True, with which Accelerate would train other "
                "samples: resume without it, which trains the same batches"
            )
        return epoch, steps * self.pruner.shape.accumulation

    def _load(self, file: Path, max_steps: int) -> None:
        """Load the state of the pruner into a training of ``max_steps`` steps.

        Raises:
            InputError: The file is damaged, or the training is another one.
        """
        # For damaged files, torch raises many types of exceptions.
        advice = ": resume from another checkpoint, such as an earlier one"
        with explaining(f"expected the pruner in {file}, cannot read it", Exception, advice):
            state = torch.load(file, weights_only=True)
        before = TrainerState.load_from_json(str(file.with_name("trainer_state.json"))).max_steps
        differs = self.args.max_steps <= 0 and before != max_steps
        shape = state.get("shape", {}) if isinstance(state, dict) else {}
        changed = [
            f"{name}={shape[name]}"
            for name, value in asdict(self.pruner.shape).items()
            if shape.get(name, value) != value
        ]
        if not (differs and changed):
            # This says which setting has changed, and is the first to say so, except for the sizes
            # of batches and steps: with them, the learning rates have changed, too.
            try:
                self.pruner.load_state_dict(state)
            except InputError as error:
                if not differs:
                    raise
                steps = f"that training had {before} steps (max_steps), and this one {max_steps}"
                raise InputError(f"{error}; {steps}") from error
        if differs:
            settings = " and ".join(changed) or "the same max_steps and settings"
            raise InputError(
                f"expected to resume a training of {before} steps, got one of {max_steps}: resume "
                f"with {settings} (batch_size is that of all processes together)"
            )

    def _find_rates(self, max_steps: int) -> None:
        """Give the policy the learning rates, if it uses them and has none.

        A pruner takes rates before its state is loaded, and the ``Trainer`` makes its scheduler
        later. The one that is made here has an optimizer of its own, with the same groups.
        """
        policy, planned = self.pruner.policy, self._planned_steps()
        if not policy.without_rates:
            return
        self._schedule_of_rates = self._schedule_of_arguments()
        if planned is not None and max_steps < planned:
            self._say(
                f"fineprune: {policy.name} assumes a constant learning rate, since max_steps ends "
                f"the training after {max_steps} of its {planned} steps: give the policy fewer "
                f"epochs, so that it saves where the rate is small"
            )
            return
        self.create_optimizer()
        own = self.optimizer, self.lr_scheduler, self._created_lr_scheduler
        self.optimizer = stand_in_of(self.optimizer)
        if self._created_lr_scheduler:  # It belongs to an earlier training.
            self.lr_scheduler = None
        try:
            scheduler = self.create_scheduler(num_training_steps=max_steps)
        finally:
            self.optimizer, self.lr_scheduler, self._created_lr_scheduler = own
        self._say(give_rates(self.pruner, scheduler, "steps"))

    def _say(self, line: str) -> None:
        if self.is_local_process_zero():
            print(line, file=sys.stderr, flush=True)

    def _run_epoch(self, **given: Any) -> None:
        epoch, loader = given["epoch"], given["train_dataloader"]
        self.pruner.set_epoch(epoch)
        self._check_length(loader, epoch)
        begun = epoch == given["epochs_trained"] and given["resume_from_checkpoint"] is not None
        skipped = given["steps_trained_in_current_epoch"] if begun else 0
        self._batches_left = len(loader) - skipped
        given["steps_in_epoch"] = len(loader)
        given["num_update_steps_per_epoch"] = self.pruner.steps(epoch)
        super()._run_epoch(**given)

    def _save_optimizer_and_scheduler(self, output_dir: Any) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self.pruner.synchronize()
        if self.args.should_save:
            torch.save(self.pruner.state_dict(), Path(output_dir, STATE_FILE))

    def _check_unchanged(self, name: str, before: Any, now: Any) -> None:
        """Raise InputError if an argument on which the plan depends has changed since."""
        if now != before:
            raise InputError(
                f"expected {name}={before}, by which the pruner plans the epochs, got {now}: make "
                f"a new trainer for other arguments (in a hyperparameter search, one per trial)"
            )

    def _seed_of_arguments(self) -> int:
        """Return the seed of the order of the samples."""
        seed: int = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return seed

    def _schedule_of_arguments(self) -> dict[str, Any]:
        """Return the arguments that say how the learning rate changes, and where it ends."""
        schedule: dict[str, Any] = {"max_steps": self.args.max_steps}
        if self.lr_scheduler is None or self._created_lr_scheduler:
            schedule["lr_scheduler_type"] = SchedulerType(self.args.lr_scheduler_type).value
            schedule["lr_scheduler_kwargs"] = dict(self.args.lr_scheduler_kwargs or {})
            schedule["warmup_steps"] = self.args.warmup_steps
        return schedule

    def _shape_of_plan(self) -> dict[str, Any]:
        """Return how the samples are grouped, as arguments of ``Pruner``."""
        return {
            "batch_size": self._samples_per_batch(),
            "accumulation": self.args.gradient_accumulation_steps,
            "drop_last": self.args.dataloader_drop_last,
            "num_replicas": 1,
        }

    def _samples_per_batch(self) -> int:
        """Return the number of samples per batch of all processes together."""
        split = self.args.accelerator_config.split_batches
        samples: int = self.args.train_batch_size * (1 if split else self.args.world_size)
        return samples

    def _check_length(self, loader: Any, epoch: int) -> None:
        """Raise InputError unless the loader follows the sampler."""
        if len(loader) != self.pruner.batches(epoch):
            raise InputError(
                f"expected a loader of {self.pruner.batches(epoch)} batches, since the plan keeps "
                f"{len(self.pruner.sampler)} samples, got one of {len(loader)}: "
                f"{remedy_of_loader(self)}"
            )

    # -- the log --------------------------------------------------------------------------------

    def _log_epoch(self, values: dict[str, float], step: int) -> None:
        # To log anything unsets what tells the Trainer to log the loss. A subclass that adds its
        # metrics to the next log must find the one with the loss.
        wanted = self.control.should_log
        Trainer.log(self, values)
        self.control.should_log = wanted


class GroupedByLength(Sampler[int]):
    """Sorts parts of a pruning sampler's order by length, so that batches need less padding.

    The order depends on the seed, the epoch and the plan only, so that a resumed run has the same.
    ``step_size`` is the number of samples per optimizer step of all ranks.
    """

    def __init__(self, sampler: PruningSampler, lengths: Sequence[int], step_size: int) -> None:
        self._sampler = sampler
        self._lengths = lengths
        self._step_size = step_size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the pruner."""
        self._sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        # At least four parts, so that short epochs are still shuffled.
        steps = max(1, min(_STEPS, len(self) // (4 * self._step_size)))
        size = steps * self._step_size
        order = self._sampler.order().tolist()
        for begin in range(0, len(order), size):
            part = order[begin : begin + size]
            yield from sorted(part, key=self._lengths.__getitem__, reverse=True)


class EndEpoch(TrainerCallback):
    """Ends the epoch of the pruner, before the ``Trainer`` logs, evaluates and saves."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the epoch, unless the training stops inside of it and may be resumed there."""
        trainer = self._trainer
        if trainer._batches_left <= 0 or control.should_epoch_stop:
            trainer.pruner.end_epoch()
