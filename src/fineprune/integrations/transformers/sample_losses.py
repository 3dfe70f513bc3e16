"""The loss of each sample, from the outputs of a ``transformers`` model and its labels.

A model of ``transformers`` returns the loss of the batch only. Pruning needs the loss of every
sample, so the losses are computed once more, from the logits of the same forward pass.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fineprune.errors import InputError

# The label of a token that has no loss, in all losses of ``transformers``.
IGNORED = -100

# Models with such names that are no encoder-decoders predict, at each token, the next one.
_PREDICTING_NEXT = ("CausalLM", "LMHead", "ConditionalGeneration")

# The model's loss and the mean of the samples' losses differ by more than rounding.
_TOLERANCE = 0.01

_REMEDY = (
    "give the trainer sample_losses=function(outputs, inputs) that returns one loss per sample"
)

# Receives the outputs of the model and its inputs with the labels; returns losses of shape (B,).
SampleLosses = Callable[[Any, Mapping[str, Any]], torch.Tensor]


def classified(logits: Any, labels: Any) -> bool:
    """Return whether these are logits of shape (B, C) and one class number per sample."""
    if not (isinstance(logits, torch.Tensor) and isinstance(labels, torch.Tensor)):
        return False
    one_each = labels.shape == logits.shape[:1] and not labels.is_floating_point()
    return one_each and logits.ndim == 2 and logits.shape[1] > 1


def predicts_next(model: Any) -> bool:
    """Return whether each position of a model, not wrapped, predicts the label of the next one."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    names = [made.__name__ for made in type(model).__mro__]
    return any(word in name for word in _PREDICTING_NEXT for name in names)


def losses_of_samples(
    outputs: Any, labels: Any, *, smoothing: float, shifts: bool, multi_label: bool
) -> torch.Tensor:
    """Return the losses of a batch, float32, shape (B,).

    This covers classification, regression, and token losses, of which it takes the mean over the
    tokens of a sample that have a label (0 if there are none).

    Args:
        outputs: Those of the model, with the logits by name: shape (B, C) or (B, T, vocabulary).
            Or those of a head that TRL has fused with the loss.
        labels: Class numbers, shape (B,) or (B, T), ``IGNORED`` for tokens without a loss; or
            targets of the shape of the logits.
        smoothing: The factor of label smoothing.
        shifts: Whether each position predicts the label of the next one.
        multi_label: Whether each logit is a class of its own.

    Raises:
        InputError: The outputs or the labels are others.
    """
    if isinstance(outputs, Mapping) and "log_probs" in outputs:
        tokens = outputs["label_mask"].sum(1)
        fused: torch.Tensor = -outputs["log_probs"].float().sum(1) / tokens.clamp(min=1)
        return fused
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
    if not isinstance(logits, torch.Tensor) or not isinstance(labels, torch.Tensor):
        raise InputError(
            f"expected a model that returns logits by name for a tensor of labels, got "
            f"{type(outputs).__name__} and labels of type {type(labels).__name__}: {_REMEDY}"
        )
    if len(logits) != len(labels):
        raise InputError(
            f"expected logits of the {len(labels)} samples of a batch, got those of {len(logits)}: "
            f"{_REMEDY}"
        )
    labels = labels.to(logits.device)
    if labels.is_floating_point() or logits.shape[1:] == (1,):
        of_outputs = F.binary_cross_entropy_with_logits if multi_label else F.mse_loss
        targets = labels.float().view(logits.shape)
        return of_outputs(logits.float(), targets, reduction="none").flatten(1).mean(1)
    if shifts:
        labels = F.pad(labels[..., 1:], (0, 1), value=IGNORED)
    # One sample after the other, so that at most one sample's logits are copied at a time.
    sums = [
        F.cross_entropy(
            row.float(), of_row, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
        )
        for row, of_row in zip(logits, labels, strict=True)
    ]
    return torch.stack(sums) / labeled(labels, shifts=False).clamp(min=1)


def labeled(labels: torch.Tensor, *, shifts: bool) -> torch.Tensor:
    """Return how many labels each sample has: 1 if it is no text; int64, shape (B,)."""
    if labels.is_floating_point():
        return torch.ones(len(labels), dtype=torch.int64, device=labels.device)
    return (labels[..., 1:] if shifts else labels).ne(IGNORED).reshape(len(labels), -1).sum(1)


def divides(
    loss: float, losses: torch.Tensor, tokens: torch.Tensor, items: Any, scale: int
) -> bool:
    """Return whether the loss of a batch is divided by the labels of the whole step.

    Args:
        loss: The loss of the batch, as the ``Trainer`` has it.
        losses: The losses of its samples, shape (B,).
        tokens: Their numbers of labels, shape (B,).
        items: The number of labels of all batches of the step and all processes; None if unknown.
        scale: By what the ``Trainer`` multiplies the loss, since DDP averages the gradients.

    Raises:
        InputError: It is neither this, nor the mean over the labels of this batch.
    """
    total = float((losses.detach() * tokens).sum()) * scale
    mean = total / max(int(tokens.sum()), 1)
    if items is not None and math.isclose(loss, total / float(items), rel_tol=_TOLERANCE):
        return True
    if math.isclose(loss, mean, rel_tol=_TOLERANCE):
        return False
    raise InputError(
        f"expected the model's loss of the first batch to be the mean of the losses of its "
        f"samples, {mean:.4g}, got {loss:.4g}: {_REMEDY}, whose mean is the loss"
    )
