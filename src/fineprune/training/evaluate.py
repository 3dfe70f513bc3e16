"""Evaluation: loss and accuracy over batches, with one wait for the device at the end."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Evaluation(NamedTuple):
    """Mean cross-entropy in nats, and the share of right answers in [0, 1]."""

    loss: float
    accuracy: float


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    device: str,
    autocast: torch.autocast,
) -> Evaluation:
    """Evaluate a classifier in evaluation mode; the mode it was in comes back.

    Args:
        model: returns logits of shape (B, classes).
        batches: ``(x, y)``, y int64 of shape (B,).
        device: where the model lies.
        autocast: the run's precision.
    """
    loss = torch.zeros((), device=device)
    right = torch.zeros((), dtype=torch.int64, device=device)
    samples = 0
    for logits, y in _logits(model, batches, device, autocast):
        loss += F.cross_entropy(logits, y, reduction="sum")
        right += (logits.argmax(1) == y).sum()
        samples += len(y)
    return Evaluation(loss.item() / samples, right.item() / samples)


def sample_losses(
    model: nn.Module,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    device: str,
    autocast: torch.autocast,
) -> list[float]:
    """Return each sample's cross-entropy in evaluation mode, without augmentation."""
    losses: list[float] = []
    for logits, y in _logits(model, batches, device, autocast):
        losses += F.cross_entropy(logits, y, reduction="none").tolist()
    return losses


@torch.inference_mode()
def _logits(
    model: nn.Module,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    device: str,
    autocast: torch.autocast,
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    training = model.training
    model.eval()
    try:
        for x, y in batches:
            with autocast:
                logits = model(x.to(device, non_blocking=True))
            yield logits.float(), y.to(device, non_blocking=True)
    finally:
        model.train(training)
