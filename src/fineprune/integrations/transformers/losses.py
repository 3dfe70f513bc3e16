"""The losses of the samples: from the forward pass of the ``Trainer`` to the pruner."""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fineprune.errors import InputError, warn_user
from fineprune.integrations.transformers.checks import remedy_of_loader
from fineprune.integrations.transformers.model_losses import (
    SampleLosses,
    for_model,
    labeled_tokens,
    named_logits,
    shifts_labels,
)
from fineprune.pruning.pruner import Pruner

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

# The key of the indices in a batch, which no column of a data set has. It is removed before the
# model receives the batch.
INDEX = "fineprune_index"

# The model's loss and the mean of the samples' losses differ by more than rounding.
_TOLERANCE = 0.01


@dataclass
class ForwardPasses:
    """The outputs of forward passes.

    Attributes:
        trained: Those of the last pass with gradients, whose loss is backpropagated; else None.
        reference: Those of the last pass without gradients; else None.
    """

    trained: Any = None
    reference: Any = None


@contextmanager
def forward_passes(*models: torch.nn.Module) -> Iterator[ForwardPasses]:
    """Keep the outputs of the models that are called inside the ``with`` statement."""
    passes = ForwardPasses()

    def keep(model: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():
            passes.trained = outputs
        else:
            passes.reference = outputs

    hooks = [model.register_forward_hook(keep) for model in dict.fromkeys(models)]
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()


class LossRecording(_Base):
    """The part of the mixin that takes the losses."""

    pruner: Pruner
    _sample_losses: SampleLosses | None
    _losses_are_given: bool  # By the user, who may have intended that the loss is not their mean.
    _compared = False
    _ignores_num_items = False  # Whether the model was found not to divide by it.
    _watch_labels: bool | None
    _index: torch.Tensor | None = None  # That of the batch that is trained.
    _has_recorded = False
    _batches_left: int

    def record(
        self,
        losses: torch.Tensor,
        logits: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Record the losses of a batch in ``compute_loss``, and return the scalar to backpropagate.

        In an evaluation, nothing is recorded.

        Args:
            losses: One loss per sample, floating point, shape (B,).
            logits, labels: As for ``Pruner.record``, to watch the labels.

        Returns:
            The mean of the losses, with the weights of the plan, shape ().

        Raises:
            InputError: The ``Trainer`` would not divide the scalar by the number of accumulated
                batches, because the model's ``forward`` takes arbitrary keyword arguments.
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
        return self.pruner.record(self._index, losses, logits, labels)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Train a batch, after removing its indices from the inputs of the model."""
        if INDEX not in inputs:
            raise InputError(
                f"expected batches with the indices of their samples, got one without: "
                f"{remedy_of_loader(self)}"
            )
        self._index, self._has_recorded = inputs.pop(INDEX), False
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

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute the loss as the trainer does and, while training, record the samples' losses.

        The samples' losses are computed from the outputs of the same forward pass. If the plan has
        weights, their effect is added to the loss.
        """
        arguments = {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch}
        if self._index is None:  # This is an evaluation.
            return super().compute_loss(model, inputs, **arguments)
        given = dict(inputs)  # The trainer may remove the labels.
        with forward_passes(*self._models(model)) as passes:
            result = super().compute_loss(model, inputs, **arguments)
        loss = result[0] if return_outputs else result
        loss = self._recorded(self._index, loss, passes, given, num_items_in_batch)
        return (loss, result[1]) if return_outputs else loss

    def _models(self, model: Any) -> list[Any]:
        """Return the models whose outputs are needed for the losses of the samples."""
        return [model]

    def _losses_of_samples(self, passes: ForwardPasses, inputs: Any) -> torch.Tensor:
        """Return the losses of the samples of a batch, shape (B,)."""
        if passes.trained is None:
            raise InputError(
                "expected compute_loss to call the model that it is given, got one that calls no "
                "model or another one: return self.record(losses) with one loss per sample"
            )
        if self._sample_losses is None:
            self._sample_losses = self._known_sample_losses()
        return self._sample_losses(passes.trained, inputs)

    def _known_sample_losses(self) -> SampleLosses:
        if self.compute_loss_func is not None:
            raise InputError(
                "expected sample_losses beside compute_loss_func, whose losses of the samples are "
                "not known, got None: give sample_losses=function(outputs, inputs)"
            )
        return for_model(self._unwrapped_model(), self._label_name)

    def _unwrapped_model(self) -> Any:
        model = self.accelerator.unwrap_model(self.model)
        return model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft

    @functools.cached_property
    def _shifts_labels(self) -> bool:
        return shifts_labels(self._unwrapped_model())

    @property
    def _label_name(self) -> str:
        names = self.label_names  # Empty for a forward with *args.
        return names[0] if names else "labels"

    def _recorded(
        self, index: torch.Tensor, loss: Any, passes: ForwardPasses, inputs: Any, num_items: Any
    ) -> Any:
        """Record the losses of a batch, and return its loss with the weights of the plan."""
        self._has_recorded = True
        weights = self.pruner.plan.weights
        watch = self._watch_labels
        if watch is None:
            watch = self.pruner.policy.needs_ranking
        watched = self._logits_and_labels(passes, inputs) if watch else ()
        if weights is None and not self.pruner.policy.learns_from_losses:
            self.pruner.record(index, torch.zeros(len(index)), *watched)
            return loss
        with torch.set_grad_enabled(weights is not None):
            losses = self._losses_of_samples(passes, inputs)
        if losses.shape != index.shape:
            raise InputError(
                f"expected one loss for each of the {len(index)} samples of a batch, got losses of "
                f"shape {tuple(losses.shape)}: samples that are packed into one row, or parts of "
                f"samples, have no losses of their own"
            )
        if not self._compared:
            self._compared = True
            shares = self._shares(index, inputs, num_items)
            self._compare(loss, losses, shares, self._scale(num_items))
        # The loss as a whole is backpropagated, so the mean that ``record`` returns is not needed.
        self.pruner.record(index, losses.detach(), *watched)
        if weights is None:
            return loss
        added = self.pruner.weighted(index, losses) - losses
        return loss + (self._shares(index, inputs, num_items) * added).sum()

    def _logits_and_labels(self, passes: ForwardPasses, inputs: Any) -> tuple[torch.Tensor, ...]:
        """Return the logits and the labels of a batch, shape (B, C) and (B,); or nothing.

        Raises:
            InputError: They are to be watched, and this is no classifier with one label per sample.
        """
        logits = named_logits(passes.trained)
        labels: Any = inputs.get(self._label_name)
        both = isinstance(logits, torch.Tensor) and isinstance(labels, torch.Tensor)
        classified = both and logits.ndim == 2 and logits.shape[1] > 1
        if not classified or labels.shape != logits.shape[:1]:
            if not self._watch_labels:
                return ()
            given = [tuple(getattr(part, "shape", ())) for part in (logits, labels)]
            raise InputError(
                f"expected logits of shape (B, C) and labels of shape (B,) with watch_labels, got "
                f"{given[0]} and {given[1]}: watch the labels of classifiers only"
            )
        return logits.detach(), labels

    def _shares(self, index: torch.Tensor, inputs: Any, num_items: Any) -> torch.Tensor:
        """Return the factors of the samples' losses in the loss of the batch, shape (B,)."""
        labels = inputs.get(self._label_name)
        if isinstance(labels, torch.Tensor):
            tokens = labeled_tokens(labels[..., 1:] if self._shifts_labels else labels)
        else:
            tokens = torch.ones_like(index)
        divides = num_items is not None and not self._ignores_num_items
        shares: torch.Tensor = tokens / (num_items if divides else tokens.sum().clamp(min=1))
        return shares * self._scale(num_items)

    def _scale(self, num_items: Any) -> int:
        """Return by what the ``Trainer`` multiplies a loss, since DDP averages the gradients."""
        averages = self.args.average_tokens_across_devices and (
            self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        )
        return self.accelerator.num_processes if averages and num_items is not None else 1

    def _compare(self, loss: Any, losses: torch.Tensor, shares: torch.Tensor, scale: int) -> None:
        """Warn if the loss of a batch is not made of the losses of its samples."""
        if self.label_smoother is not None:
            return  # Then they differ on purpose.
        given, expected = loss.item(), (shares * losses.detach()).sum().item()
        if math.isclose(given, expected, rel_tol=_TOLERANCE) or not math.isfinite(given):
            return
        mean = expected / (shares.sum().item() or 1)  # That of this batch alone.
        if math.isclose(given, mean * scale, rel_tol=_TOLERANCE):
            self._ignores_num_items = True
            accumulation = self.args.gradient_accumulation_steps
            causes = [f"accumulation {accumulation}"] if accumulation > 1 else []
            causes += [f"{scale} processes"] if scale > 1 else []
            taker = type(self.model).__name__
            remedy = "set trainer.model_accepts_loss_kwargs = False"
            if self.compute_loss_func is not None:
                taker, remedy = "compute_loss_func", "let it return the sum divided by this number"
            said = (
                f"{taker} takes num_items_in_batch but does not divide by it, so its gradients are "
                f"{given / expected:.3g} times too large with {' and '.join(causes)}: {remedy}"
            )
        elif self._losses_are_given:
            return
        else:
            same = math.isclose(expected, mean, rel_tol=_TOLERANCE)
            scaled = "" if same else f" ({expected:.4g} as the Trainer scales it)"
            said = (
                f"the model's loss of the first batch is {given:.4g}, but the mean of its samples' "
                f"losses, by which they are pruned, is {mean:.4g}{scaled}: if the difference is "
                f"not intended, give the trainer sample_losses"
            )
        warn_user(said)
