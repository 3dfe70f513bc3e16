"""EpochLosses: the loss of each sample in the epoch in progress, and its moving average."""

import numpy as np
import torch

from fineprune.pruning.policies.policy import LossRecords
from fineprune.pruning.replicas import Replicas

# The weight of an epoch's loss in the average. On CIFAR-10 with wrong labels, 0.1 to 0.5 find
# nearly the same samples; a small weight needs more epochs until the first losses are forgotten.
_WEIGHT = 0.2

_NOT_FINITE = torch.finfo(torch.float32).max


class EpochLosses:
    """The loss of each sample in the epoch in progress, and its average over earlier epochs.

    This takes eight bytes per sample. If a sample is trained twice in an epoch, its smaller loss
    counts.

    Attributes:
        values: The losses of the epoch in progress, float32, shape (N,); infinity for a sample that
            was not trained, and the largest finite number for a loss that was not finite.
        averages: The exponential moving average of each sample's finite losses, float32, shape
            (N,); NaN for a sample without one.
    """

    def __init__(self, num_samples: int) -> None:
        self.values = torch.from_numpy(np.full(num_samples, np.inf, np.float32))
        self.averages = torch.from_numpy(np.full(num_samples, np.nan, np.float32))

    def observe(self, records: LossRecords) -> None:
        """Take losses of the epoch in progress."""
        losses = torch.from_numpy(records.losses)
        losses = losses.nan_to_num(nan=_NOT_FINITE, posinf=_NOT_FINITE, neginf=_NOT_FINITE)
        self.values.scatter_reduce_(0, torch.from_numpy(records.index), losses, "amin")

    def merge(self, replicas: Replicas) -> None:
        """Take the losses of all ranks."""
        if replicas.size > 1:
            self.values = -torch.from_numpy(replicas.maximum((-self.values).numpy()))

    def mean(self, most: float) -> float:
        """Return the mean loss of the epoch in progress; NaN if no sample was trained."""
        trained = self.values[self.values < torch.inf]
        return float(trained.clamp(max=most).double().mean())

    def end_epoch(self) -> None:
        """Add the losses of the epoch to the averages, and forget them."""
        known = self.values < _NOT_FINITE
        before = torch.where(self.averages.isnan(), self.values, self.averages)
        self.averages = torch.where(known, before.lerp(self.values, _WEIGHT), self.averages)
        self.values.fill_(torch.inf)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the losses of the epoch in progress and the averages."""
        return {"values": self.values.clone(), "averages": self.averages.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from a state."""
        self.values = state["values"].clone()
        self.averages = state["averages"].to(torch.float32, copy=True)
