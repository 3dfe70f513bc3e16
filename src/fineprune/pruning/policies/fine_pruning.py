"""FinePruning: skip the samples whose loss most often exceeded the mean of their batch."""

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from fineprune.errors import InputError, check_share
from fineprune.labels.ranking import Ranking
from fineprune.pruning.dropping_count import (
    Counts,
    add_marks,
    counts_dtype,
    exceeds,
    keep_least_counted,
)
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.policies.policy import Losses, Marks, Means, Training
from fineprune.pruning.policies.scheduled import ScheduledPolicy
from fineprune.pruning.schedule import Schedule

# A schedule for a given saving skips at most this share of the samples per epoch, if possible.
_MOST_SKIPPED = 0.5


class FinePruning(ScheduledPolicy):
    """Data fine-pruning (Li, He, Ren and Mao, "Data Fine-pruning: A Simple Way to Accelerate Neural
    Network Training", NPC 2018; called the paper here).

    Args:
        schedule: The ``Schedule``, which says which epochs prune and when the counts are cleared.
        prune: How many samples a pruning epoch skips: a share in [0, 1), or a number below N.
        tolerance: A sample is marked if its loss exceeds the mean loss of its batch by more than
            ``tolerance * |mean|``.

    Raises:
        InputError: ``prune`` or ``tolerance`` is out of range.
    """

    name: ClassVar[str] = "fine-pruning"
    setting_names = ("prune", "tolerance")
    array_names = ("_counts",)
    needs_marks: bool = True

    def __init__(self, schedule: Schedule, prune: float, tolerance: float = 0.0) -> None:
        super().__init__(schedule, prune)
        if not math.isfinite(tolerance):
            raise InputError(f"expected tolerance to be a finite number, got {tolerance}")
        self.tolerance = float(tolerance)

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

        There is one window per interval between milestones. In each, pruning starts as late as
        possible, but early enough that no epoch skips more than half of the samples, unless
        ``save`` is larger.

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

    def begin(self, training: Training) -> None:
        """Begin with counts of 0: one byte per sample, if no window exceeds 255 epochs."""
        super().begin(training)
        dtype = counts_dtype(self.schedule.longest_window)
        self._counts: Counts = np.zeros(training.num_samples, dtype)

    def select(self, epoch: int, number: int | None, rng: np.random.Generator) -> EpochPlan:
        """Keep the ``number`` samples with the smallest counts; ties are broken at random."""
        assert number is not None
        kept = keep_least_counted(self._counts, number, rng)
        return EpochPlan(epoch, torch.from_numpy(kept))

    def exceeds(self, losses: Losses, means: Means) -> Marks:
        """Return which losses exceed the mean of their batch by more than the tolerance."""
        return exceeds(losses, means, self.tolerance)

    def learn(
        self, epoch: int, losses: Losses | None, above_mean: Marks | None, ranking: Ranking | None
    ) -> None:
        """Clear the counts if the epoch is a boundary, then add the marks of the epoch."""
        assert above_mean is not None
        if self.schedule.clears(epoch):
            self._counts[:] = 0
        add_marks(self._counts, above_mean)

    @property
    def counts(self) -> torch.Tensor:
        """DroppingCounts as of the last epoch that ended, shape (N,): uint8, int16 or int32."""
        return torch.from_numpy(self._counts.copy())


def start_and_prune(
    epochs: int, save: float, milestones: Sequence[int] = ()
) -> tuple[float, float]:
    """Return the start, as a share of each window, and ``prune`` of ``FinePruning.for_saving``."""
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
