"""PlanWatch: notices a loader that trains what the plan skips, so that nothing is saved."""

import numpy as np
import numpy.typing as npt

from fineprune.pruning.plan import EpochPlan

# Pruning epochs in a row that trained what they should skip, before it is said.
UNDONE_EPOCHS = 3


class PlanWatch:
    """Counts the losses of skipped samples, epoch by epoch.

    Args:
        num_samples: N.
        num_replicas: ranks that share an epoch's samples.
    """

    def __init__(self, num_samples: int, num_replicas: int) -> None:
        self._num_samples = num_samples
        self._num_replicas = num_replicas
        self._unplanned = 0
        self._in_a_row = 0

    def see(self, plan: EpochPlan, indices: npt.NDArray[np.int64]) -> None:
        """Take in the indices of trained samples."""
        if len(plan.kept) < self._num_samples:
            skipped = np.ones(self._num_samples, dtype=np.bool_)
            skipped[plan.kept.numpy()] = False
            self._unplanned += int(np.count_nonzero(skipped[indices]))

    def undone(self, plan: EpochPlan) -> bool:
        """End the plan's epoch; say whether it is time to warn that the pruning is undone."""
        unplanned, self._unplanned = self._unplanned, 0
        skipped = self._num_samples - len(plan.kept)
        if not skipped:
            return False
        own = max(skipped // self._num_replicas, 1)
        self._in_a_row = self._in_a_row + 1 if unplanned >= own else 0
        return self._in_a_row == UNDONE_EPOCHS
