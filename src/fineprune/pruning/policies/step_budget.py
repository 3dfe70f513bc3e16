"""StepBudget: optimizer steps that are distributed over epochs, by their learning rates.

If rates fall in steps, or belong to steps and not to epochs, the epochs are shortened in proportion
to their rates, so that nearly all is taken from the smallest ones. If rates fall smoothly, this
would change the shape of the schedule. The epochs are then shortened so that the rate, as a
function of the steps, becomes 1 - u^2, where u rises from 0 to 1, the shape of ``fp.shorter``.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError, check_one_of
from fineprune.pruning.policies.policy import Training
from fineprune.pruning.rates import Rates, are_steps, rates_of, relative_rates

# The smallest share of a full epoch that an epoch is given, as long as the budget allows it.
_SMALLEST_SHARE = 0.05

# Relative rates that differ less are the same; those of a periodic schedule differ by rounding.
_SAME = 1e-6

# The lengths of the epochs follow from their rates, and these from the lengths. This converges in a
# few rounds, if at all; the lengths of neighbouring epochs may then differ by a step or so.
_ROUNDS = 20


class StepBudget:
    """The share ``1 - save`` of the steps of a training, and how many of them each epoch is given.

    Args:
        epochs: Number of training epochs.
        save: The share of the optimizer steps to save, in [0, 1).

    Attributes:
        total: Number of optimizer steps of the whole training, once it has begun.
        has_rates: Whether the learning rates need not be taken to be constant.
        rates: The learning rate of each epoch, relative to the largest one.
        lengths: How long each epoch was, as a share of a full one (the size of a step may change);
            None for one that was not trained.
    """

    def __init__(self, epochs: int, save: float) -> None:
        self.total = 0
        self.has_rates = not save  # Without shortened epochs, they make no difference.
        self._by_steps = False
        self._epochs, self._save = epochs, save
        self.lengths: list[float | None] = [None] * epochs
        self.rates = self._weights = (1.0,) * epochs

    def begin(self, training: Training) -> None:
        """Compute the number of steps; raise InputError if an epoch has none."""
        self._num_samples = training.num_samples
        self._step_size, self._full = training.samples_per_step, training.steps_per_epoch
        self.lengths = [None] * self._epochs
        full = self._epochs * self._full
        self.total = round((1 - self._save) * full)
        if self.total < self._epochs or not full:
            raise InputError(
                f"expected at least one step of {self._step_size} samples (batch x ranks x "
                f"accumulation) in each of {self._epochs} epochs, got {self.total} steps with "
                f"save={self._save} of {self._num_samples} samples: save less, or set a smaller "
                f"batch_size"
            )

    def set_rates(self, rates: Rates, by: str = "epochs") -> None:
        """Receive the learning rates, as ``Pruner.set_rates`` does."""
        check_one_of("by", by, ("epochs", "steps"))
        self._by_steps = by == "steps"
        each = rates_of(rates, self.total if self._by_steps else self._epochs, by)
        if self._by_steps:
            each = rates_along_steps(each, self._epochs, self._full)
        self.rates = relative_rates(each)
        given = self._by_steps or are_steps(self.rates)
        self._weights = self.rates if given else smooth_weights(self.rates)
        self.has_rates = True

    def settings(self) -> Sequence[float] | str:
        """Return what a state must agree on: the relative rates of the epochs.

        Those of steps depend on the size of a step, which may change when a training is resumed.
        """
        # Ratios of rates are rounded otherwise if the largest rate is another one.
        return "of steps" if self._by_steps else [round(rate, 9) for rate in self.rates]

    def charge(self, epoch: int, steps: int) -> None:
        """Note how many steps an epoch was given."""
        self.lengths[epoch] = steps / self._full

    def used_before(self, epoch: int) -> int:
        """Return the number of steps of the epochs before this one, as trained or planned."""
        used = 0
        for before, length in enumerate(self.lengths[:epoch]):
            if length is None:
                used += self._given(before, used, self._num_samples)
            else:
                used += round(length * self._full)
        return used

    def steps(self, epoch: int, available: int) -> int:
        """Return the number of steps of an epoch, which has so many samples to train.

        It is the length that uses the budget up if all epochs after it have as many.
        """
        return self._given(epoch, self.used_before(epoch), available)

    def samples(self, steps: int) -> int:
        """Return the number of samples in so many steps; all of them in a full epoch."""
        most = self._num_samples
        return most if steps >= self._full else min(steps * self._step_size, most)

    def _given(self, epoch: int, used: int, available: int) -> int:
        most = min(-(-available // self._step_size), self._full)
        left = self.total - used
        return steps_of_epoch(self._weights[epoch:], left, most=most, full=self._full)


def smooth_weights(rates: Sequence[float]) -> tuple[float, ...]:
    """Return relative numbers of steps of the epochs with which the rate falls as 1 - u^2.

    At the rate r, u is sqrt(1 - r). The means of neighbouring rates divide the steps among them,
    and the epochs of a rate share its steps evenly. A larger rate has no smaller number. ``rates``
    are the rates of the epochs, relative to the largest one.
    """
    ordered = np.sort(rates)
    distinct = ordered[np.diff(ordered, prepend=-1.0) > _SAME]
    which = np.searchsorted(distinct, rates, side="right") - 1
    epochs = np.bincount(which)
    limits = np.concatenate([[0.0], (distinct[1:] + distinct[:-1]) / 2, [1.0]])
    each = -np.diff(np.sqrt(1 - limits)) / epochs
    return tuple(np.maximum.accumulate(each)[which].tolist())


def steps_of_epoch(weights: Sequence[float], budget: int, *, most: int, full: int) -> int:
    """Return how many steps of a budget the first of the remaining epochs is given.

    It is in proportion to the weights of these epochs, but at most ``most``, for which there are
    samples. Steps that this leaves over are distributed evenly. If all remaining epochs follow this
    function, they use the budget exactly. ``full`` is the number of steps of a full epoch.
    """
    left = len(weights)
    if most * left < budget:
        steps = -(-budget // left)
    else:
        steps = round(float(_in_proportion(weights, budget, most, full)[0]))
    # The later epochs must be able to use up the rest, and each needs at least one step.
    return max(min(max(steps, budget - (left - 1) * full), budget - (left - 1)), 1)


def rates_along_steps(rates: Sequence[float], epochs: int, full: int) -> list[float]:
    """Return the rate of each epoch if ``rates`` are those of the steps of a shortened training.

    The epochs share these steps in proportion to their rates, at most ``full`` steps each.
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
