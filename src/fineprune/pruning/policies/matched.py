"""Matched: as many samples per epoch as another run trained, chosen at random."""

import math
from collections.abc import Sequence
from typing import ClassVar, Unpack

import numpy as np
import torch

from fineprune.errors import InputError, check_whole_number
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.plan_options import Options
from fineprune.pruning.policies.policy import Policy


class Matched(Policy):
    """Keep a given number of random samples per epoch, with a given weight.

    This control shows whether a method's choice of samples matters: it has the method's number of
    samples and mean weight in every epoch, but ignores the losses. The numbers are not rounded to
    whole batches, because those of a method that depends on data are not either.

    Args:
        epochs: Number of training epochs.
        numbers: The number of samples that each epoch keeps: ``epochs`` whole numbers of at least
            1.
        mean_weights: The weight of every kept sample in each epoch: ``epochs`` finite numbers. The
            default is 1 in every epoch.
        options: The options of every policy; see ``PlanOptions``.
    """

    name: ClassVar[str] = "matched"
    _setting_names = ("numbers", "mean_weights")

    def __init__(
        self,
        epochs: float,
        numbers: Sequence[int],
        mean_weights: Sequence[float] | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(epochs, **options)
        epochs = self.epochs
        weights = [1.0] * epochs if mean_weights is None else mean_weights
        for name, values in (("numbers", numbers), ("mean_weights", weights)):
            if len(values) != epochs:
                raise InputError(
                    f"expected {name} with one value for each of {epochs} epochs, got {len(values)}"
                )
        for number in numbers:
            check_whole_number("each of numbers", number, 1)
        wrong = [weight for weight in weights if not math.isfinite(weight)]
        if wrong:
            raise InputError(f"expected finite mean_weights, got {wrong[0]}")
        self.numbers = tuple(numbers)
        self.mean_weights = tuple(float(weight) for weight in weights)

    def bind(self, num_samples: int) -> None:
        """Receive the number of samples."""
        if max(self.numbers) > num_samples:
            raise InputError(
                f"expected numbers of at most {num_samples}, the number of samples, got "
                f"{max(self.numbers)}"
            )
        super().bind(num_samples)

    def num_kept(self, epoch: int) -> int | None:
        """Return None, because any other result would be rounded up to whole batches."""
        return None

    def select(self, epoch: int, num_kept: int | None, rng: np.random.Generator) -> EpochPlan:
        """Keep the epoch's number of samples; every set of this size has the same probability."""
        number, weight = self.numbers[epoch], self.mean_weights[epoch]
        kept = rng.choice(self._num_samples, size=number, replace=False, shuffle=False)
        kept.sort()
        weights = None
        if weight != 1:
            weights = torch.from_numpy(np.full(self._num_samples, weight, np.float32))
        return EpochPlan(epoch, torch.from_numpy(kept), weights)
