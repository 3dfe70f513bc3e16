"""What the policies that follow a Schedule share: when they prune, and how many."""

from dataclasses import asdict, replace
from typing import Any

from fineprune.errors import InputError
from fineprune.pruning.policies.policy import Policy, checked_prune, prune_count
from fineprune.pruning.schedule import Schedule


class ScheduledPolicy(Policy):
    """A policy that skips the same number of samples in each epoch that its schedule prunes.

    Args:
        schedule: when to prune.
        prune: how many samples to skip: a share in [0, 1), or a whole number below N.

    Raises:
        InputError: ``prune`` is neither.
    """

    def __init__(self, schedule: Schedule, prune: float) -> None:
        if not isinstance(schedule, Schedule):
            raise InputError(f"expected a Schedule, got {type(schedule).__name__}")
        self.schedule = schedule
        self.given_schedule = schedule  # as it was before any window was opened
        self.prune = checked_prune(prune)
        self._num_samples = 0

    @property
    def epochs(self) -> int:
        """Length of the training, in epochs."""
        return self.schedule.epochs

    def bind(self, num_samples: int) -> None:
        """Learn the number of samples; InputError if ``prune`` would leave none."""
        prune_count(self.prune, num_samples)
        self._num_samples = num_samples

    def num_kept(self, epoch: int) -> int:
        """Return N, less ``prune`` in an epoch that prunes."""
        if not self.schedule.prunes(epoch):
            return self._num_samples
        return self._num_samples - prune_count(self.prune, self._num_samples)

    def open_window(self, epoch: int) -> None:
        """Make the end of ``epoch`` a boundary of the schedule."""
        self.schedule = self.schedule.open_window(epoch)

    def settings(self) -> dict[str, Any]:
        """Return the schedule as it was given and the share, which a state must agree with."""
        schedule = {key: _listed(value) for key, value in asdict(self.given_schedule).items()}
        return {"policy": self.name, "prune": self.prune, "schedule": schedule}

    def state_dict(self) -> dict[str, Any]:
        """Return the windows, which may have been opened while training."""
        windows = {key: getattr(self.schedule, key) for key in ("window", "start", "opened")}
        return {key: _listed(value) for key, value in windows.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the windows."""
        window, start, opened = (
            tuple(value) if isinstance(value, list) else value
            for value in (state["window"], state["start"], state["opened"])
        )
        self.schedule = replace(self.schedule, window=window, start=start, opened=opened)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
