"""Optimizers by name, and their learning rates."""

from collections.abc import Iterable
from typing import Any

import torch

from fineprune.training.rmsprop_tf import RMSPropTF
from fineprune.training.settings import TrainingSettings

# The options of torch's optimizers that say how they step, but not what they compute.
_FORM = ("fused", "foreach", "capturable")


def build_optimizer(
    parameters: Iterable[torch.Tensor], settings: TrainingSettings
) -> torch.optim.Optimizer:
    """Build the optimizer that a recipe names, in torch's fused form if it has one.

    On a GPU, the learning rate is a tensor on that GPU (float32, no dimension), so that
    ``set_rate`` can change it in place without waiting for the GPU. Every optimizer is built in a
    form whose ``step`` leaves this tensor on the GPU.

    Args:
        parameters: The parameters of a model or of a parameter server, all on one device.
        settings: The training section of the recipe.
    """
    parameters = list(parameters)
    device = parameters[0].device
    optimizer = _build(parameters, device.type, settings)
    if device.type == "cuda":
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(settings.lr, device=device)
    return optimizer


def _build(
    parameters: list[torch.Tensor], device: str, settings: TrainingSettings
) -> torch.optim.Optimizer:
    # They are None for the optimizers that have none.
    momentum, decay = settings.momentum or 0.0, settings.decay or 0.0
    epsilon = settings.epsilon or (1.0 if settings.optimizer == "rmsprop-tf" else 1e-8)
    shared: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if settings.optimizer == "rmsprop-tf":
        return RMSPropTF(parameters, decay=decay, epsilon=epsilon, momentum=momentum, **shared)
    if settings.optimizer == "rmsprop":
        if device == "cuda":
            # All other forms of torch's RMSprop copy a learning rate on the GPU to the host.
            shared |= {"capturable": True, "foreach": True}
        return torch.optim.RMSprop(
            parameters, alpha=decay, eps=epsilon, momentum=momentum, **shared
        )
    shared["fused"] = device in ("cpu", "cuda")
    if settings.optimizer == "adam":
        return torch.optim.Adam(parameters, **shared)
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(parameters, **shared)
    return torch.optim.SGD(parameters, momentum=momentum, nesterov=settings.nesterov, **shared)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the state of an optimizer that may have run on another kind of device.

    The optimizer keeps its own learning rate, which is set at the next step, and its own form,
    because CPUs and GPUs need different forms.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    # The form decides which device the step count is kept on, so it is set before loading.
    groups = [
        {**saved, **{name: own[name] for name in _FORM if name in own}, "lr": 0.0}
        for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({**state, "param_groups": groups})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
