"""Distributes a budget of optimizer steps over epochs, by their learning rates.

If rates fall in steps, the epochs are shortened in proportion to their rates, so that nearly all is
taken from the smallest ones.

If rates fall smoothly, this would change the shape of the schedule: a linear rate, for example,
would end steeply as a function of the steps. The epochs are shortened so that this function becomes
1 - u^2, where u rises from 0 to 1, the shape of ``fp.shorter``.

If rates belong to steps and not to epochs, their shape is given. The epochs are then shortened in
proportion to their rates, so that the first ones are complete, from which the most is learned about
single samples.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fineprune.pruning.learning_rates import relative_rates

# The smallest share of a full epoch that an epoch is given, as long as the budget allows it.
_SMALLEST_SHARE = 0.05

# Relative rates that differ less are the same; those of a periodic schedule differ by rounding.
_SAME = 1e-6

# The lengths of the epochs follow from their rates, and these from the lengths. This converges in a
# few rounds, if at all; the lengths of neighbouring epochs may then differ by a step or so.
_ROUNDS = 20


def smooth_weights(rates: Sequence[float]) -> tuple[float, ...]:
    """Return relative numbers of steps of the epochs with which the rate falls as 1 - u^2.

    At the rate r, u is sqrt(1 - r). The means of neighbouring rates divide the steps among them,
    and the epochs of a rate share its steps evenly. An epoch has no smaller number than one with a
    smaller rate, as the epochs of a warm-up would have.

    Args:
        rates: The learning rate of each epoch, relative to the largest one.
    """
    ordered = np.sort(rates)
    distinct = ordered[np.diff(ordered, prepend=-1.0) > _SAME]
    which = np.searchsorted(distinct, rates, side="right") - 1
    epochs = np.bincount(which)
    limits = np.concatenate([[0.0], (distinct[1:] + distinct[:-1]) / 2, [1.0]])
    each = -np.diff(np.sqrt(1 - limits)) / epochs
    return tuple(np.maximum.accumulate(each)[which].tolist())


def steps_of_epoch(weights: Sequence[float], budget: int, *, most: int, full: int) -> int:
    """Return how many steps the first of the remaining epochs is given.

    Each epoch is given a number of steps in proportion to its weight, but at most ``most``. If
    this leaves steps over, they are distributed evenly, since samples that should not be trained do
    the most harm at the end. If all remaining epochs follow this function, they use the budget
    exactly.

    Args:
        weights: The weight of each remaining epoch.
        budget: The number of steps left for these epochs, at least one per epoch and at most
            ``full`` per epoch.
        most: The number of steps for which there are samples that should be trained.
        full: The number of steps of an epoch that trains all samples.
    """
    left = len(weights)
    if most * left < budget:
        steps = -(-budget // left)
    else:
        steps = round(float(_in_proportion(weights, budget, most, full)[0]))
    # The later epochs must be able to use up the rest, and each needs at least one step.
    return max(min(max(steps, budget - (left - 1) * full), budget - (left - 1)), 1)


def rates_along_steps(rates: Sequence[float], epochs: int, full: int) -> list[float]:
    """Return the rate of each epoch if the rate is given for each step of a shortened training.

    Args:
        rates: The rate of each optimizer step that the training takes.
        epochs: Number of epochs, which share these steps in proportion to their rates.
        full: The number of steps of an epoch that trains all samples.
    """
    budget = len(rates)
    lengths = np.full(epochs, budget / epochs)
    found: list[float] = []
    for _ in range(_ROUNDS):
        middles = np.cumsum(lengths) - lengths / 2
        before, found = found, [rates[min(int(middle), budget - 1)] for middle in middles]
        if found == before:
            break
        lengths = _in_proportion(relative_rates(found), budget, full, full)
    return found


def _in_proportion(
    weights: Sequence[float], budget: int, most: int, full: int
) -> npt.NDArray[np.float64]:
    """Return a number of steps for each epoch, in proportion to its weight, within the limits."""
    smallest = min(_SMALLEST_SHARE * full, most)
    each = np.asarray(weights, dtype=np.float64)
    low, high = 0.0, 2.0 * full / max(each.min(), 1e-9)
    for _ in range(100):
        middle = (low + high) / 2
        if np.clip(middle * each, smallest, most).sum() < budget:
            low = middle
        else:
            high = middle
    lengths: npt.NDArray[np.float64] = np.clip(high * each, smallest, most)
    return lengths
