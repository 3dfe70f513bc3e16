"""ShardedRecorder: what happens to the losses that ``ShardedPruner.record`` is given.

They are copied into a buffer. All ranks record equally many batches, so that they flush their
buffers together, whenever these are full and at the end of the epoch. The mean of each batch is
taken over all ranks. Marks of samples that another rank owns are kept until the epoch ends.
"""

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError
from fineprune.pruning.dropping_count import batch_means, batch_sums, exceeds
from fineprune.pruning.loss_buffer import Drained, LossBuffer
from fineprune.pruning.loss_recorder import check_range
from fineprune.pruning.replicas import Replicas
from fineprune.pruning.sample_counts import SampleCounts
from fineprune.pruning.sharded.share import Indices, Share

# The ranks flush their buffers when each holds about so many losses (12 MB).
_FLUSH_AT = 1 << 20

# An epoch recorded far fewer samples than planned if it recorded at most this share of them.
_FEW = 2 / 3


class ShardedRecorder:
    """Buffers the losses of the epoch in progress, and marks the samples above the mean.

    Args:
        counts: The counts and marks of the samples that this rank owns; None if the policy learns
            nothing from losses.
        tolerance: The tolerance of the marks, as in ``FinePruning``.
        num_samples: Number of samples N of all ranks together.
        batch_size: Number of samples per batch and rank.
        replicas: The ranks over which means are taken.

    Attributes:
        batches: Number of batches that this rank has recorded in the epoch in progress.
        samples: Number of samples that this rank has recorded in it.
        nonfinite: Number of losses that all ranks recorded in it and that were NaN or infinite, as
            of the last flush.
        foreign: The samples of other ranks that this rank has marked in it; int64.
    """

    def __init__(
        self,
        counts: SampleCounts | None,
        tolerance: float,
        num_samples: int,
        batch_size: int,
        replicas: Replicas,
    ) -> None:
        self._counts = counts
        self._tolerance = tolerance
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._replicas = replicas
        self._flush_every = max(1, _FLUSH_AT // batch_size)
        self._buffer = LossBuffer()
        self._warned: set[str] = set()
        self.load(0, 0, 0, np.empty(0, dtype=np.int64))

    def load(self, batches: int, samples: int, nonfinite: int, foreign: Indices) -> None:
        """Forget everything that was recorded, and continue from a saved state."""
        self.batches = batches
        self.samples = samples
        self.nonfinite = nonfinite
        self.foreign = foreign
        self._unplanned = 0
        self._buffer = LossBuffer()

    @property
    def flushed(self) -> bool:
        """Whether every recorded loss has led to a mark or to none."""
        return len(self._buffer) == 0

    def append(self, share: Share, index: torch.Tensor, losses: torch.Tensor) -> None:
        """Add a batch to the epoch of ``share``; index and losses have shape (B,).

        Whenever the buffer is full, this is a collective operation.
        """
        self.batches += 1
        self.samples += len(index)
        if self._counts is None:
            return
        self._buffer.append(index, losses)
        if self.batches % self._flush_every == 0:
            self.flush(share)

    def flush(self, share: Share) -> None:
        """Take the mean of each buffered batch over all ranks, and mark the losses above it.

        With several ranks, this is a collective operation.

        Raises:
            InputError: An index is out of range, or the ranks are in different epochs.
        """
        if self._counts is None:
            return
        drained = self._buffer.drain()
        if drained.indices.size:
            check_range(int(drained.indices.min()), int(drained.indices.max()), self._num_samples)
        own, epoch = len(drained.sizes), share.epoch
        batches, last, first = self._replicas.maximum(np.array([own, epoch, -epoch])).tolist()
        if last != -first:
            raise InputError(
                f"expected every rank in the same epoch, got some in epoch {-first} and some in "
                f"epoch {last}: loop over pruner.epochs() on every rank"
            )
        if not batches:
            return
        self._check_plan(share, drained)
        sums = np.zeros((batches, 3))
        sums[:own] = batch_sums(drained.losses, drained.sizes)
        sums = self._replicas.sum(sums)
        self.nonfinite += int(sums[:, 2].sum())
        means = np.repeat(batch_means(sums)[:own], drained.sizes)
        marked = drained.indices[exceeds(drained.losses, means, self._tolerance)]
        is_own = _mark(self._counts.marks, marked, share.owned)
        self.foreign = np.concatenate([self.foreign, marked[~is_own]])

    def end_epoch(self, share: Share, clear: bool, was_read: bool) -> tuple[int, list[str]]:
        """End the epoch, which must have been flushed, and update the counts.

        With several ranks, this is a collective operation.

        Args:
            share: What this rank trained in the epoch.
            clear: Whether the epoch is a boundary of the schedule.
            was_read: Whether the sampler was read in the epoch.

        Returns:
            The number of losses that were NaN or infinite, and the warnings that the epoch gives
            rise to.
        """
        nonfinite, messages = self.nonfinite, self._messages(share, was_read)
        if self._counts is not None:
            if self._replicas.size > 1:
                for marked in self._exchanged_marks():
                    _mark(self._counts.marks, marked, share.owned)
            self._counts.end_epoch(clear)
        self.load(0, 0, 0, np.empty(0, dtype=np.int64))
        return nonfinite, messages

    def _exchanged_marks(self) -> list[Indices]:
        """Return the samples that each rank marked although another one owns them."""
        own = np.array([len(self.foreign)])
        lengths = [int(length[0]) for length in self._replicas.gather(own, 1)]
        if not max(lengths):
            return []
        parts = self._replicas.gather(self.foreign, max(lengths))
        return [part[:length] for part, length in zip(parts, lengths, strict=True)]

    def _check_plan(self, share: Share, drained: Drained) -> None:
        """Count the samples of the epoch's first batch that the epoch should have skipped."""
        if self.batches == len(drained.sizes) and self.batches:
            first = drained.indices[: int(drained.sizes[0])]
            self._unplanned = int(np.count_nonzero(~share.includes(first)))

    def _messages(self, share: Share, was_read: bool) -> list[str]:
        found = {}
        if not self.batches and was_read and self._counts is not None:
            found["silent"] = (
                f"epoch {share.epoch} recorded no losses, so the policy learns nothing: pass the "
                f"losses of each batch to pruner.record(index, losses)"
            )
        if self._unplanned:
            found["unplanned"] = (
                f"the first batch of epoch {share.epoch} has {self._unplanned} samples that this "
                f"rank should not train: give the loader sampler=pruner.sampler"
            )
        world = self._replicas.outgrown()
        if world is not None and self.batches:
            found["early"] = (
                f"this ShardedPruner was made before the process group of {world} ranks, so every "
                f"rank owns all samples: make it after init_process_group()"
            )
        in_whole_batches = share.length - share.length % self._batch_size
        if 0 < self.samples <= _FEW * in_whole_batches:
            found["few"] = (
                f"epoch {share.epoch} recorded {self.samples} samples on this rank, which should "
                f"train {share.length}: record every batch, and let no framework divide the "
                f"batches among the ranks once more"
            )
        new = [message for kind, message in found.items() if kind not in self._warned]
        self._warned.update(found)
        if self.nonfinite:
            new.append(
                f"{self.nonfinite} losses of epoch {share.epoch} were NaN or infinite; they "
                f"received no mark and were left out of the mean of their batch"
            )
        return new


def _mark(marks: npt.NDArray[np.bool_], index: Indices, owned: range) -> npt.NDArray[np.bool_]:
    """Mark the samples that are owned, and return which of them are."""
    is_own = (index >= owned.start) & (index < owned.stop)
    marks[index[is_own] - owned.start] = True
    return is_own
