"""Rescaling: the weighted losses of one epoch, and a check that they are backpropagated."""

import torch


class Rescaling:
    """Multiplies the losses of one epoch by the weights of its plan, float32, shape (N,).

    A loop that backpropagates another scalar than the one that ``record`` returns would silently
    train another objective. A hook notes whether a gradient arrives; it does not wait for a GPU.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        self._weights = weights
        self._returned = self._used = False

    def mean(self, index: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        """Return the mean of the ``weighted`` losses, shape (); both arguments have shape (B,)."""
        self._returned = True
        return self.weighted(index, losses).mean()

    def weighted(self, index: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        """Return loss times weight; ``Pruner.weighted`` has the same arguments."""
        self._weights = self._weights.to(losses.device)
        weights = self._weights[index.to(losses.device, torch.int64, non_blocking=True)]
        weighted = losses * weights.view(-1, *[1] * (losses.ndim - 1))
        if weighted.requires_grad:  # Otherwise, it cannot be backpropagated, which is noticed, too.
            weighted.register_hook(self._note_use)
        return weighted

    def check_used(self) -> None:
        """Raise RuntimeError if scalars were returned and nothing weighted was backpropagated."""
        if self._returned and not self._used:
            raise RuntimeError(
                "expected the scalar that record() returns to be backpropagated, since the policy "
                "weights the losses, but it was not: backpropagate it, or a scalar made of "
                "pruner.weighted(index, losses), with losses that have a gradient"
            )

    def _note_use(self, gradient: torch.Tensor) -> None:
        self._used = True
