"""OwnedFinePruning: fine-pruning of which each rank holds the counts of its own samples only."""

import numpy as np
import numpy.typing as npt

from fineprune.pruning.dropping_count import Counts, exceeds
from fineprune.pruning.policies.fine_pruning import FinePruning
from fineprune.pruning.policies.policy import LossRecords
from fineprune.pruning.policies.scheduled import ScheduledPolicy
from fineprune.pruning.replicas import Replicas
from fineprune.pruning.sharded.share import Indices


class OwnedFinePruning(FinePruning):
    """``FinePruning`` for the samples that one rank owns. ``pruned_share`` selects them.

    Args:
        policy: The policy of all ranks together.
        owned: The samples that this rank owns.
    """

    def __init__(self, policy: FinePruning, owned: range) -> None:
        super().__init__(policy.given_schedule, policy.prune, policy.tolerance)
        self._owned = owned
        # The samples of other ranks that this rank has marked since the ranks exchanged them.
        self._foreign: Indices = np.empty(0, dtype=np.int64)

    def bind(self, num_samples: int) -> None:
        """Allocate a count and a mark for each sample that this rank owns."""
        ScheduledPolicy.bind(self, num_samples)  # That of ``FinePruning`` allocates N of them.
        self._allocate(len(self._owned))

    @property
    def owned_counts(self) -> Counts:
        """The counts of the owned samples, not a copy; integers, shape (len(owned),)."""
        return self._counts

    def observe(self, epoch: int, records: LossRecords) -> None:
        """Mark own samples above the mean of their batch, and note those of other ranks."""
        marked = records.index[exceeds(records.losses, records.batch_means, self.tolerance)]
        is_own = self._mark(marked)
        self._foreign = marked[~is_own]

    def merge(self, replicas: Replicas) -> None:
        """Mark the samples that other ranks noted."""
        for marked in replicas.gather(self._foreign):
            self._mark(marked)

    def _mark(self, index: Indices) -> npt.NDArray[np.bool_]:
        """Mark the samples that this rank owns, and return which of them these are."""
        is_own = (index >= self._owned.start) & (index < self._owned.stop)
        self._marks[index[is_own] - self._owned.start] = True
        return is_own

    def suspicion(self) -> None:  # type: ignore[override]
        """Return None, since no rank knows the counts of all samples."""

    def num_suspects(self) -> None:
        """Return None, as ``suspicion`` does."""
