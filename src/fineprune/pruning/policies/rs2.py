"""RS2: train a fresh random subset in every epoch."""

from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import check_flag
from fineprune.pruning.plan import EpochPlan, random_plan
from fineprune.pruning.policies.even_lengths import checked_save
from fineprune.pruning.policies.policy import Policy, Training, prune_count
from fineprune.pruning.random_streams import stream


class RS2(Policy):
    """Repeated sampling of random subsets (Okanovic et al., "Repeated Random Sampling for
    Minimizing the Time-to-Accuracy of Learning", ICLR 2024).

    Without replacement, each epoch takes the next part of a random order of all samples, and a new
    order begins when it is used up, so all samples are chosen before any is chosen again. No epoch
    has a sample twice, not even one that spans two orders.

    Args:
        epochs: Number of training epochs.
        save: The share of the samples, in (0, 1), that every epoch skips. The number of kept ones
            is rounded up to whole optimizer steps.
        replacement: Whether the subsets of different epochs are independent of each other.

    Raises:
        InputError: A value is out of range.
    """

    name: ClassVar[str] = "rs2"
    setting_names = ("epochs", "save", "replacement")

    def __init__(self, epochs: float, save: float = 0.35, *, replacement: bool = False) -> None:
        super().__init__(epochs)
        self.save = checked_save(save, range(self.epochs), self.epochs)
        self.replacement = check_flag("replacement", replacement)

    def begin(self, training: Training) -> None:
        """Receive the number of samples, and the seed from which the orders are derived."""
        super().begin(training)
        # The current round and its order. It is made again if it is missing.
        self._round = -1
        self._order: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def lengths(self) -> list[int]:
        """Return the number of samples of a subset, for each epoch."""
        kept = self._num_samples - prune_count(self.save, self._num_samples)
        return [kept] * self.epochs

    def select(self, epoch: int, number: int | None, rng: np.random.Generator) -> EpochPlan:
        """Return the next ``number`` samples of the random order."""
        assert number is not None
        if self.replacement:
            return random_plan(epoch, number, self._num_samples, rng)
        which, start = divmod(epoch * number, self._num_samples)
        kept = self._order_of_round(which, number)[start : start + number]
        missing = number - len(kept)
        if missing:
            following = self._order_of_round(which + 1, number)[:missing]
            kept = np.concatenate([kept, following])
        return EpochPlan(epoch, torch.from_numpy(np.sort(kept)))

    def _order_of_round(self, number: int, per_epoch: int) -> npt.NDArray[np.int64]:
        """Return the order of a round, in which each epoch takes ``per_epoch`` samples.

        An order depends on the end of the one before it, so all earlier ones are made once.
        """
        if self._round < 0 or number < self._round:
            self._round, self._order = 0, self._fresh_order(0)
        while self._round < number:
            self._round += 1
            # What the epoch in which the round begins still needs from it.
            missing = -self._round * self._num_samples % per_epoch
            end = self._order[self._num_samples - (per_epoch - missing) % per_epoch :]
            self._order = without_repeats(self._fresh_order(self._round), end, missing)
        return self._order

    def _fresh_order(self, number: int) -> npt.NDArray[np.int64]:
        return stream(self._seed, number, "rs2").permutation(self._num_samples)


def without_repeats(
    order: npt.NDArray[np.int64], taken: npt.NDArray[np.int64], number: int
) -> npt.NDArray[np.int64]:
    """Move samples of an order that were taken behind the first ``number`` that were not."""
    free = np.flatnonzero(~np.isin(order, taken, assume_unique=True))[:number]
    return np.concatenate([order[free], np.delete(order, free)])
