"""EpochPlan: which samples one epoch trains on."""

import zlib
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from fineprune.errors import InputError, check_whole_number


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The decision for one epoch.

    Attributes:
        epoch: The epoch, counted from 0.
        kept: Indices of the samples to train on, ascending, at least one; int64, shape (number
            kept,), on the CPU.
        weights: The factor of the loss of each sample, finite, float32, shape (N,), on the CPU;
            None if the policy does not weight the losses.

    Raises:
        InputError: An attribute is not as described.
    """

    epoch: int
    kept: torch.Tensor
    weights: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_whole_number("epoch", self.epoch, 0)
        _check_vector("kept", self.kept, torch.int64)
        ascends = (self.kept[1:] > self.kept[:-1]).all()
        if not len(self.kept) or self.kept[0] < 0 or not ascends:
            raise InputError(
                f"expected kept to be one or more indices of at least 0, in ascending order "
                f"without repetitions, got {self.kept[:8].tolist()}: use torch.unique(kept)"
            )
        if self.weights is not None:
            _check_vector("weights", self.weights, torch.float32)
            if not self.weights.isfinite().all():
                raise InputError("expected finite weights, got some that are NaN or infinite")

    @classmethod
    def full(cls, epoch: int, num_samples: int) -> Self:
        """Return a plan that keeps all samples."""
        return cls(epoch, torch.from_numpy(np.arange(num_samples)))

    @property
    def number(self) -> int:
        """The number of kept samples."""
        return len(self.kept)

    @property
    def fingerprint(self) -> int:
        """A number that is equal for equal plans, and almost certainly not for others."""
        squares = int(torch.dot(self.kept, self.kept))
        return zlib.crc32(f"{self.epoch} {self.number} {squares}".encode())


def random_plan(epoch: int, number: int, num_samples: int, rng: np.random.Generator) -> EpochPlan:
    """Return a plan of ``number`` samples; every set of this size has the same probability."""
    kept = rng.choice(num_samples, size=number, replace=False, shuffle=False)
    kept.sort()
    return EpochPlan(epoch, torch.from_numpy(kept))


def check_plan(plan: object, epoch: int, number: int | None, num_samples: int) -> EpochPlan:
    """Return what ``Policy.select`` returned for an epoch of ``number`` samples (None if free).

    Raises:
        InputError: It is no plan for this epoch, this number, and N samples.
    """
    if not isinstance(plan, EpochPlan):
        raise InputError(f"expected select() to return an EpochPlan, got {type(plan).__name__}")
    if plan.epoch != epoch:
        raise InputError(f"expected a plan for epoch {epoch}, got one for epoch {plan.epoch}")
    if plan.kept[-1] >= num_samples:
        raise InputError(f"expected kept indices in 0..{num_samples - 1}, got {int(plan.kept[-1])}")
    if number is not None and plan.number != number:
        raise InputError(
            f"expected {number} kept samples, got {plan.number}: keep as many samples as the "
            f"argument number of select() says, which is rounded to whole batches"
        )
    if plan.weights is not None and len(plan.weights) != num_samples:
        raise InputError(
            f"expected one weight for each of {num_samples} samples, got {len(plan.weights)}"
        )
    return plan


def _check_vector(name: str, value: object, dtype: torch.dtype) -> None:
    if not isinstance(value, torch.Tensor):
        raise InputError(f"expected {name} as a tensor, got {type(value).__name__}")
    if value.ndim != 1 or value.dtype != dtype or value.device.type != "cpu":
        raise InputError(
            f"expected {name} as a tensor of {dtype} with one dimension on the CPU, got "
            f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
        )
