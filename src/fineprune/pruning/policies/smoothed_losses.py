"""SmoothedLosses: a moving average of each sample's loss, by which wrong labels are found."""

import numpy as np
import torch

from fineprune.pruning.policies.policy import LossRecords
from fineprune.pruning.replicas import Replicas

# The weight of an epoch's loss in the average. On CIFAR-10 with wrong labels, 0.1 to 0.5 find
# nearly the same samples; a small weight needs more epochs until the first losses are forgotten.
_WEIGHT = 0.2

_LARGEST = float(torch.finfo(torch.float16).max)


class SmoothedLosses:
    """The exponential moving average of each sample's loss, over the epochs that trained it.

    It takes four bytes per sample: the average, and the loss of the epoch in progress.

    Args:
        num_samples: Number of samples N in the data set.
    """

    def __init__(self, num_samples: int) -> None:
        self._averages = torch.full((num_samples,), torch.nan, dtype=torch.float16)
        self._latest = self._none(num_samples)

    def observe(self, records: LossRecords) -> None:
        """Remember the finite losses. If a sample is trained twice in an epoch, the last counts."""
        finite = np.isfinite(records.losses)
        losses = torch.from_numpy(records.losses[finite]).clamp(-_LARGEST, _LARGEST)
        self._latest[torch.from_numpy(records.index[finite])] = losses.half()

    def merge(self, replicas: Replicas) -> None:
        """Take the losses of all ranks, of which only one trains a sample per epoch."""
        if replicas.size > 1:
            self._latest = torch.from_numpy(replicas.maximum(self._latest.numpy()))

    def end_epoch(self) -> None:
        """Add the losses of the epoch to the averages."""
        before = torch.where(self._averages.isnan(), self._latest, self._averages)
        trained = self._latest > -torch.inf
        self._averages = torch.where(
            trained, torch.lerp(before, self._latest, _WEIGHT), self._averages
        )
        self._latest = self._none(len(self._averages))

    def values(self) -> torch.Tensor:
        """Return the averages, float32, shape (N,); NaN for a sample without a finite loss."""
        return self._averages.float()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the averages and the losses of the epoch in progress, float16, shape (N,)."""
        return {"averages": self._averages.clone(), "latest": self._latest.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from a state."""
        self._averages = state["averages"].clone()
        self._latest = state["latest"].clone()

    @staticmethod
    def _none(num_samples: int) -> torch.Tensor:
        return torch.full((num_samples,), -torch.inf, dtype=torch.float16)
