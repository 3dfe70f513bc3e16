"""Warnings and an error about the labels and the logits that a pruner is given.

Each function that takes tensors waits for the device, so it is called once per training.
"""

import torch
from torch.nn import functional

from fineprune.errors import InputError, warn_user
from fineprune.labels.batch import NO_LABEL
from fineprune.pruning.policies.policy import Policy

# Losses are weighted by class if their ratio to the cross-entropy is the same within each class, up
# to the first number, and differs by more than the second one between classes.
_SAME_WEIGHT, _OTHER_WEIGHT = 0.01, 0.1


def warn_of_first_batch(
    policy: Policy,
    losses: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
) -> None:
    """Warn of what the first batch with labels shows.

    Args:
        policy: The policy of the pruner.
        losses: The losses; floating point, shape (B,).
        logits: The logits; floating point, shape (B, C).
        labels: The labels; integers, shape (B,), ``NO_LABEL`` for a sample without one.
    """
    has_label = (labels.long() != NO_LABEL).cpu()
    parts = (part[has_label.to(part.device)] for part in (losses, logits, labels))
    losses, logits, labels = parts
    if not policy.needs_losses:
        return
    _warn_of_class_weights(losses, logits, labels)
    missing = len(has_label) - len(labels)
    if missing:
        warn_user(
            f"{missing} of {len(has_label)} samples have no label, and policy {policy.name!r} "
            f"takes them for learned samples because their loss is 0, so the others look wrong: "
            f"give the pruner only the labelled samples, or a policy that needs no losses"
        )


def check_given_labels(given: torch.Tensor, index: torch.Tensor, labels: torch.Tensor) -> None:
    """Raise InputError if samples of a batch have other labels than the pruner was given.

    The indices and the labels have shape (B,), and the given labels are those of all samples,
    int64, shape (N,), negative where they are not known.
    """
    before, labels = given[index.cpu().long()], labels.cpu().long()
    others = ((before >= 0) & (labels != NO_LABEL) & (before != labels)).nonzero()[:, 0].tolist()
    if others:
        first = others[0]
        raise InputError(
            f"expected the labels that the data set (targets, labels) or the Pruner's labels=... "
            f"gives, got others for {len(others)} of {len(labels)} samples of the first batch, "
            f"such as {int(labels[first])} instead of {int(before[first])} for sample "
            f"{int(index[first])}: correct the attribute or the indices, or give the Pruner the "
            f"labels that you train as labels=..."
        )


def warn_of_other_digest(before: int, now: int) -> None:
    """Warn if a loaded state comes from a training with other labels.

    Args:
        before, now: The ``labels_digest`` of both trainings; 0 if it is not known.
    """
    if 0 not in (before, now) and before != now:
        warn_user(
            "the labels are others than in the training that saved the loaded state, so what it "
            "learned may belong to other samples: give the Pruner the same data set in the same "
            "order, or train anew if labels were corrected"
        )


def _warn_of_class_weights(
    losses: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor
) -> None:
    """Warn if the losses of a batch are cross-entropies that are weighted by class.

    A batch in which this cannot be told, because most classes have one sample, is no reason to
    warn. The logits have shape (B, C), and the losses and the integer labels (B,).
    """
    labels = labels.to(logits.device).long()
    classes, place = labels.unique(return_inverse=True)
    if losses.shape != labels.shape or len(labels) < 2 * max(len(classes), 1):
        return
    plain = functional.cross_entropy(logits.detach().float(), labels, reduction="none")
    ratios = losses.detach().float() / plain
    weights = ratios.new_zeros(len(classes)).scatter_reduce(
        0, place, ratios, "mean", include_self=False
    )
    same_in_class = (ratios / weights[place] - 1).abs() <= _SAME_WEIGHT
    if bool(same_in_class.all()) and float(weights.max() / weights.min()) > 1 + _OTHER_WEIGHT:
        warn_user(
            f"the losses are weighted by class ({float(weights.min()):.3g} to "
            f"{float(weights.max()):.3g} times the cross-entropy), so the samples of some classes "
            f"look as if their labels were wrong: record the losses without weights, and "
            f"backpropagate the weighted ones"
        )
