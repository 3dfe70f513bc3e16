"""FinePruning: skip the samples whose loss most often exceeded the mean of their batch."""

import math
from collections.abc import Sequence
from typing import ClassVar, Unpack

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError
from fineprune.pruning.dropping_count import (
    Counts,
    add_marks,
    counts_dtype,
    exceeds,
    keep_least_counted,
)
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.plan_options import Options, check_share
from fineprune.pruning.policies.policy import LossRecords, prune_count
from fineprune.pruning.policies.scheduled import ScheduledPolicy
from fineprune.pruning.replicas import Replicas
from fineprune.pruning.schedule import Schedule

# A schedule for a given saving skips at most this share of the samples per epoch, if possible.
_MOST_SKIPPED = 0.5


class FinePruning(ScheduledPolicy):
    """Data fine-pruning (Li, He, Ren and Mao, "Data Fine-pruning: A Simple Way to Accelerate Neural
    Network Training", NPC 2018; called the paper here).

    Args:
        schedule: The ``Schedule``, which says which epochs prune and when the counts are cleared.
        prune: The number of samples that a pruning epoch skips: a share in [0, 1), or a whole
            number below N.
        tolerance: The tolerance of the marks: a sample is marked if its loss exceeds the mean loss
            of its batch by more than ``tolerance * |mean|``.
        options: The options of every policy; see ``PlanOptions``.

    Raises:
        InputError: ``prune``, ``tolerance`` or an option is out of range.
    """

    name: ClassVar[str] = "fine-pruning"
    _setting_names = ("prune", "tolerance")
    _array_names = ("_counts", "_marks")
    needs_losses: bool = True
    of_nonfinite: ClassVar[str] = "received no mark and were left out of the mean of their batch"

    def __init__(
        self,
        schedule: Schedule,
        prune: float,
        tolerance: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(schedule, prune, **options)
        if not math.isfinite(tolerance):
            raise InputError(f"expected tolerance to be a finite number, got {tolerance}")
        self.tolerance = float(tolerance)
        self._allocate(0)

    @classmethod
    def for_saving(
        cls,
        epochs: int,
        save: float = 0.35,
        milestones: Sequence[int] = (),
        *,
        tolerance: float = 0.0,
    ) -> "FinePruning":
        """Find the schedule and ``prune`` with which fine-pruning saves a share of the training.

        There is one window per interval between milestones. In each window, pruning starts as late
        as possible, so that the counts cover more epochs, but early enough that no pruned epoch has
        to skip more than half of the samples, unless ``save`` is larger. ``prune`` follows from it.

        Args:
            epochs: Number of training epochs.
            save: The share of all sample-steps to skip, in (0, 1).
            milestones: The epochs (counted from 1, ascending) after which the learning rate falls.
            tolerance: The tolerance of the marks, as in ``FinePruning``.

        Raises:
            InputError: A value is out of range, or no schedule saves that much.
        """
        start, prune = start_and_prune(epochs, save, milestones)
        schedule = Schedule.from_milestones(epochs, milestones, start=start)
        return cls(schedule, prune, tolerance)

    def bind(self, num_samples: int) -> None:
        """Allocate N counts and N marks."""
        super().bind(num_samples)
        self._allocate(num_samples)

    def _allocate(self, number: int) -> None:
        """Begin with counts of 0: two bytes per sample, if no window exceeds 255 epochs."""
        self._counts: Counts = np.zeros(number, dtype=counts_dtype(self.schedule.longest_window))
        self._marks: npt.NDArray[np.bool_] = np.zeros(number, dtype=np.bool_)

    def select(self, epoch: int, num_kept: int | None, rng: np.random.Generator) -> EpochPlan:
        """Keep the ``num_kept`` samples with the smallest counts; ties are broken at random."""
        assert num_kept is not None
        kept = keep_least_counted(self._counts, num_kept, rng)
        return EpochPlan(epoch, torch.from_numpy(kept))

    def observe(self, epoch: int, records: LossRecords) -> None:
        """Mark the samples above the mean of their batch, at most once per sample and epoch."""
        marked = exceeds(records.losses, records.batch_means, self.tolerance)
        self._marks[records.index[marked]] = True

    def merge(self, replicas: Replicas) -> None:
        """Mark every sample that any rank marked."""
        self._marks = replicas.maximum(self._marks.view(np.uint8)).view(np.bool_)

    def end_epoch(self, epoch: int) -> None:
        """Clear the counts if the epoch is a boundary, then add the marks of the epoch."""
        if self.schedule.clears(epoch):
            self._counts[:] = 0
        add_marks(self._counts, self._marks)
        self._marks[:] = False

    @property
    def counts(self) -> torch.Tensor:
        """DroppingCounts as of the last epoch that ended: integers, shape (N,), a copy.

        The dtype is uint8 if no window is longer than 255 epochs, else int16 or int32.
        """
        return torch.from_numpy(self._counts.copy())

    def suspicion(self) -> torch.Tensor:
        """Return the DroppingCounts as of the last epoch that ended, float32, shape (N,)."""
        return torch.from_numpy(self._counts.astype(np.float32))

    def num_suspects(self) -> int | None:
        """Return how many samples a pruning epoch skips; None if it skips none."""
        return prune_count(self.prune, self._num_samples) or None


def start_and_prune(
    epochs: int, save: float, milestones: Sequence[int] = ()
) -> tuple[float, float]:
    """Find the settings of ``FinePruning.for_saving``, which has the same arguments.

    Returns:
        The start as a share of each window, for one window per interval, and ``prune``.
    """
    check_share("save", save, "(0, 1)")
    for twentieths in range(10, -1, -1):
        start = twentieths / 20
        pruned = Schedule.from_milestones(epochs, milestones, start=start).pruned_epochs()
        if pruned and save * epochs / pruned <= _MOST_SKIPPED:
            break
    prune = save * epochs / pruned if pruned else 1.0
    if prune >= 1:
        raise InputError(
            f"expected save below {pruned / epochs:.3g}, the share of the epochs that can skip "
            f"samples, got {save}"
        )
    return start, prune
