"""RandomPruning: skip as many samples as fine-pruning does, chosen at random."""

from typing import ClassVar

import numpy as np

from fineprune.pruning.plan import EpochPlan, random_plan
from fineprune.pruning.policies.scheduled import ScheduledPolicy


class RandomPruning(ScheduledPolicy):
    """Skip a new random set of samples in each epoch that the schedule prunes.

    This is the control for fine-pruning: it skips equally many samples in the same epochs, but
    ignores the losses.

    Args:
        schedule: The ``Schedule``, which says which epochs prune.
        prune: The number of samples that a pruning epoch skips: a share in [0, 1), or a whole
            number below N.

    Raises:
        InputError: ``prune`` is out of range.
    """

    name: ClassVar[str] = "random"

    def select(self, epoch: int, number: int | None, rng: np.random.Generator) -> EpochPlan:
        """Keep ``number`` samples; every set of this size has the same probability."""
        assert number is not None
        return random_plan(epoch, number, self._num_samples, rng)
