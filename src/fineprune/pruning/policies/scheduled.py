"""ScheduledPolicy: the common part of all policies that follow a ``Schedule``."""

from dataclasses import asdict
from typing import Any, ClassVar, Unpack

from fineprune.errors import InputError
from fineprune.pruning.plan_options import Options
from fineprune.pruning.policies.policy import Policy, checked_prune, prune_count
from fineprune.pruning.schedule import Schedule


class ScheduledPolicy(Policy):
    """A policy that skips the same number of samples in each epoch that its schedule prunes.

    The arguments are those of ``RandomPruning``.
    """

    _setting_names: ClassVar[tuple[str, ...]] = ("prune",)

    def __init__(self, schedule: Schedule, prune: float, **options: Unpack[Options]) -> None:
        super().__init__(**options)
        if not isinstance(schedule, Schedule):
            raise InputError(f"expected a Schedule, got {type(schedule).__name__}")
        self.schedule = schedule
        self.prune = checked_prune(prune)

    @property
    def epochs(self) -> int:
        """Number of training epochs."""
        return self.schedule.epochs

    def bind(self, num_samples: int) -> None:
        """Receive the number of samples.

        Raises:
            InputError: ``prune`` would leave no sample.
        """
        super().bind(num_samples)
        prune_count(self.prune, num_samples)

    def num_kept(self, epoch: int) -> int:
        """Return N, minus ``prune`` if the epoch prunes."""
        if not self.schedule.prunes(epoch):
            return self._num_samples
        return self._num_samples - prune_count(self.prune, self._num_samples)

    def settings(self) -> dict[str, Any]:
        """Return the schedule and ``prune``, with which a state must agree."""
        return {**super().settings(), "schedule": asdict(self.schedule)}
