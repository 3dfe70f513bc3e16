"""FullData: skip nothing. The baseline, bit for bit a plain loop."""

from typing import ClassVar

import numpy as np

from fineprune.errors import InputError
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.policies.policy import Policy


class FullData(Policy):
    """Train every epoch on all samples.

    Args:
        epochs: length of the training, in epochs.

    Raises:
        InputError: ``epochs`` is not a whole number of at least 1.
    """

    name: ClassVar[str] = "full"

    def __init__(self, epochs: int) -> None:
        if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1:
            raise InputError(f"expected epochs to be a whole number of at least 1, got {epochs!r}")
        self._epochs = epochs
        self._num_samples = 0

    @property
    def epochs(self) -> int:
        """Length of the training, in epochs."""
        return self._epochs

    def bind(self, num_samples: int) -> None:
        """Learn the number of samples."""
        self._num_samples = num_samples

    def num_kept(self, epoch: int) -> int:
        """Return all samples, whatever the epoch."""
        return self._num_samples

    def select(self, epoch: int, num_kept: int | None, rng: np.random.Generator) -> EpochPlan:
        """Raise: an epoch that skips nothing needs no choice."""
        raise InputError("expected no selection: the full policy skips nothing")
