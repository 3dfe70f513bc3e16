"""ShardedRecorder: what happens to the losses that ``ShardedPruner.record`` is given.

A buffer keeps them. All ranks record equally many batches, so that they flush their buffers
together, whenever these are full and at the end of the epoch. The mean of each batch is taken over
all ranks. Marks of samples that another rank owns are kept until the epoch ends.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError
from fineprune.pruning.dropping_count import exceeds
from fineprune.pruning.loss_buffer import Batch
from fineprune.pruning.recorder import PlanRecorder
from fineprune.pruning.replicas import Replicas
from fineprune.pruning.sample_counts import SampleCounts
from fineprune.pruning.sharded.share import Indices, Share

# The ranks flush their buffers when each holds about so many losses (12 MB).
_FLUSH_AT = 1 << 20


class ShardedRecorder(PlanRecorder[Share]):
    """Buffers the losses of the epoch in progress, and marks the samples above the mean.

    Args:
        counts: The counts and marks of the samples that this rank owns; None if the policy learns
            nothing from losses.
        tolerance: The tolerance of the marks, as in ``FinePruning``.
        num_samples: Number of samples N of all ranks together.
        batch_size: Number of samples per batch and rank.
        replicas: The ranks over which means are taken.

    Attributes:
        foreign: The samples of other ranks that this rank has marked in the epoch; int64.
    """

    def __init__(
        self,
        counts: SampleCounts | None,
        tolerance: float,
        num_samples: int,
        batch_size: int,
        replicas: Replicas,
    ) -> None:
        super().__init__(replicas, num_samples)
        self._counts = counts
        self._tolerance = tolerance
        self._flush_every = max(1, _FLUSH_AT // batch_size)

    def clear(self) -> None:
        """Forget everything that was recorded."""
        super().clear()
        self.foreign: Indices = np.empty(0, dtype=np.int64)
        self._unflushed = 0

    @property
    def batches_until_flush(self) -> int:
        """After how many more batches all ranks flush, so that none may wait longer."""
        return self._flush_every - self._unflushed

    def extend(self, share: Share, batches: Sequence[Batch]) -> None:
        """Add batches to the epoch of ``share``.

        Whenever the buffer is full, this is a collective operation.
        """
        self._buffer.extend(batches)
        self._unflushed += len(batches)
        if self._unflushed == self._flush_every:
            self.flush(share)

    def flush(self, share: Share) -> None:
        """Take the mean of each buffered batch over all ranks, and mark the losses above it.

        With several ranks, this is a collective operation.
        """
        if self._counts is None:
            return
        self._unflushed = 0
        drained = self._drained(self._buffer)
        own, epoch = len(drained.sizes), share.epoch
        batches, last, first = self._replicas.maximum(np.array([own, epoch, -epoch])).tolist()
        if last != -first:
            raise InputError(
                f"expected every rank in the same epoch, got some in epoch {-first} and some in "
                f"epoch {last}: loop over pruner.epochs() on every rank"
            )
        if not batches:
            return
        means = np.repeat(self._means(drained, batches)[:own], drained.sizes)
        marked = drained.indices[exceeds(drained.losses, means, self._tolerance)]
        is_own = _mark(self._counts.marks, marked, share.owned)
        self.foreign = np.concatenate([self.foreign, marked[~is_own]])

    def learn(self, share: Share, clear: bool) -> None:
        """Update the counts at the end of the epoch, which must have been flushed.

        With several ranks, this is a collective operation.
        """
        if self._counts is None:
            return
        for marked in self._replicas.gather(self.foreign):
            _mark(self._counts.marks, marked, share.owned)
        self._counts.end_epoch(clear)


def _mark(marks: npt.NDArray[np.bool_], index: Indices, owned: range) -> npt.NDArray[np.bool_]:
    """Mark the samples that are owned, and return which of them are."""
    is_own = (index >= owned.start) & (index < owned.stop)
    marks[index[is_own] - owned.start] = True
    return is_own
