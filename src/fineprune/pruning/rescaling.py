"""Rescaling: the mean of weighted losses, and a check that this mean is backpropagated."""

import torch


class Rescaling:
    """Multiplies the losses of one epoch by the weights of its plan.

    A loop that backpropagates another scalar than the one that ``record`` returns would silently
    train another objective. A hook on the scalar therefore notes whether a gradient arrives; it
    needs no synchronisation.

    Args:
        weights: The weight of each sample, float32, shape (N,).
    """

    def __init__(self, weights: torch.Tensor) -> None:
        self._weights = weights
        self._returned = self._used = False

    def mean(self, index: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        """Return the mean of the ``weighted`` losses, shape (); both arguments have shape (B,)."""
        self._returned = True
        return self.weighted(index, losses).mean()

    def weighted(self, index: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        """Return loss times weight, with the shape of the losses.

        If it is backpropagated, the scalars that ``mean`` returned need not be.

        Args:
            index: Indices of the samples, integers, shape (B,).
            losses: The losses of each sample, floating point, shape (B,) or (B, ...).
        """
        self._weights = self._weights.to(losses.device)
        weights = self._weights[index.to(losses.device, torch.int64, non_blocking=True)]
        if losses.ndim > 1:
            weights = weights.view(-1, *[1] * (losses.ndim - 1))
        weighted = losses * weights
        if weighted.requires_grad:  # Otherwise, it cannot be backpropagated, which is noticed, too.
            weighted.register_hook(self._note_use)
        return weighted

    def check_used(self) -> None:
        """Raise RuntimeError if scalars were returned and none was backpropagated."""
        if self._returned and not self._used:
            raise RuntimeError(
                "expected the scalar that record() returns to be backpropagated, since the policy "
                "weights the losses, but it was not: backpropagate it, or a scalar made of "
                "pruner.weighted(index, losses), with losses that have a gradient"
            )

    def _note_use(self, gradient: torch.Tensor) -> None:
        self._used = True
