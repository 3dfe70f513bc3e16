"""The loss of each sample, from the outputs of a ``transformers`` model and its labels.

A model of ``transformers`` returns the loss of the batch only. Pruning needs the loss of every
sample, so the losses are computed once more from the logits.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.loss.loss_utils import (
    LOSS_MAPPING,
    ForCausalLMLoss,
    ForMaskedLMLoss,
    ForSequenceClassificationLoss,
    ForTokenClassification,
)

from fineprune.errors import InputError

# The label of a token that has no loss, in all losses of ``transformers``.
IGNORED = -100

# The output of a model without logits, whose head TRL has fused with the loss.
FUSED = "log_probs"

# Receives the outputs of the model and its inputs with the labels; returns losses of shape (B,).
SampleLosses = Callable[[Any, Mapping[str, Any]], torch.Tensor]

_TOKENS = (ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification)


def for_model(model: Any, label_name: str) -> SampleLosses:
    """Return the function that computes the losses of the samples of a model.

    This covers models for sequence, image, audio and video classification, and for token losses
    (causal and masked language models, sequence-to-sequence models, token classification). The loss
    of a sample with several tokens is the mean over the tokens that have a label. The model is not
    wrapped.

    Raises:
        InputError: The losses of such a model are not known here.
    """
    loss = _loss_of(model)
    if loss is ForSequenceClassificationLoss:
        return lambda outputs, inputs: class_losses(
            *_logits_and_labels(outputs, inputs, label_name), model.config
        )
    if loss in _TOKENS:
        shifts = shifts_labels(model)
        return lambda outputs, inputs: (
            fused_losses(outputs)
            if FUSED in outputs
            else token_losses(
                *_logits_and_labels(outputs, inputs, label_name), shifts_labels=shifts
            )
        )
    raise InputError(
        f"expected a model for classification or language modelling, got {type(model).__name__}, "
        f"the losses of whose samples are not known: give the trainer "
        f"sample_losses=function(outputs, inputs) that returns one loss per sample"
    )


def shifts_labels(model: Any) -> bool:
    """Return whether each position of a model, not wrapped, predicts the label of the next one.

    ``Trainer._loss_shifts_labels`` is the same for the models whose ``loss_type`` is set.
    """
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return _loss_of(model) is ForCausalLMLoss and not encodes


def _loss_of(model: Any) -> Any:
    """Return the function of ``transformers`` whose loss a model computes; None if not known.

    ``transformers`` finds it by the name of the class, and so not for GPT2LMHeadModel, nor for a
    subclass with a name of its own.
    """
    known = LOSS_MAPPING.get(getattr(model, "loss_type", None))
    if known is not None or not isinstance(model, PreTrainedModel):
        return known
    # A forward of one's own may compute any loss, so only the class that defines it counts.
    made: Any = next(one for one in type(model).__mro__ if "forward" in vars(one))
    if "loss_function" in inspect.unwrap(made.forward).__code__.co_names:
        return model.loss_function
    names = [name for name in LOSS_MAPPING if name in made.__name__]
    return LOSS_MAPPING[names[0]] if names else None


def class_losses(logits: torch.Tensor, labels: torch.Tensor, config: Any) -> torch.Tensor:
    """Return the losses of a batch of a classifier or a regression, float32, shape (B,).

    Args:
        logits: The model's logits, shape (B, number of labels).
        labels: Class numbers, shape (B,), or targets of the shape of the logits.
        config: The model's configuration, whose ``problem_type`` says what the labels are.
    """
    logits, labels = logits.float(), labels.to(logits.device)
    kind = config.problem_type
    if kind is None:  # The model sets it when it computes a loss, in the same way.
        if config.num_labels == 1:
            kind = "regression"
        elif labels.dtype in (torch.int64, torch.int32):
            kind = "single_label_classification"
    if kind == "single_label_classification":
        return F.cross_entropy(
            logits.view(-1, config.num_labels), labels.view(-1), reduction="none"
        )
    targets = labels.float().view(logits.shape)
    function = F.mse_loss if kind == "regression" else F.binary_cross_entropy_with_logits
    return function(logits, targets, reduction="none").flatten(1).mean(1)


def token_losses(
    logits: torch.Tensor, labels: torch.Tensor, *, shifts_labels: bool
) -> torch.Tensor:
    """Return the mean loss over each sample's labelled tokens, float32, shape (B,).

    A sample without a labelled token has the loss 0. The samples are processed one after the other,
    so that at most one sample's logits are copied at a time.

    Args:
        logits: The model's logits, shape (B, T, vocabulary).
        labels: Token numbers, shape (B, T); ``IGNORED`` for tokens without a loss.
        shifts_labels: Whether each position predicts the label of the next one.
    """
    labels = labels.to(logits.device)
    if shifts_labels:
        labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    sums = [
        F.cross_entropy(row.float(), of_row, ignore_index=IGNORED, reduction="sum")
        for row, of_row in zip(logits, labels, strict=True)
    ]
    return torch.stack(sums) / labeled_tokens(labels).clamp(min=1)


def fused_losses(outputs: Any) -> torch.Tensor:
    """Return the mean loss over each sample's labelled tokens, float32, shape (B,).

    Args:
        outputs: Those of a language model whose head TRL has fused with the loss: the logarithms of
            the probabilities of the next tokens, shape (B, T - 1), 0 for tokens without a label.
    """
    log_probs: torch.Tensor = outputs[FUSED]
    tokens: torch.Tensor = outputs["label_mask"].sum(1)
    return -log_probs.float().sum(1) / tokens.clamp(min=1)


def labeled_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Return how many tokens of each sample have a label, int64, shape (B,)."""
    return labels.ne(IGNORED).reshape(len(labels), -1).sum(1)


def named_logits(outputs: Any) -> Any:
    """Return the logits of a model that returns them by name, such as in a dict, or else None."""
    if isinstance(outputs, Mapping):
        return outputs.get("logits")
    return getattr(outputs, "logits", None)


def _logits_and_labels(
    outputs: Any, inputs: Mapping[str, Any], label_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = named_logits(outputs), inputs.get(label_name)
    if not isinstance(logits, torch.Tensor):
        raise InputError(
            f"expected a model that returns its logits by name, got {type(outputs).__name__} "
            f"without logits: set return_dict=True and use_liger_kernel=False, or give the trainer "
            f"sample_losses"
        )
    if not isinstance(labels, torch.Tensor):
        raise InputError(
            f"expected batches with a tensor {label_name!r}, got {', '.join(sorted(inputs))}: "
            f"name the labels so, give TrainingArguments label_names, or, if the loss needs other "
            f"inputs, give the trainer sample_losses=function(outputs, inputs)"
        )
    if len(logits) != len(labels):
        raise InputError(
            f"expected logits of the {len(labels)} samples of the batch, got those of "
            f"{len(logits)}: if compute_loss changes the batch, give the trainer "
            f"sample_losses=function(outputs, inputs) that returns one loss per sample"
        )
    return logits, labels
