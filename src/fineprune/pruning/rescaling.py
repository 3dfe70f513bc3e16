"""Rescaling: the mean of weighted losses, and a watch that it is what gets backpropagated."""

import torch

from fineprune.pruning.plan import EpochPlan


class Rescaling:
    """Weights one epoch's losses as its plan says.

    A policy that rescales is unbiased only if the scalar that ``record`` returns is the objective.
    A loop that backpropagates a scalar of its own would silently train another one, so gradients
    are watched: a hook on the scalar, no synchronisation.

    Args:
        plan: a plan with weights.
        patience: how many scalars may be out before the first gradient must have come.
    """

    def __init__(self, plan: EpochPlan, patience: int) -> None:
        assert plan.weights is not None
        self._weights = plan.weights
        self._patience = patience
        self._returned = 0
        self._used = False

    def mean(self, index: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        """Return the mean of loss times weight.

        Raises:
            RuntimeError: none of the scalars returned so far was backpropagated.
        """
        self._weights = self._weights.to(losses.device)
        mean = (losses * self._weights[index.to(losses.device, non_blocking=True)]).mean()
        if mean.requires_grad:
            mean.register_hook(self._note_use)  # type: ignore[no-untyped-call]
            self._returned += 1
            if self._returned > self._patience:
                self.check_used()
        return mean

    def check_used(self) -> None:
        """Raise RuntimeError if scalars were returned and none was backpropagated."""
        if self._returned and not self._used:
            raise RuntimeError(
                "expected the scalar that record() returns to be backpropagated, since the policy "
                "weights the losses, but it was not used: a loss of your own would be another "
                "objective"
            )

    def _note_use(self, gradient: torch.Tensor) -> None:
        self._used = True
