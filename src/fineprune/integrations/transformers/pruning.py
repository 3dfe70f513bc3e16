"""``PruningMixin``, which adds the pruning to a ``Trainer``, and ``PruningTrainer``."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback

from fineprune.errors import InputError, explaining
from fineprune.integrations.learning_rates import give_rates
from fineprune.integrations.resumed import check_same_batches
from fineprune.integrations.transformers.checks import check_training
from fineprune.integrations.transformers.indexed_batches import IndexedBatches
from fineprune.integrations.transformers.sample_losses import (
    REMEDY,
    SampleLosses,
    check_is_mean,
    classified,
    losses_and_tokens,
)
from fineprune.pruning.policies.policy import Policy, check_is_policy
from fineprune.pruning.pruner import Pruner
from fineprune.pruning.sampler import PruningSampler

# The file of a checkpoint that holds the pruner's state.
STATE_FILE = "pruner.pt"

_ADVICE = (
    ": resume from another checkpoint, which this trainer saved to its end and without "
    "save_only_model"
)


class PruningMixin(IndexedBatches):
    """Adds pruning to a ``Trainer``: ``class Pruning(PruningMixin, MyTrainer)``.

    All arguments of the trainer keep their meaning, and there are no additional forward passes. If
    the policy uses learning rates and was given none, it receives those of the scheduler, and one
    line says so. Each call of ``train`` makes a new pruner.

    Args:
        args: Positional arguments of the trainer.
        pruning: A policy of ``num_train_epochs`` epochs.
        sample_losses: A function that computes the losses of the samples, float, shape (B,), from
            the outputs of the model and the inputs with the labels. It is required for models whose
            losses are not those of classification, regression or tokens.
        kwargs: Keyword arguments of the trainer.

    Attributes:
        pruner: The ``Pruner`` of the last training. If the policy uses the labels of a classifier,
            as ``fp.Adaptive`` does, it watches them (``pruner.watch``).

    Raises:
        InputError: An argument of the training would undo the pruning.
    """

    pruner: Pruner
    _checked = False  # Whether the losses of the samples were compared with that of their batch.
    _state: dict[str, Any] | None = None  # A state to load.

    def __init__(
        self,
        *args: Any,
        pruning: Policy,
        sample_losses: SampleLosses | None = None,
        **kwargs: Any,
    ) -> None:
        check_is_policy(pruning)
        super().__init__(*args, **kwargs)
        self._policy = pruning
        self._sample_losses = sample_losses
        self.add_callback(_EndEpoch(self))
        self._make_pruner()  # Raises its errors now.

    # -- the epochs -----------------------------------------------------------------------------

    def _make_pruner(self) -> None:
        check_training(self, self._policy)
        args = self.args
        of_all = args.world_size if not args.accelerator_config.split_batches else 1
        self.pruner = Pruner(
            self.train_dataset,
            self._policy,
            seed=args.seed if args.data_seed is None else args.data_seed,
            batch_size=args.train_batch_size * of_all,
            accumulation=args.gradient_accumulation_steps,
            drop_last=args.dataloader_drop_last,
            num_replicas=1,  # Accelerate divides the batches among the processes.
            log=self._log_epoch,
        )
        self.pruner.total_steps()  # Raises an InputError if it depends on data.

    def get_train_dataloader(self) -> Any:
        """Return the loader of a new training, and make its pruner."""
        self._make_pruner()
        self._checked = False
        return super().get_train_dataloader()

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return _WholeEpochs(self.pruner.sampler)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Return what the ``Trainer`` does, with the steps of the policy."""
        values = list(super().set_initial_training_values(args, dataloader))
        steps = self.pruner.total_steps()
        values[3], values[6] = steps * values[4], steps
        return tuple(values)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the scheduler as the trainer does, and give its rates to a policy without any."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if self.pruner.policy.without_rates:
            line = give_rates(self.pruner, scheduler, "steps")
            if self.is_local_process_zero():
                print(line, file=sys.stderr, flush=True)
        return scheduler

    def _init_training_state(self, *given: Any) -> tuple[int, int]:
        super()._init_training_state(*given)
        self._state, resumed = None, given[3]
        if resumed is None:
            return 0, 0
        file = Path(resumed, STATE_FILE)
        # For damaged files, torch raises many types of exceptions.
        with explaining(f"expected the pruner in {file}, cannot read it", Exception, _ADVICE):
            self._state = state = torch.load(file, weights_only=True)
            check_same_batches(state, self.pruner)
        epoch, progress = state["epoch"], state["progress"]
        if progress is None:
            return epoch, 0
        # If it was saved between the last batch of an epoch and its end, the next epoch follows.
        return (epoch + 1, 0) if progress["complete"] else (epoch, progress["batches"])

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._state is not None:  # By now, the policy has the learning rates.
            self.pruner.load_state_dict(self._state)
            if self._state["progress"] is not None and self._state["progress"]["complete"]:
                self.pruner.end_epoch()

    def _save_optimizer_and_scheduler(self, output_dir: Any) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self.pruner.synchronize()
        if self.args.should_save:
            torch.save(self.pruner.state_dict(), Path(output_dir, STATE_FILE))

    def _run_epoch(self, **given: Any) -> None:
        epoch = given["epoch"]
        self.pruner.start_epoch(epoch)
        given["steps_in_epoch"] = self.pruner.batches(epoch)
        given["num_update_steps_per_epoch"] = self.pruner.steps(epoch)
        super()._run_epoch(**given)

    def _log_epoch(self, values: dict[str, float], step: int) -> None:
        # To log anything unsets what tells the Trainer to log the loss. A subclass that adds its
        # metrics to the next log must find the one with the loss.
        wanted = self.control.should_log
        Trainer.log(self, values)
        self.control.should_log = wanted

    # -- the losses -----------------------------------------------------------------------------

    def _record(self, index: Any, loss: Any, outputs: Any, inputs: Any, num_items: Any) -> Any:
        """Record the losses of a batch, and return its loss with the weights of the plan."""
        pruner, labels = self.pruner, self._labels(inputs)
        logits = outputs.get("logits") if isinstance(outputs, dict) else None
        watches = pruner.policy.needs_ranking and classified(logits, labels)
        watched = (logits, labels) if watches else ()
        weighted = pruner.plan.weights is not None
        if not weighted and not pruner.policy.learns_from_losses:
            pruner.record(index, torch.zeros(len(index)), *watched)
            return loss
        with torch.set_grad_enabled(weighted):
            if self._sample_losses is not None:
                losses, tokens = self._sample_losses(outputs, inputs), torch.ones_like(index)
            else:
                losses, tokens = losses_and_tokens(
                    self.accelerator.unwrap_model(self.model),
                    outputs,
                    labels,
                    self.args.label_smoothing_factor,
                )
        if losses.shape != index.shape:
            raise InputError(
                f"expected one loss for each of the {len(index)} samples of a batch, got losses of "
                f"shape {tuple(losses.shape)}: {REMEDY}; texts packed into one row have none"
            )
        total = (losses.detach() * tokens).sum()
        if (weighted or self._sample_losses is None) and not self._checked and loss.isfinite():
            self._checked = True
            # The Trainer divides by the labels of this batch, or by those of the whole step; then,
            # it may multiply by the number of processes, whose gradients DDP averages.
            numbers = [float(tokens.sum().clamp(min=1))]
            if num_items is not None:
                numbers += [float(num_items), float(num_items) / self.accelerator.num_processes]
            check_is_mean(loss.item(), total.item(), numbers)
        pruner.record(index, losses.detach(), *watched)
        if not weighted:
            return loss
        added = pruner.weighted(index, losses) - losses
        return loss + (loss.detach() / total).nan_to_num() * (tokens * added).sum()


class PruningTrainer(PruningMixin, Trainer):
    """The ``Trainer`` of ``transformers`` with pruning; see ``PruningMixin`` for the arguments."""


class _WholeEpochs(Sampler[int]):
    """Begins a resumed epoch at its start, since the ``Trainer`` itself skips."""

    def __init__(self, sampler: PruningSampler) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(self._sampler.before_start().tolist(), self._sampler)


class _EndEpoch(TrainerCallback):
    """Ends the epoch of the pruner, before the ``Trainer`` logs, evaluates and saves."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the epoch, unless the training stops inside of it and may be resumed there."""
        pruner, position = self._trainer.pruner, self._trainer.pruner.position
        whole = position.batches == pruner.batches(position.epoch)
        if whole or control.should_epoch_stop:
            pruner.end_epoch()
