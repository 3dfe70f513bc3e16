"""Evaluates a classifier: its mean loss and accuracies."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Top-5 accuracy says little if five classes are half of all classes or more.
_FEW_CLASSES = 10


class Evaluation(NamedTuple):
    """The result of an evaluation.

    Attributes:
        loss: The mean cross-entropy, in nats.
        accuracy: The fraction of correct predictions, in [0, 1].
        top5: The fraction of the samples whose label is among the five classes with the largest
            logits, in [0, 1]; None if there are at most ten classes.
        labels: The label of each sample; int64, shape (n,), on the CPU.
        predictions: The predicted class of each sample; int64, shape (n,), on the CPU. -1 for a
            sample with a NaN among its logits, which counts as a wrong prediction.
    """

    loss: float
    accuracy: float
    top5: float | None
    labels: Tensor
    predictions: Tensor


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    device: str,
    autocast: torch.autocast,
    classes: int,
) -> Evaluation:
    """Evaluate a classifier in evaluation mode, and restore the mode that it was in.

    The device is waited for at the end only. ``batches`` yields pairs ``(x, y)`` with labels of
    dtype int64 and shape (B,), and the model returns logits of shape (B, classes).
    """
    loss = torch.zeros((), device=device)
    among_five = torch.zeros((), device=device, dtype=torch.int64)
    labels, predictions = [], []
    was_training = model.training
    model.eval()
    try:
        for x, label in batches:
            with autocast:
                logits = model(x.to(device, non_blocking=True))
            logits, y = logits.float(), label.to(device, non_blocking=True)
            loss += F.cross_entropy(logits, y, reduction="sum")
            labels.append(y)
            # Of logits with a NaN, some class would be the largest, which may be the right one.
            known = ~logits.isnan().any(1)
            predictions.append(logits.argmax(1).where(known, -1))
            if classes > _FEW_CLASSES:
                among_five += ((logits.topk(5).indices == y[:, None]) & known[:, None]).sum()
    finally:
        model.train(was_training)
    given, predicted = torch.cat(labels).cpu(), torch.cat(predictions).cpu()
    samples, correct = len(given), int((given == predicted).sum())
    top5 = int(among_five) / samples if classes > _FEW_CLASSES else None
    return Evaluation(loss.item() / samples, correct / samples, top5, given, predicted)
