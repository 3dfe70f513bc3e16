"""Distributes a budget of optimizer steps over epochs, in proportion to their learning rates."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from fineprune.errors import InputError

# The smallest share of a full epoch that an epoch is given, as long as the budget allows it.
_SMALLEST_SHARE = 0.05


def relative_rates(
    rates: Callable[[float], float] | Sequence[float] | None, epochs: int
) -> tuple[float, ...]:
    """Return the largest learning rate from each epoch on, relative to the largest of all.

    While the rate rises (warm-up), the value is 1: a small rate at the start is no reason to skip.

    Args:
        rates: The rate of each epoch, or a function of the progress in epochs, which is evaluated
            in the middle of each epoch; None for a constant rate.
        epochs: Number of epochs in the training.

    Raises:
        InputError: There is not one rate per epoch, or a rate is negative or not finite, or all of
            them are 0.
    """
    if rates is None:
        return (1.0,) * epochs
    given = [rates(epoch + 0.5) for epoch in range(epochs)] if callable(rates) else list(rates)
    if len(given) != epochs:
        raise InputError(
            f"expected one learning rate for each of {epochs} epochs, got {len(given)}"
        )
    if not all(math.isfinite(rate) and rate >= 0 for rate in given) or not any(given):
        raise InputError(f"expected learning rates of at least 0 and one above 0, got {given}")
    largest = max(given)
    return tuple(max(given[epoch:]) / largest for epoch in range(epochs))


def steps_of_epoch(rates: Sequence[float], budget: int, *, most: int, full: int) -> int:
    """Return how many steps the first of the remaining epochs is given.

    Each epoch is given a number of steps in proportion to its rate, but at most ``most``. If all
    remaining epochs follow this function, they use the budget exactly.

    Args:
        rates: The relative learning rate of each remaining epoch, which does not increase.
        budget: The number of steps left for these epochs, at least one per epoch and at most
            ``full`` per epoch.
        most: The number of steps for which there are samples that should be trained.
        full: The number of steps of an epoch that trains all samples.
    """
    left = len(rates)
    smallest = min(_SMALLEST_SHARE * full, most)
    each = np.asarray(rates)
    low, high = 0.0, 2.0 * full / max(rates[-1], 1e-9)
    for _ in range(100):
        middle = (low + high) / 2
        if np.clip(middle * each, smallest, most).sum() < budget:
            low = middle
        else:
            high = middle
    steps = round(min(max(high * rates[0], smallest), most))
    # The later epochs must be able to use up the rest, and each needs at least one step.
    return min(max(steps, budget - (left - 1) * full, 1), budget - (left - 1))
