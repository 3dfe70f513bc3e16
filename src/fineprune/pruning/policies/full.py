"""FullData: train every epoch on all samples, bit for bit as a plain loop does; the baseline."""

from typing import ClassVar

import numpy as np

from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.policies.policy import Policy


class FullData(Policy):
    """Train every epoch on all samples.

    Args:
        epochs: Number of training epochs.

    Raises:
        InputError: ``epochs`` is not a whole number of at least 1.
    """

    name: ClassVar[str] = "full"

    def lengths(self) -> list[int]:
        """Return the number of all samples for each epoch."""
        return [self._num_samples] * self.epochs

    def select(self, epoch: int, number: int | None, rng: np.random.Generator) -> EpochPlan:
        """Keep all samples. A ``Pruner`` does not ask, since nothing is skipped."""
        return EpochPlan.full(epoch, self._num_samples)
