"""Optimizers by name, and their learning rate."""

from collections.abc import Iterable
from typing import Any

import torch

from fineprune.training.rmsprop_tf import RMSPropTF
from fineprune.training.settings import TrainingSettings


def build_optimizer(
    parameters: Iterable[torch.Tensor], settings: TrainingSettings
) -> torch.optim.Optimizer:
    """Build the optimizer that a recipe names, in torch's fused form where it has one.

    On a GPU the learning rate is a tensor there (float32, no dimension), so that ``set_rate``
    changes it in place, in the order of the stream.

    Args:
        parameters: of a model, or of a parameter server; all on one device.
        settings: the training section of the recipe.
    """
    parameters = list(parameters)
    device = parameters[0].device
    shared: dict[str, Any] = {
        "lr": torch.tensor(settings.lr, device=device) if device.type == "cuda" else settings.lr,
        "weight_decay": settings.weight_decay,
    }
    if settings.optimizer == "rmsprop-tf":
        epsilon = 1.0 if settings.epsilon is None else settings.epsilon
        return RMSPropTF(
            parameters, decay=settings.decay, epsilon=epsilon, momentum=settings.momentum, **shared
        )
    if settings.optimizer == "rmsprop":
        epsilon = 1e-8 if settings.epsilon is None else settings.epsilon
        return torch.optim.RMSprop(
            parameters, alpha=settings.decay, eps=epsilon, momentum=settings.momentum, **shared
        )
    shared["fused"] = device.type in ("cpu", "cuda")
    if settings.optimizer == "adam":
        return torch.optim.Adam(parameters, **shared)
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(parameters, **shared)
    return torch.optim.SGD(
        parameters, momentum=settings.momentum, nesterov=settings.nesterov, **shared
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameters, without waiting for the device."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state; its learning rate stays, to be set at the next step."""
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate  # the state's would lie on the CPU
