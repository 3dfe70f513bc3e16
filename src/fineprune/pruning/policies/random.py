"""RandomPruning: skip as many samples as fine-pruning does, chosen at random."""

from typing import ClassVar

import numpy as np
import torch

from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.policies.scheduled import ScheduledPolicy


class RandomPruning(ScheduledPolicy):
    """Skip a new random set of samples in each epoch that the schedule prunes.

    This is the control for fine-pruning: it skips equally many samples in the same epochs, but
    ignores the losses.

    Args:
        schedule: The ``Schedule``, which says which epochs prune.
        prune: The number of samples that a pruning epoch skips: a share in [0, 1), or a whole
            number below N.
        options: The options of every policy; see ``PlanOptions``.

    Raises:
        InputError: ``prune`` or an option is out of range.
    """

    name: ClassVar[str] = "random"

    def select(self, epoch: int, num_kept: int | None, rng: np.random.Generator) -> EpochPlan:
        """Keep ``num_kept`` samples; every set of this size has the same probability."""
        kept = rng.choice(self._num_samples, size=num_kept, replace=False, shuffle=False)
        kept.sort()
        return EpochPlan(epoch, torch.from_numpy(kept))
