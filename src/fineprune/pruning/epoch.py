"""Epoch: the one epoch that a pruner has in progress."""

from dataclasses import dataclass

from fineprune.pruning.plan import EpochPlan


@dataclass
class Epoch:
    """An epoch, and how much of it was recorded.

    Attributes:
        plan: The samples that the epoch trains on.
        planned: The number of samples of all ranks, padding included, with which it is complete.
        batches: Number of batches that each rank recorded.
        done: How far the epoch got in its order, in samples of all ranks: with a known batch size,
            the samples of whole batches, also if some were left out of them; otherwise, the samples
            that were recorded. It may exceed ``planned``.
        restored: Whether it comes from a loaded state.
        recording: Whether this process has recorded a batch of it.
        ended: Whether the policy has learned from it. It takes no more batches.
    """

    plan: EpochPlan
    planned: int
    batches: int = 0
    done: int = 0
    restored: bool = False
    recording: bool = False
    ended: bool = False

    @property
    def number(self) -> int:
        """The number of the epoch, counted from 0."""
        return self.plan.epoch

    @property
    def unfinished(self) -> bool:
        """Whether batches of it were recorded, and the policy has not learned from them."""
        return self.batches > 0 and not self.ended

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
