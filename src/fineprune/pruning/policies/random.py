"""RandomPruning: skip as many samples as fine-pruning would, at random. The matched control."""

from typing import ClassVar

import numpy as np
import torch

from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.policies.scheduled import ScheduledPolicy


class RandomPruning(ScheduledPolicy):
    """Skip a fresh random set in each epoch that the schedule prunes.

    Same epochs, same number, no look at the losses: what fine-pruning has to beat.

    Args:
        schedule: when to prune.
        prune: how many samples to skip: a share in [0, 1), or a whole number below N.

    Raises:
        InputError: ``prune`` is neither.
    """

    name: ClassVar[str] = "random"

    def select(self, epoch: int, num_kept: int | None, rng: np.random.Generator) -> EpochPlan:
        """Keep ``num_kept`` samples, each set with the same chance."""
        kept = rng.choice(self._num_samples, size=num_kept, replace=False, shuffle=False)
        kept.sort()
        return EpochPlan(epoch, torch.from_numpy(kept))
