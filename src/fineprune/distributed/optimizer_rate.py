"""Sets the learning rate of an optimizer: of a run's own, or of a parameter server's."""

import torch


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameters, times ``lr_scale`` of their parameter group, if any.

    Nothing waits for the device.
    """
    for group in optimizer.param_groups:
        scaled = rate * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled
