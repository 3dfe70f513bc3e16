"""RMSProp as TensorFlow has it, the optimizer of Campos et al. (ICCS 2017).

It differs from ``torch.optim.RMSprop`` in three ways: epsilon stands inside the square root, the
mean square starts at one, and the learning rate multiplies inside the momentum buffer, so that a
falling rate does not act on steps that were already taken up.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fineprune.errors import InputError


class RMSPropTF(torch.optim.Optimizer):
    """RMSProp in TensorFlow's form; decay and momentum are in [0, 1).

    For each parameter p with gradient g (weight decay added): ``s = decay s + (1 - decay) g^2``,
    ``m = momentum m + lr g / sqrt(s + epsilon)``, ``p = p - m``, with s = 1 and m = 0 at the start.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.1,
        decay: float = 0.9,
        epsilon: float = 1.0,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        for name, value in (("decay", decay), ("momentum", momentum)):
            if not 0 <= value < 1:
                raise InputError(f"expected {name} in [0, 1), got {value}")
        settings = {"decay": decay, "epsilon": epsilon, "momentum": momentum}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **settings})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, and return what the closure returns, which is called first."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            if given:
                self._step_group(given, group)
        return result

    def _step_group(self, given: list[Tensor], group: dict[str, Any]) -> None:
        for p in given:
            if not self.state[p]:
                self.state[p]["mean_square"] = torch.ones_like(p)
                self.state[p]["momentum"] = torch.zeros_like(p)
        squares = [self.state[p]["mean_square"] for p in given]
        moments = [self.state[p]["momentum"] for p in given]
        gradients: Any = [p.grad for p in given]
        if group["weight_decay"]:
            gradients = torch._foreach_add(gradients, given, alpha=group["weight_decay"])
        torch._foreach_mul_(squares, group["decay"])
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - group["decay"])
        scaled = torch._foreach_add(squares, group["epsilon"])
        torch._foreach_sqrt_(scaled)
        steps = torch._foreach_div(gradients, scaled)
        torch._foreach_mul_(steps, group["lr"])  # A rate on the device is not waited for.
        torch._foreach_mul_(moments, group["momentum"])
        torch._foreach_add_(moments, steps)
        torch._foreach_sub_(given, moments)
