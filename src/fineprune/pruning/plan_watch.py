"""PlanWatch: notices a loader that trains the samples that the plan skips."""

import numpy as np
import numpy.typing as npt

from fineprune.pruning.plan import EpochPlan

# Number of pruning epochs in a row that trained the skipped samples before a warning is given.
UNDONE_EPOCHS = 3


class PlanWatch:
    """Counts how many skipped samples each epoch trained all the same.

    Args:
        num_samples: Number of samples N in the data set.
        num_replicas: Number of ranks that share the samples of an epoch.
    """

    def __init__(self, num_samples: int, num_replicas: int) -> None:
        self._num_samples = num_samples
        self._num_replicas = num_replicas
        self._unplanned = 0
        self._in_a_row = 0

    def see(self, plan: EpochPlan, indices: npt.NDArray[np.int64]) -> None:
        """Compare the indices of trained samples with the plan."""
        if len(plan.kept) < self._num_samples:
            skipped = np.ones(self._num_samples, dtype=np.bool_)
            skipped[plan.kept.numpy()] = False
            self._unplanned += int(np.count_nonzero(skipped[indices]))

    def undone(self, plan: EpochPlan) -> bool:
        """End the plan's epoch, and return whether it is time to warn that nothing is saved."""
        unplanned, self._unplanned = self._unplanned, 0
        skipped = self._num_samples - len(plan.kept)
        if not skipped:
            return False
        own = max(skipped // self._num_replicas, 1)
        self._in_a_row = self._in_a_row + 1 if unplanned >= own else 0
        return self._in_a_row == UNDONE_EPOCHS
