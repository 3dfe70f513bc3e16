"""Recorder: what happens to the losses that ``record`` of a pruner is given.

Inside an epoch, a buffer keeps them. At the end of the epoch (and whenever a state needs them), the
buffer is flushed: the mean of each batch is taken over all ranks, and the policy observes the
losses together with these means.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError
from fineprune.interrupts import uninterrupted
from fineprune.pruning.dropping_count import batch_means, batch_sums
from fineprune.pruning.loop_checks import check_range
from fineprune.pruning.loss_buffer import Batch, Drained, LossBuffer, are_flat
from fineprune.pruning.plan import EpochPlan, fingerprint
from fineprune.pruning.policies.policy import LossRecords, Policy
from fineprune.pruning.replicas import Replicas

# A single process flushes the buffer when it holds about so many losses (48 MB), however many
# samples an epoch has. The host waits for the device in each flush.
_FLUSH_AT = 1 << 22


class Recorder:
    """Buffers the losses of the epoch in progress and hands them to the policy.

    Args:
        policy: Observes the losses, if it needs them.
        replicas: The ranks over which batch means are taken and observations are merged.
        num_samples: Number of samples N in the data set.

    Attributes:
        nonfinite: Number of losses that all ranks recorded in the epoch in progress and that were
            NaN or infinite, as of the last flush.
        flat: Whether all samples of each batch had the same loss, as of the last flush.
        uneven: The smallest and the largest number of batches that a rank recorded since the last
            flush, if these differed; else None.
    """

    def __init__(self, policy: Policy, replicas: Replicas, num_samples: int) -> None:
        self._policy = policy
        self._replicas = replicas
        self._num_samples = num_samples
        self._policy_merges = type(policy).merge is not Policy.merge
        self.clear()

    def clear(self) -> None:
        """Forget everything that was recorded."""
        self.nonfinite = 0
        self.flat = False
        self.uneven: tuple[int, int] | None = None
        self._buffer = LossBuffer()

    @property
    def flushed(self) -> bool:
        """Whether the policy has observed everything that was recorded."""
        return not len(self._buffer)

    def extend(self, plan: EpochPlan, batches: Sequence[Batch]) -> None:
        """Add batches to the epoch of ``plan``."""
        self._buffer.extend(batches)
        if len(self._buffer) >= _FLUSH_AT and self._replicas.size == 1:
            self.flush(plan)

    @uninterrupted()
    def flush(self, plan: EpochPlan) -> None:
        """Let the policy observe the losses with the means of their batches.

        With several ranks, this is a collective operation, unless the policy needs no losses.

        Args:
            plan: The plan of the epoch in progress, or of the current epoch if this rank has
                recorded nothing.
        """
        if not self._policy.needs_losses:
            return
        drained = self._buffer.drain()
        if drained.indices.size:
            check_range(int(drained.indices.min()), int(drained.indices.max()), self._num_samples)
        own = len(drained.sizes)
        batches = self._most_batches(plan, own)
        if not batches:
            return
        self.flat = are_flat(drained)
        sums = np.zeros((batches, 3))
        sums[:own] = batch_sums(drained.losses, drained.sizes)
        sums = self._replicas.sum(sums)
        self.nonfinite += int(sums[:, 2].sum())
        means = batch_means(sums)
        if self._replicas.size == 1 or self._policy_merges:
            own_means = np.repeat(means[:own], drained.sizes)
            records = LossRecords(drained.indices, drained.losses, own_means)
        else:
            records = self._gathered(drained, means)
        self._policy.observe(plan.epoch, records)
        self._policy.merge(self._replicas)

    def _most_batches(self, plan: EpochPlan, batches: int) -> int:
        """Return the largest number of batches of a rank, and check that the plans are equal."""
        if self._replicas.size == 1:
            return batches
        epoch = plan.epoch
        numbers = np.array([epoch, fingerprint(plan), batches])
        least, largest = self._replicas.least_and_most(numbers)
        (first, one_plan, fewest), (last, other_plan, most) = least.tolist(), largest.tolist()
        if fewest != most:
            self.uneven = fewest, most
        if first != last:
            raise InputError(
                f"expected all ranks in the same epoch, got some in epoch {first} and some in "
                f"epoch {last}: loop over pruner.epochs() on every rank"
            )
        if one_plan != other_plan:
            raise InputError(
                f"expected the same plan on every rank, got different ones in epoch {epoch}: let "
                f"select() draw only from its argument rng, and let merge() exchange all that "
                f"observe() learns"
            )
        return int(most)

    def _gathered(self, own: Drained, means: npt.NDArray[np.float64]) -> LossRecords:
        """Return the losses of all ranks, batch after batch, each in the order of the ranks."""
        sizes = self._replicas.gather(own.sizes)
        indices = np.concatenate(self._replicas.gather(own.indices))
        losses = np.concatenate(self._replicas.gather(own.losses))
        batch = np.concatenate([np.repeat(np.arange(len(of_rank)), of_rank) for of_rank in sizes])
        order = np.argsort(batch, kind="stable")
        return LossRecords(indices[order], losses[order], means[batch[order]])
