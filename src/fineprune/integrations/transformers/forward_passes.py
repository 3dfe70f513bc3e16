"""The outputs of a model's forward passes, taken by a hook from whoever calls the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class ForwardPasses:
    """The outputs of forward passes.

    Attributes:
        trained: Those of the last pass with gradients, whose loss is backpropagated; else None.
        reference: Those of the last pass without gradients; else None.
    """

    trained: Any = None
    reference: Any = None


@contextmanager
def forward_passes(*models: torch.nn.Module) -> Iterator[ForwardPasses]:
    """Keep the outputs of the models that are called inside the ``with`` statement."""
    passes = ForwardPasses()

    def keep(model: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():
            passes.trained = outputs
        else:
            passes.reference = outputs

    hooks = [model.register_forward_hook(keep) for model in dict.fromkeys(models)]
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()
