"""ScheduledPolicy: the common part of the policies that follow a ``Schedule``."""

from dataclasses import asdict
from typing import Any, ClassVar

from fineprune.errors import InputError
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
        """Receive the size of the training.

        Raises:
            InputError: ``prune`` would leave no sample.
        """
        super().begin(training)
        prune_count(self.prune, training.num_samples)

    def lengths(self) -> list[int]:
        """Return N for each epoch, minus ``prune`` if it prunes."""
        kept = self._num_samples - prune_count(self.prune, self._num_samples)
        return [
            kept if self.schedule.prunes(epoch) else self._num_samples
            for epoch in range(self.epochs)
        ]

    def settings(self) -> dict[str, Any]:
        """Return the schedule and ``prune``, with which a state must agree."""
        return {**super().settings(), "schedule": asdict(self.schedule)}
