"""ScheduledPolicy: the common part of all policies that follow a ``Schedule``."""

from dataclasses import asdict, replace
from typing import Any, ClassVar, Unpack

from fineprune.errors import InputError
from fineprune.pruning.plan_options import Options
from fineprune.pruning.policies.policy import Policy, checked_prune, prune_count
from fineprune.pruning.schedule import Schedule


class ScheduledPolicy(Policy):
    """A policy that skips the same number of samples in each epoch that its schedule prunes.

    The arguments are those of ``RandomPruning``.

    Attributes:
        schedule: The schedule, including the windows that were opened while training.
        given_schedule: The schedule as it was given.
    """

    _setting_names: ClassVar[tuple[str, ...]] = ("prune",)

    def __init__(self, schedule: Schedule, prune: float, **options: Unpack[Options]) -> None:
        super().__init__(**options)
        if not isinstance(schedule, Schedule):
            raise InputError(f"expected a Schedule, got {type(schedule).__name__}")
        self.schedule = schedule
        self.given_schedule = schedule
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
        self.schedule = self.given_schedule

    def num_kept(self, epoch: int) -> int:
        """Return N, minus ``prune`` if the epoch prunes."""
        if not self.schedule.prunes(epoch):
            return self._num_samples
        return self._num_samples - prune_count(self.prune, self._num_samples)

    def open_window(self, epoch: int) -> None:
        """Make the end of ``epoch`` a boundary of the schedule."""
        self.schedule = self.schedule.open_window(epoch)

    def settings(self) -> dict[str, Any]:
        """Return the schedule as it was given and ``prune``, with which a state must agree."""
        return {**super().settings(), "schedule": asdict(self.given_schedule)}

    def state_dict(self) -> dict[str, Any]:
        """Return the windows, since some may have been opened while training."""
        windows = {key: getattr(self.schedule, key) for key in ("window", "start", "opened")}
        return {**super().state_dict(), **windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the windows."""
        super().load_state_dict(state)
        windows = {"window": state["window"], "start": state["start"]}
        self.schedule = replace(self.schedule, **windows, opened=tuple(state["opened"]))
