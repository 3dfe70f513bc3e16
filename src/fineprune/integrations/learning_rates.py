"""The learning rates of a framework's own scheduler, for a policy that was given none."""

import inspect
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from fineprune.pruning.pruner import Pruner


def give_rates(pruner: Pruner, scheduler: Any, by: str | None) -> str:
    """Give the policy of a pruner the rates of a scheduler, and return one line that says so.

    The scheduler is not changed: a copy is stepped. If its rates are not known in advance, the line
    says so, and the policy assumes a constant rate.

    Args:
        pruner: A pruner that has recorded nothing yet.
        scheduler: A torch scheduler that has taken no step yet.
        by: What the scheduler is stepped by: "epochs", "steps", or None for neither.

    Raises:
        InputError: The scheduler is not one for the steps of this training.
    """
    policy, kind = pruner.policy.name, type(scheduler).__name__
    # That of ReduceLROnPlateau needs the loss.
    needed = (
        parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        for parameter in inspect.signature(scheduler.step).parameters.values()
    )
    if by is None or not isinstance(scheduler, LRScheduler) or any(needed):
        return (
            f"fineprune: {policy} takes the learning rate to be constant, since that of {kind} is "
            f"not known in advance: give the policy rates="
        )
    pruner.set_rates(scheduler, by)
    return f"fineprune: {policy} takes the learning rates from {kind}, which steps per {by[:-1]}"
