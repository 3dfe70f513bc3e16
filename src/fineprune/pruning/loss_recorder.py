"""LossRecorder: what happens to the losses that ``Pruner.record`` is given.

Inside an epoch, they are copied into a buffer. At the end of the epoch (and whenever a state needs
them), the buffer is flushed: the mean of each batch is taken over all ranks, and the policy
observes the losses together with these means.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError
from fineprune.pruning.dropping_count import batch_means, batch_sums
from fineprune.pruning.loss_buffer import Drained, LossBuffer
from fineprune.pruning.plan import EpochPlan, fingerprint
from fineprune.pruning.plan_watch import PlanWatch
from fineprune.pruning.policies.policy import LossRecords, Policy
from fineprune.pruning.replicas import Number, Replicas
from fineprune.pruning.sampler import PruningSampler
from fineprune.pruning.step_counts import BatchShape

# A single process flushes the buffer when it is full. It holds at most this many losses (48 MB),
# however many samples an epoch has. The host waits for the device in each flush.
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
        seed: The seed of the pruner, which must be the same on every rank.

    Attributes:
        progress: The epoch in progress; None if nothing has been recorded since the last epoch
            ended.
        num_ranks: Number of ranks that record the losses of an epoch together.
        nonfinite_so_far: Number of losses that all ranks recorded in the epoch in progress and that
            were NaN or infinite, as of the last flush.
    """

    def __init__(
        self, policy: Policy, replicas: Replicas, num_samples: int, shape: BatchShape, seed: int
    ) -> None:
        self.progress: Progress | None = None
        self.nonfinite_so_far = 0
        self._policy = policy
        self._replicas = replicas
        self._num_samples = num_samples
        self._seed = seed
        self.num_ranks = max(shape.num_replicas, replicas.size)
        self._policy_merges = type(policy).merge is not Policy.merge
        self._watch = PlanWatch(policy, num_samples, self.num_ranks, replicas)
        self._buffer = LossBuffer()
        self._rescored = LossBuffer()

    @property
    def flushed(self) -> bool:
        """Whether the policy has observed everything that was recorded."""
        return len(self._buffer) == 0 and len(self._rescored) == 0

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
        number = len(index)
        progress.recorded_here = True
        progress.batches += 1
        progress.samples += number * self.num_ranks
        if self._watch.watching:
            self._watch.see(index)
        if not self._policy.needs_losses:
            return
        if self._must_flush(self._buffer, number):
            self.flush(progress.plan)
        self._buffer.append(index, losses)

    def append_rescored(self, plan: EpochPlan, index: torch.Tensor, losses: torch.Tensor) -> None:
        """Add losses of samples that the epoch of ``plan`` did not train, both of shape (B,)."""
        if self._must_flush(self._rescored, len(index)):
            self.flush(plan)
        self._rescored.append(index, losses)

    def flush(self, plan: EpochPlan) -> None:
        """Let the policy observe the buffered losses with the means of their batches.

        Then let it observe the losses of rescored samples, if it rescores. With several ranks, this
        is a collective operation. A policy that needs no losses makes it do nothing.

        Args:
            plan: The plan of the epoch in progress, or of the current epoch if this rank has
                recorded nothing.

        Raises:
            InputError: An index is out of range, or the ranks have different plans.
        """
        if self._policy.needs_losses:
            self._flush_trained(plan)
        if self._policy.rescores:
            self._flush_rescored(plan)

    def end_epoch(
        self, plan: EpochPlan, sampler: PruningSampler, *, plan_was_read: bool
    ) -> tuple[int, list[str]]:
        """End the epoch in progress, which must have been flushed.

        Args:
            plan: The plan of the epoch.
            sampler: The sampler of this rank, which follows the plan.
            plan_was_read: Whether the training loop has read the plan.

        Returns:
            The number of losses that were NaN or infinite, and the warnings that the epoch gives
            rise to.
        """
        nonfinite, self.nonfinite_so_far = self.nonfinite_so_far, 0
        progress = self.progress or Progress(plan)
        messages = self._watch.end_epoch(
            plan, progress.samples, progress.batches, sampler, plan_was_read
        )
        self.progress = None
        if nonfinite:
            messages.append(
                f"{nonfinite} losses of epoch {plan.epoch} were NaN or infinite; they received no "
                f"mark and were left out of the mean of their batch"
            )
        return nonfinite, messages

    def load(self, progress: Progress | None, nonfinite_so_far: int) -> None:
        """Forget everything that was recorded, and continue from a saved state."""
        self.progress = progress
        self.nonfinite_so_far = nonfinite_so_far
        self._buffer = LossBuffer()
        self._rescored = LossBuffer()
        self._watch.forget()

    def _flush_trained(self, plan: EpochPlan) -> None:
        drained = self._drained(self._buffer)
        batches = self._most_batches(plan, len(drained.sizes))
        if not batches:
            return
        sums = np.zeros((batches, 3))
        sums[: len(drained.sizes)] = batch_sums(drained.losses, drained.sizes)
        sums = self._replicas.sum(sums)
        self.nonfinite_so_far += int(sums[:, 2].sum())
        means = batch_means(sums)
        if self._replicas.size == 1 or self._policy_merges:
            own_means = np.repeat(means[: len(drained.sizes)], drained.sizes)
            records = LossRecords(drained.indices, drained.losses, own_means)
        else:
            records = self._gathered(drained, means)
        self._policy.observe(plan.epoch, records)
        self._policy.merge(self._replicas)

    def _flush_rescored(self, plan: EpochPlan) -> None:
        own = self._drained(self._rescored)
        index, losses = own.indices, own.losses
        if self._replicas.size > 1:
            numbers = self._replicas.gather(np.array([len(index)]), 1)
            lengths = [int(number[0]) for number in numbers]
            if not max(lengths):
                return
            index = _joined(self._replicas.gather(index, max(lengths)), lengths)
            losses = _joined(self._replicas.gather(losses, max(lengths)), lengths)
        if len(index):
            self._policy.observe_rescored(plan.epoch, index, losses)

    def _drained(self, buffer: LossBuffer) -> Drained:
        drained = buffer.drain()
        if drained.indices.size:
            check_range(int(drained.indices.min()), int(drained.indices.max()), self._num_samples)
        return drained

    def _most_batches(self, plan: EpochPlan, batches: int) -> int:
        """Return the largest number of batches of a rank, and check that the plans are equal."""
        if self._replicas.size == 1:
            return batches
        own = fingerprint(plan, self._seed)
        most, largest, smallest = self._replicas.maximum(np.array([batches, own, -own]))
        if largest != -smallest:
            raise InputError(
                f"expected the same seed and the same plan on every rank, got different ones in "
                f"epoch {plan.epoch}: give every rank the same seed and policy, let select() draw "
                f"from its argument rng only, and let merge() exchange all that observe() learns"
            )
        return int(most)

    def _gathered(self, own: Drained, means: npt.NDArray[np.float64]) -> LossRecords:
        """Return the losses of all ranks, batch after batch, each in the order of the ranks."""
        sizes = self._replicas.gather(own.sizes, len(means))
        lengths = [int(of_rank.sum()) for of_rank in sizes]
        indices = self._replicas.gather(own.indices, max(lengths))
        losses = self._replicas.gather(own.losses, max(lengths))
        batch = np.concatenate([np.repeat(np.arange(len(means)), of_rank) for of_rank in sizes])
        order = np.argsort(batch, kind="stable")
        return LossRecords(
            _joined(indices, lengths)[order], _joined(losses, lengths)[order], means[batch[order]]
        )

    def _must_flush(self, buffer: LossBuffer, number: int) -> bool:
        """Return whether ``number`` more losses are too many for a buffer that may be flushed."""
        held = len(buffer)
        return held > 0 and held + number > _FLUSH_AT and self._replicas.size == 1


def _joined(parts: list[npt.NDArray[Number]], lengths: list[int]) -> npt.NDArray[Number]:
    return np.concatenate([part[:length] for part, length in zip(parts, lengths, strict=True)])


def check_batch(index: torch.Tensor, losses: torch.Tensor) -> None:
    """Raise InputError unless these are B integer indices and B floating-point losses."""
    shape = losses.shape
    usual = losses.dtype is torch.float32 and index.dtype is torch.int64  # Checked fastest.
    if usual and len(shape) == 1 and shape[0] and index.shape == shape:
        return
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
