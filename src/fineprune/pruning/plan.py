"""EpochPlan: which samples one epoch trains on. The decision, frozen."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """What one epoch trains on.

    Attributes:
        epoch: the epoch, counted from 0.
        kept: indices of the samples to train on, sorted; int64, shape (number kept,), on the CPU.
        weights: a factor for each sample's loss, float32, shape (N,), where the policy rescales;
            None where it does not.
    """

    epoch: int
    kept: torch.Tensor
    weights: torch.Tensor | None = None
