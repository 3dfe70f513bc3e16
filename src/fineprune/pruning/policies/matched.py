"""Matched: as many samples per epoch as another run trained, chosen at random."""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from fineprune.errors import InputError, check_whole_number
from fineprune.pruning.plan import EpochPlan, random_plan
from fineprune.pruning.policies.policy import Policy, Training


class Matched(Policy):
    """Keep a given number of random samples per epoch, with a given weight.

    This control shows whether a method's choice of samples matters: it has the method's number of
    samples and mean weight in every epoch, whatever the losses. The numbers are not rounded to
    whole batches.

    Args:
        epochs: Number of training epochs.
        numbers: How many samples each epoch keeps: ``epochs`` whole numbers of at least 1.
        mean_weights: The weight of every kept sample in each epoch: ``epochs`` finite numbers, by
            default 1.

    Raises:
        InputError: A value is out of range.
    """

    name: ClassVar[str] = "matched"
    setting_names = ("epochs", "numbers", "mean_weights")

    def __init__(
        self, epochs: float, numbers: Sequence[int], mean_weights: Sequence[float] | None = None
    ) -> None:
        super().__init__(epochs)
        weights = [1.0] * self.epochs if mean_weights is None else mean_weights
        for name, values in (("numbers", numbers), ("mean_weights", weights)):
            if len(values) != self.epochs:
                raise InputError(
                    f"expected {name} with one value for each of {self.epochs} epochs, got "
                    f"{len(values)}"
                )
        for number in numbers:
            check_whole_number("each of numbers", number, 1)
        wrong = [weight for weight in weights if not math.isfinite(weight)]
        if wrong:
            raise InputError(f"expected finite mean_weights, got {wrong[0]}")
        self.numbers = tuple(numbers)
        self.mean_weights = tuple(float(weight) for weight in weights)

    def begin(self, training: Training) -> None:
        """Receive the number of samples; raise InputError if an epoch would keep more."""
        super().begin(training)
        if max(self.numbers) > self._num_samples:
            raise InputError(
                f"expected numbers of at most {self._num_samples}, the number of samples, got "
                f"{max(self.numbers)}"
            )

    def select(self, epoch: int, number: int | None, rng: np.random.Generator) -> EpochPlan:
        """Keep the epoch's number of samples; every set of this size has the same probability."""
        plan = random_plan(epoch, self.numbers[epoch], self._num_samples, rng)
        weight = self.mean_weights[epoch]
        if weight == 1:
            return plan
        weights = np.full(self._num_samples, weight, np.float32)
        return dataclasses.replace(plan, weights=torch.from_numpy(weights))
