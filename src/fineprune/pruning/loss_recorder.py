"""LossRecorder: what happens to the losses that ``Pruner.record`` is given.

Inside an epoch, they are copied into a buffer. At the end of the epoch (and whenever a state needs
them), the buffer is flushed: the mean of each batch is taken over all ranks, and the policy
observes the losses together with these means.
"""

from dataclasses import dataclass

import numpy as np
import torch

from fineprune.errors import InputError
from fineprune.pruning.dropping_count import batch_means, batch_sums
from fineprune.pruning.loss_buffer import LossBuffer
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.plan_watch import UNDONE_EPOCHS, PlanWatch
from fineprune.pruning.policies.policy import LossRecords, Policy
from fineprune.pruning.replicas import Replicas
from fineprune.pruning.sampler import samples_per_rank
from fineprune.pruning.step_counts import BatchShape

# A single process flushes the buffer whenever it holds this many losses. The buffer therefore needs
# at most 48 MB, however many samples an epoch has. The host waits for the device in each flush.
_FLUSH_AT = 1 << 22


@dataclass
class Progress:
    """An epoch that has begun to record and has not ended.

    Attributes:
        plan: The plan that the epoch trains by.
        batches: Number of ``record`` calls so far, which is the same on every rank.
        samples: Number of samples that all ranks together have recorded. This is the position in
            the epoch's order.
        recorded_here: Whether this process recorded any of it. It is false while everything comes
            from a loaded state.
    """

    plan: EpochPlan
    batches: int = 0
    samples: int = 0
    recorded_here: bool = False


class LossRecorder:
    """Buffers the losses of the epoch in progress and hands them to the policy.

    Args:
        policy: Observes the losses, if it needs them.
        replicas: The ranks over which batch means are taken and observations are merged.
        num_samples: Number of samples N in the data set.
        shape: Says how many ranks share the samples and how large a batch is.

    Attributes:
        progress: The epoch in progress; None if nothing has been recorded since the last epoch
            ended.
        nonfinite_so_far: Number of losses that this rank recorded in the epoch in progress and
            that were NaN or infinite, as of the last flush.
    """

    def __init__(
        self, policy: Policy, replicas: Replicas, num_samples: int, shape: BatchShape
    ) -> None:
        self.progress: Progress | None = None
        self.nonfinite_so_far = 0
        self._policy = policy
        self._replicas = replicas
        self._num_samples = num_samples
        self._shape = shape
        self._ranks = max(shape.num_replicas, replicas.size)
        self._watch = PlanWatch(num_samples, shape.num_replicas)
        self._buffer = self._new_buffer()

    @property
    def flushed(self) -> bool:
        """Whether the policy has observed everything that was recorded."""
        return len(self._buffer) == 0

    def begin(self, plan: EpochPlan, index: torch.Tensor) -> None:
        """Begin an epoch with its first batch.

        Raises:
            InputError: An index is out of range. Only indices on the CPU are checked here; all
                others are checked when the buffer is flushed, because checking takes longer than
                copying, and on a GPU it would wait for the device.
        """
        if index.device.type == "cpu" and index.numel():
            check_range(int(index.min()), int(index.max()), self._num_samples)
        self.progress = Progress(plan)

    def append(self, index: torch.Tensor, losses: torch.Tensor) -> None:
        """Add a batch to the epoch in progress; index and losses have shape (B,)."""
        progress = self.progress
        assert progress is not None
        progress.recorded_here = True
        progress.batches += 1
        progress.samples += len(index) * self._ranks
        if not self._policy.needs_losses:
            return
        if (
            self._replicas.size == 1
            and len(self._buffer)
            and (len(self._buffer) >= _FLUSH_AT or not self._buffer.fits(len(index)))
        ):
            self.flush(progress.plan)
        self._buffer.append(index, losses)

    def flush(self, plan: EpochPlan) -> None:
        """Let the policy observe the buffered losses with the means of their batches.

        With several ranks, this is a collective operation. A policy that needs no losses makes it
        do nothing.

        Args:
            plan: The plan of the epoch in progress, or of the current epoch if this rank has
                recorded nothing.

        Raises:
            InputError: An index is out of range.
        """
        if not self._policy.needs_losses:
            return
        indices, losses, sizes = self._buffer.drain()
        if indices.size:
            check_range(int(indices.min()), int(indices.max()), self._num_samples)
        sums = batch_sums(losses, sizes)
        self.nonfinite_so_far += int(len(losses) - sums[:, 1].sum())
        batches = self._replicas.most(len(sizes))
        if batches:
            padding = np.zeros((batches - len(sizes), 2))
            sums = self._replicas.sum(np.concatenate([sums, padding]))[: len(sizes)]
            means = np.repeat(batch_means(sums), sizes)
            self._watch.see(plan, indices)
            self._policy.observe(plan.epoch, LossRecords(indices, losses, means))
            self._policy.merge(self._replicas)

    def end_epoch(self, plan: EpochPlan) -> tuple[int, list[str]]:
        """End the epoch in progress, which must have been flushed.

        Returns:
            The number of losses of this rank that were NaN or infinite, and the warnings that the
            epoch gives rise to.
        """
        nonfinite, self.nonfinite_so_far = self.nonfinite_so_far, 0
        self.progress = None
        messages = []
        if nonfinite:
            messages.append(
                f"{nonfinite} losses of epoch {plan.epoch} were NaN or infinite; they received no "
                f"mark and were left out of the mean of their batch"
            )
        if self._watch.undone(plan):
            messages.append(
                f"in {UNDONE_EPOCHS} pruning epochs up to epoch {plan.epoch}, the samples to skip "
                f"were trained all the same: give the loader sampler=pruner.sampler"
            )
        return nonfinite, messages

    def load(self, progress: Progress | None, nonfinite_so_far: int) -> None:
        """Forget everything that was recorded, and continue from a saved state."""
        self.progress = progress
        self.nonfinite_so_far = nonfinite_so_far
        self._buffer = self._new_buffer()

    def _new_buffer(self) -> LossBuffer:
        own = samples_per_rank(self._num_samples, self._shape.num_replicas, drop_last=False)
        return LossBuffer(min(own + (self._shape.batch_size or 1), _FLUSH_AT))


def check_batch(index: torch.Tensor, losses: torch.Tensor) -> None:
    """Raise InputError unless these are B integer indices and B floating-point losses."""
    if losses.ndim != 1 or index.shape != losses.shape:
        raise InputError(
            f"expected one loss for each index, both of shape (B,), got losses of shape "
            f'{tuple(losses.shape)} and indices of shape {tuple(index.shape)}: use reduction="none"'
        )
    if not len(losses):
        raise InputError("expected at least one loss in a batch, got none")
    if not losses.is_floating_point():
        raise InputError(f"expected floating-point losses, got {losses.dtype}")
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise InputError(
            f"expected integer indices, got {index.dtype}: a large index is not exact in a float"
        )


def check_range(lowest: int, highest: int, num_samples: int) -> None:
    """Raise InputError unless the indices from ``lowest`` to ``highest`` are in 0..N-1."""
    if lowest < 0 or highest >= num_samples:
        raise InputError(f"expected indices in 0..{num_samples - 1}, got {lowest}..{highest}")
