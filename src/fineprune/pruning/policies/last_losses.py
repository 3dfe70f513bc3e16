"""LastLosses: the common part of the policies that remember the last loss of each sample."""

from typing import ClassVar, Unpack

import numpy as np
import numpy.typing as npt
import torch

from fineprune.pruning.plan_options import Options
from fineprune.pruning.policies.policy import LossRecords, Policy


class LastLosses(Policy):
    """A policy that remembers one float32 per sample: its last loss.

    The losses are replaced during the epoch. This is safe because the pruner keeps the plan of the
    epoch in progress.

    Attributes:
        losses: The last loss of each sample, NaN for a sample without a finite one; float32, shape
            (N,).
    """

    _array_names: ClassVar[tuple[str, ...]] = ("losses",)
    needs_losses: bool = True

    def __init__(self, epochs: float, **options: Unpack[Options]) -> None:
        super().__init__(epochs, **options)
        self.losses: npt.NDArray[np.float32] = np.zeros(0, dtype=np.float32)

    def bind(self, num_samples: int) -> None:
        """Allocate the losses."""
        super().bind(num_samples)
        self.losses = np.full(num_samples, np.nan, dtype=np.float32)

    def num_kept(self, epoch: int) -> int | None:
        """Return None, because the number depends on the losses."""
        return None

    def observe(self, epoch: int, records: LossRecords) -> None:
        """Remember the last loss of each trained sample."""
        losses = records.losses
        self.losses[records.index] = np.where(np.isfinite(losses), losses, np.float32(np.nan))

    def suspicion(self) -> torch.Tensor:
        """Return the last loss of each sample, float32, shape (N,), a copy; NaN if unknown."""
        return torch.from_numpy(self.losses.copy())
