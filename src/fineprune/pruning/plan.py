"""EpochPlan: which samples one epoch trains on."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The decision for one epoch.

    Attributes:
        epoch: The epoch, counted from 0.
        kept: Indices of the samples to train on, sorted; int64, shape (number kept,), on the CPU.
        weights: A factor for the loss of each sample, float32, shape (N,), on the CPU; None if the
            policy does not weight the losses.
    """

    epoch: int
    kept: torch.Tensor
    weights: torch.Tensor | None = None
