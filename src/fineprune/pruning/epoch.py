"""Epoch: one epoch of a training, how far it got, and which samples it may still record."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.rescaling import Rescaling


@dataclass(frozen=True)
class Position:
    """Where one rank is in its training.

    Attributes:
        epoch: The epoch in progress, counted from 0, or the next one if it has ended; the number of
            epochs after the last one.
        batches: Number of batches of this epoch that this rank has recorded.
        samples: Number of samples of this rank's order that these batches cover.
    """

    epoch: int
    batches: int
    samples: int


@dataclass(eq=False)
class Epoch:
    """An epoch, and how much of it was recorded.

    Attributes:
        plan: The samples that the epoch trains on.
        planned: The number of samples of all ranks, padding included, with which it is complete.
        batches: Number of batches that each rank recorded.
        done: How far the epoch got in its order, in samples of all ranks; may exceed ``planned``.
            With a known batch size, batches count as whole, also if samples were left out of them.
        reads: How often the sampler was asked for its samples.
        left: The samples that may still be recorded, bool, shape (N,); None until the first batch.
        once: Whether a sample may be recorded only once.
        rescaling: Applies the weights of the plan, if it has any.
    """

    plan: EpochPlan
    planned: int
    batches: int = 0
    done: int = 0
    reads: int = 0
    left: npt.NDArray[np.bool_] | None = None
    once: bool = False
    rescaling: Rescaling | None = field(init=False)

    def __post_init__(self) -> None:
        weights = self.plan.weights
        self.rescaling = None if weights is None else Rescaling(weights)

    @property
    def number(self) -> int:
        """The number of the epoch, counted from 0."""
        return self.plan.epoch

    @property
    def complete(self) -> bool:
        """Whether nothing is left to train of it."""
        return self.done >= self.planned

    @property
    def trained(self) -> int:
        """The number of its samples that were trained; all of them if none was recorded."""
        if not self.batches or self.complete:
            return self.plan.number
        return round(self.plan.number * self.done / self.planned)

    def expect(
        self, num_samples: int, any_sample: bool, before: npt.NDArray[np.int64] | None
    ) -> None:
        """Begin to check indices: of the plan, or any sample out of N.

        ``before`` are the samples that a resumed epoch has recorded already, int64, shape (n,);
        None if a sample may be recorded more than once, such as padding.
        """
        left = np.full(num_samples, any_sample or self.plan.number == num_samples)
        left[self.plan.kept.numpy()] = True
        self.once = before is not None
        if before is not None:
            left[before] = False
        self.left = left

    def check(self, index: npt.NDArray[np.integer]) -> None:
        """Check the indices of a batch, shape (B,), at least one.

        Raises:
            InputError: One is out of range, is not in the plan, or was recorded before.
        """
        assert self.left is not None
        try:
            allowed = self.left.take(index)
        except IndexError:
            allowed = np.zeros(len(index), dtype=np.bool_)
        # Of negative ones, ``take`` reads from the end.
        if np.count_nonzero(allowed) < len(index) or np.minimum.reduce(index) < 0:
            raise self._refusal(index, len(self.left), index[~allowed][:1])

    def _refusal(
        self, index: npt.NDArray[np.integer], num_samples: int, sample: npt.NDArray[np.integer]
    ) -> InputError:
        if index.min() < 0 or index.max() >= num_samples:
            return InputError(
                f"expected indices in 0..{num_samples - 1}, got {index.min()}..{index.max()}"
            )
        if sample[0] not in self.plan.kept.numpy():
            return InputError(
                f"expected samples that epoch {self.number} trains, got sample {sample[0]}, which "
                f"it skips: train with pruner.loader(), or give your loader sampler=pruner.sampler "
                f"and begin it anew in each epoch, and give record the indices that it yields, not "
                f"numbers within the batch"
            )
        return InputError(
            f"expected each sample once in epoch {self.number}, got sample {sample[0]} twice: give "
            f"record the indices that the loader yields, not numbers within the batch, and one "
            f"loss per sample, such as the mean of two views"
        )
