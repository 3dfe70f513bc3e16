"""``PruningMixin``, which adds the pruning to a ``Trainer``, and ``PruningTrainer``."""

from typing import Any

from transformers import Trainer

from fineprune.integrations.transformers.checks import (
    check_arguments,
    check_is_trainer,
    check_pruner,
    check_release,
    check_sampler,
    warn_of_other_samples,
)
from fineprune.integrations.transformers.epochs import EndEpoch, PlannedEpochs
from fineprune.integrations.transformers.losses import LossRecording
from fineprune.integrations.transformers.model_losses import SampleLosses
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.pruner import Pruner


class PruningMixin(LossRecording, PlannedEpochs):
    """Adds pruning to a ``Trainer``: ``class MyTrainer(PruningMixin, Seq2SeqTrainer)``.

    The order of the bases matters. All arguments of the ``Trainer`` keep their meaning, and there
    are no additional forward passes. If the policy uses learning rates and was given none, it
    receives those of the scheduler, and one line says so.

    A subclass that overrides ``compute_loss`` without calling ``super().compute_loss`` must pass
    the losses of the samples to ``record``.

    Args:
        args: Positional arguments of the ``Trainer``.
        pruning: A policy for ``num_train_epochs`` epochs, or a pruner of the training set. Because
            the ``Trainer`` itself divides the batches among the processes, a pruner must have
            ``num_replicas=1``, the batch size of all processes together, and the accumulation and
            ``drop_last`` of the training arguments.
        sample_losses: A function that computes the losses of the samples, float, shape (B,), from
            the outputs of the model and the inputs with the labels. It is required with a
            ``compute_loss_func``, and for models whose losses are not known here.
        watch_labels: Whether to watch the labels of a classifier with one label per sample; see
            ``pruner.watch``. With the policy ``fp.FullData``, this is all that happens. By default,
            they are watched if the policy uses them, as ``fp.Adaptive`` does.
        kwargs: Keyword arguments of the ``Trainer``.

    Attributes:
        pruner: The ``Pruner``.

    Raises:
        InputError: An argument of the training would undo the pruning, or the pruner does not fit.

    Warns:
        UserWarning: The trainer has dropped or packed samples of the given data set, as TRL's
            trainers may, so the indices of the pruner refer to the attribute ``train_dataset``.
    """

    def __init__(
        self,
        *args: Any,
        pruning: Policy | Pruner,
        sample_losses: SampleLosses | None = None,
        watch_labels: bool | None = None,
        **kwargs: Any,
    ) -> None:
        check_release()
        check_is_trainer(self)
        super().__init__(*args, **kwargs)
        if self.train_dataset is None and isinstance(pruning, Pruner):
            self.train_dataset = pruning.dataset.dataset
        check_arguments(self)
        warn_of_other_samples(self, kwargs.get("train_dataset"))
        check_sampler(self, super(PlannedEpochs, self)._get_train_sampler)
        if isinstance(pruning, Pruner):
            self.pruner, self._seed_of_plan = pruning, None
        else:
            seed, shape = self._seed_of_arguments(), self._shape_of_plan()
            self.pruner = Pruner(self.train_dataset, pruning, seed=seed, **shape)
            self._seed_of_plan = seed
        check_pruner(self)
        self._planned_dataset = self.train_dataset
        self._sample_losses = sample_losses
        self._watch_labels = watch_labels
        self._losses_are_given = sample_losses is not None
        own = type(self).compute_loss is not PruningMixin.compute_loss
        if sample_losses is None and self.pruner.policy.learns_from_losses and not own:
            self._sample_losses = self._known_sample_losses()  # Raises its error now.
        self.add_callback(EndEpoch(self))
        self.pruner.log(self._log_epoch)
        self._epochs_and_steps()  # Raises its errors now.


class PruningTrainer(PruningMixin, Trainer):
    """The ``Trainer`` of ``transformers`` with pruning; see ``PruningMixin`` for the arguments."""
