"""FullData: train every epoch on all samples, bit for bit as a plain loop does; the baseline."""

from typing import ClassVar, Unpack

import numpy as np

from fineprune.errors import InputError
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.plan_options import Options
from fineprune.pruning.policies.policy import Policy


class FullData(Policy):
    """Train every epoch on all samples.

    Args:
        epochs: Number of training epochs.
        options: The options of every policy (``PlanOptions``), which have no effect here.

    Raises:
        InputError: ``epochs`` is not a whole number of at least 1, or an option is out of range.
    """

    name: ClassVar[str] = "full"

    def __init__(self, epochs: float, **options: Unpack[Options]) -> None:
        super().__init__(epochs, **options)

    def num_kept(self, epoch: int) -> int:
        """Return the number of all samples."""
        return self._num_samples

    def select(self, epoch: int, num_kept: int | None, rng: np.random.Generator) -> EpochPlan:
        """Raise an error, because an epoch that skips nothing needs no selection."""
        raise InputError("expected no selection: the full policy skips nothing")
