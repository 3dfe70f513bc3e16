"""Optimizers by name."""

from typing import Any

import torch
from torch import nn

from fineprune.training.recipe import TrainingSettings


def build_optimizer(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """Build the optimizer that a recipe names, in torch's fused form: one kernel for all tensors.

    Args:
        model: its parameters are optimized.
        settings: the training section of the recipe.
    """
    shared: dict[str, Any] = {
        "lr": settings.lr,
        "weight_decay": settings.weight_decay,
        "fused": all(p.device.type in ("cpu", "cuda") for p in model.parameters()),
    }
    parameters = model.parameters()
    if settings.optimizer == "adam":
        return torch.optim.Adam(parameters, **shared)
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(parameters, **shared)
    return torch.optim.SGD(
        parameters, momentum=settings.momentum, nesterov=settings.nesterov, **shared
    )
