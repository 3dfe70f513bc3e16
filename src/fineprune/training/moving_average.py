"""The exponential moving average of a network's weights.

It equals that of torch's ``AveragedModel`` with ``get_ema_multi_avg_fn`` and ``use_buffers=True``,
which copies its counter from the CPU to the GPU in each step, and so waits for the GPU.
"""

import copy
from typing import Any

import torch
from torch import nn


class MovingAverage:
    """A copy of a network that holds the moving average of its weights.

    The first update copies the weights w. Each later one sets
    ``average = decay * average + (1 - decay) * w``. Floating-point buffers, such as the statistics
    of batch normalisations, are averaged in the same way; other buffers are copied.

    Attributes:
        network: The network with the averaged weights, to be evaluated.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.network = copy.deepcopy(network)
        self._decay = decay
        self._begun = False

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Update the average after a step of the optimizer, without waiting for the device."""
        pairs = list(zip(_tensors(self.network), _tensors(network), strict=True))
        averaged = [pair for pair in pairs if self._begun and pair[0].is_floating_point()]
        copied = [pair for pair in pairs if not (self._begun and pair[0].is_floating_point())]
        if averaged:
            own, new = zip(*averaged, strict=True)
            torch._foreach_lerp_(own, new, 1 - self._decay)
        if copied:
            own, new = zip(*copied, strict=True)
            torch._foreach_copy_(own, new)
        self._begun = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which holds tensors and a boolean."""
        return {"network": self.network.state_dict(), "begun": self._begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of the same network."""
        self.network.load_state_dict(state["network"])
        self._begun = state["begun"]


def _tensors(network: nn.Module) -> list[torch.Tensor]:
    return [*network.parameters(), *network.buffers()]
