"""Policies that follow a ``Schedule``: their common part, and the random control."""

from dataclasses import asdict
from typing import Any, ClassVar

import numpy as np

from fineprune.errors import InputError
from fineprune.pruning.plan import EpochPlan, random_plan
from fineprune.pruning.policies.policy import Policy, Training, checked_prune, prune_count
from fineprune.pruning.schedule import Schedule


class ScheduledPolicy(Policy):
    """A policy that skips the same number of samples in each epoch that its schedule prunes.

    The arguments are those of ``RandomPruning``.
    """

    setting_names: ClassVar[tuple[str, ...]] = ("prune",)

    def __init__(self, schedule: Schedule, prune: float) -> None:
        if not isinstance(schedule, Schedule):
            raise InputError(f"expected a Schedule, got {type(schedule).__name__}")
        super().__init__(schedule.epochs)
        self.schedule = schedule
        self.prune = checked_prune(prune)

    def begin(self, training: Training) -> None:
        """Receive the size of the training; raise InputError if ``prune`` leaves no sample."""
        super().begin(training)
        self._kept = training.num_samples - prune_count(self.prune, training.num_samples)

    def lengths(self) -> list[int]:
        """Return N for each epoch, minus ``prune`` if it prunes."""
        prunes = map(self.schedule.prunes, range(self.epochs))
        return [self._kept if pruned else self._num_samples for pruned in prunes]

    def settings(self) -> dict[str, Any]:
        """Return the schedule and ``prune``, with which a state must agree."""
        return {**super().settings(), "schedule": asdict(self.schedule)}


class RandomPruning(ScheduledPolicy):
    """Skip a new random set of samples in each epoch that the schedule prunes.

    It is the control for fine-pruning: it skips equally many samples in the same epochs, whatever
    their losses.

    Args:
        schedule: The ``Schedule``, which says which epochs prune.
        prune: How many samples a pruning epoch skips: a share in [0, 1), or a number below N.

    Raises:
        InputError: ``prune`` is out of range.
    """

    name: ClassVar[str] = "random"

    def select(self, epoch: int, number: int | None, rng: np.random.Generator) -> EpochPlan:
        """Keep ``number`` samples; every set of this size has the same probability."""
        assert number is not None
        return random_plan(epoch, number, self._num_samples, rng)
