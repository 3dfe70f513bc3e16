"""The loss of each sample, from the outputs of a ``transformers`` model and its labels.

A model returns the loss of the batch only. That of every sample is computed once more, from the
logits of the same forward pass.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fineprune.errors import InputError

# The label of a token that has no loss, in all losses of ``transformers``.
IGNORED = -100

# Models with such names that are no encoder-decoders predict, at each token, the next one.
_PREDICTING_NEXT = ("CausalLM", "LMHead", "ConditionalGeneration")

# The model's loss and the mean of the samples' losses differ by more than rounding.
_TOLERANCE = 0.01

REMEDY = "give the trainer sample_losses=function(outputs, inputs) that returns one loss per sample"

# Receives the outputs of the model and its inputs with the labels; returns losses of shape (B,).
SampleLosses = Callable[[Any, Mapping[str, Any]], Tensor]


def classified(logits: Any, labels: Any) -> bool:
    """Return whether these are logits of shape (B, C) and one class number per sample."""
    if not (isinstance(logits, Tensor) and isinstance(labels, Tensor)):
        return False
    one_each = labels.shape == logits.shape[:1] and not labels.is_floating_point()
    return one_each and logits.ndim == 2 and logits.shape[1] > 1


def losses_and_tokens(
    model: Any, outputs: Any, labels: Any, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of each sample, and its number of labels: float32 and integers, shape (B,).

    This covers classification, regression, and token losses, of which it takes the mean over the
    tokens of a sample that have a label (0 if there are none).

    Args:
        model: The model of ``transformers``, not wrapped, whose kind decides what it predicts.
        outputs: Its outputs, with the logits by name: shape (B, C) or (B, T, vocabulary). Or those
            of a head that TRL has fused with the loss.
        labels: Class numbers, shape (B,) or (B, T), ``IGNORED`` for tokens without a loss; or
            targets of the shape of the logits.
        smoothing: The factor of label smoothing.

    Raises:
        InputError: The outputs or the labels are others.
    """
    named = outputs if isinstance(outputs, Mapping) else {}
    if "log_probs" in named:
        tokens = named["label_mask"].sum(1)
        return -named["log_probs"].float().sum(1) / tokens.clamp(min=1), tokens
    logits = named.get("logits")
    found = [len(p) if isinstance(p, Tensor) else type(p).__name__ for p in (logits, labels)]
    if found[0] != found[1] or isinstance(found[1], str):
        raise InputError(
            f"expected a model that returns logits by name, for as many labels, got logits: "
            f"{found[0]}, labels: {found[1]}: {REMEDY}"
        )
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft
    config, labels = getattr(model, "config", None), labels.to(logits.device)
    if labels.is_floating_point() or logits.shape[1:] == (1,):
        multi_label = getattr(config, "problem_type", None) == "multi_label_classification"
        of_outputs = F.binary_cross_entropy_with_logits if multi_label else F.mse_loss
        targets = labels.float().view(logits.shape)
        losses = of_outputs(logits.float(), targets, reduction="none").flatten(1).mean(1)
        return losses, torch.ones_like(losses)
    names = " ".join(made.__name__ for made in type(model).__mro__)
    one_part = not getattr(config, "is_encoder_decoder", False)
    if one_part and any(word in names for word in _PREDICTING_NEXT):
        labels = F.pad(labels[..., 1:], (0, 1), value=IGNORED)
    # One sample after the other, so that at most one sample's logits are copied at a time.
    sums = [
        F.cross_entropy(
            row.float(), of_row, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
        )
        for row, of_row in zip(logits, labels, strict=True)
    ]
    tokens = labels.ne(IGNORED).reshape(len(labels), -1).sum(1)
    return torch.stack(sums) / tokens.clamp(min=1), tokens


def check_is_mean(loss: float, total: float, numbers: list[float]) -> None:
    """Raise InputError unless a loss is the total of its samples, divided by one of the numbers."""
    if not any(math.isclose(loss, total / number, rel_tol=_TOLERANCE) for number in numbers):
        raise InputError(
            f"expected the model's loss of the first batch to be the mean of the losses of its "
            f"samples, {total / numbers[0]:.4g}, got {loss:.4g}: {REMEDY}, whose mean is the loss"
        )
