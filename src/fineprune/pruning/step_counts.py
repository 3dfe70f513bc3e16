"""How many samples an epoch keeps after rounding to whole batches, and how many steps it takes.

The numbers depend on the epoch only, so that learning rates and step counts can be planned before
the training, and all ranks get the same results.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError, check_whole_number, shown, warn_user
from fineprune.pruning.policies.policy import Policy, Training
from fineprune.pruning.sampler import samples_per_rank

# Rounding warns if it costs at least this share of the saving.
_WORTH_A_WARNING = 0.1


@dataclass(frozen=True)
class BatchShape:
    """How samples are grouped into batches and optimizer steps.

    Attributes:
        batch_size: Number of samples per batch and rank; None if it is not known.
        accumulation: Number of batches per optimizer step.
        num_replicas: Number of ranks that share the samples of an epoch.
        drop_last: Whether an incomplete last batch is dropped.
    """

    batch_size: int | None = None
    accumulation: int = 1
    num_replicas: int = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulation", "num_replicas"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check_whole_number(name, value, 1))
        if self.accumulation > 1 and self.batch_size is None:
            raise InputError(f"expected batch_size with accumulation={self.accumulation}, got None")

    @property
    def samples_per_batch(self) -> int | None:
        """Number of samples in one batch of each rank; None if it is not known."""
        return None if self.batch_size is None else self.batch_size * self.num_replicas

    @property
    def multiple(self) -> int:
        """Number of samples per optimizer step of all ranks.

        If the batch size is not known, it is the number of ranks.
        """
        return (self.samples_per_batch or self.num_replicas) * self.accumulation

    def batches_of(self, kept: int) -> int:
        """Return the number of batches per rank of an epoch that keeps ``kept`` samples."""
        if self.batch_size is None:
            raise InputError("expected Pruner(..., batch_size=...) to count steps, got None")
        own = samples_per_rank(kept, self.num_replicas, self.drop_last)
        return own // self.batch_size if self.drop_last else -(-own // self.batch_size)

    def steps_of(self, kept: int) -> int:
        """Return the number of optimizer steps of an epoch that keeps ``kept`` samples."""
        return math.ceil(self.batches_of(kept) / self.accumulation)


class StepCounts:
    """The numbers of samples and steps of the epochs of a policy, which begins here.

    Args:
        policy: The policy.
        num_samples: Number of samples N in the data set.
        shape: How samples are grouped into batches and optimizer steps.
        seed: The seed of the run.
        labels: The label of each sample; see ``Training``.

    Raises:
        InputError: The policy cannot work with this size, or names impossible lengths.
    """

    def __init__(
        self,
        policy: Policy,
        num_samples: int,
        shape: BatchShape,
        seed: int = 0,
        labels: npt.NDArray[np.integer] | None = None,
    ) -> None:
        self.policy = policy
        self.num_samples = num_samples
        self.shape = shape
        known = replace(shape, batch_size=shape.batch_size or 1)
        full = known.steps_of(num_samples)
        policy.begin(Training(num_samples, known.multiple, full, seed, labels))
        wanted = policy.lengths()
        self._wanted = None if wanted is None else _checked(wanted, policy, num_samples)

    def num_kept(self, epoch: int) -> int | None:
        """Return how many samples an epoch keeps, rounded up to whole steps if it skips any.

        Rounded epochs have no padding, no incomplete batches and no incomplete accumulation. None
        if the number depends on data.
        """
        if self._wanted is None or self._wanted[epoch] == self.num_samples:
            return None if self._wanted is None else self.num_samples
        return min(self._rounded_up(self._wanted[epoch]), self.num_samples)

    def total_steps(self) -> int:
        """Return the number of optimizer steps of all epochs ([P] formula 5, fewer batches)."""
        self.shape.batches_of(self.num_samples)  # This needs the batch size.
        total = self.known_steps()
        if total is None:
            raise InputError(
                f"expected a policy whose epochs have lengths known in advance, got "
                f"{self.policy.name!r}: compute the learning rate from the progress in epochs "
                f"instead"
            )
        return total

    def known_steps(self) -> int | None:
        """Return ``total_steps``; None if they depend on data, or there is no batch size."""
        if self.shape.batch_size is None:
            return None
        if self.policy.total_steps is not None:
            return self.policy.total_steps
        return self._sum(self.policy.epochs, self.shape.steps_of)

    def steps_before(self, epoch: int) -> int | None:
        """Return the number of optimizer steps of all epochs before one; None if unknown."""
        own = self.policy.steps_before(epoch)
        return self._sum(epoch, self.shape.steps_of) if own is None else own

    def predicted_saving(self) -> float | None:
        """Return the share of the steps that a training saves; None if it depends on data.

        Without a batch size, it is the share of the sample-steps.
        """
        if self.shape.batch_size is None:
            full = self.policy.epochs * self.num_samples
            total = self._sum(self.policy.epochs, int)
        else:
            full = self.policy.epochs * self.shape.steps_of(self.num_samples)
            total = self.known_steps()
        return (full - total) / full if total is not None and full else None

    def check_rounding(self) -> None:
        """Warn the user if nothing is skipped, or rounding loses a tenth of the saving or more."""
        policy, total = self.policy, self.num_samples
        wanted = set(self._wanted or ())
        scheduled = hasattr(policy, "schedule") and getattr(policy, "prune", 0) > 0
        # With one epoch, it is clear that nothing is skipped.
        if wanted == {total} and scheduled and policy.epochs > 1:
            warn_user(
                f"policy {policy.name!r} skips no sample in any of its {policy.epochs} epochs: "
                f"give a schedule that prunes some of them, and a prune of at least one sample",
                UserWarning,
            )
        for keep in wanted - {total}:
            skip = total - keep
            left = total - self._rounded_up(keep)
            if left > (1 - _WORTH_A_WARNING) * skip:
                continue
            cost = (
                f"the policy skips {skip} of {total} samples, but only {max(left, 0)} after "
                f"rounding to whole steps of {self.shape.multiple} samples (batch x ranks x "
                f"accumulation)"
            )
            if left <= 0:
                raise InputError(
                    f"{cost}: expected a larger prune or save, or a smaller batch_size"
                )
            warn_user(f"{cost}: a tenth of the saving or more is lost", UserWarning)

    def _sum(self, epochs: int, cost: Callable[[int], int]) -> int | None:
        """Return what the first epochs cost by their numbers of samples; None if unknown."""
        total = 0
        for epoch in range(epochs):
            kept = self.num_kept(epoch)
            if kept is None:
                return None
            total += cost(kept)
        return total

    def _rounded_up(self, number: int) -> int:
        return -(-number // self.shape.multiple) * self.shape.multiple


def _checked(wanted: object, policy: Policy, num_samples: int) -> list[int]:
    """Return the lengths that a policy wants, each from 1 to N."""
    if not isinstance(wanted, Sequence) or len(wanted) != policy.epochs:
        raise InputError(
            f"expected lengths() of policy {policy.name!r} to be {policy.epochs} numbers of "
            f"samples or None, got {shown(repr(wanted))}"
        )
    for epoch, number in enumerate(wanted):
        whole = isinstance(number, Integral) and not isinstance(number, bool)
        if not whole or not 1 <= number <= num_samples:
            raise InputError(
                f"expected lengths() of policy {policy.name!r} to be whole numbers from 1 to "
                f"{num_samples}, got {number!r} for epoch {epoch}"
            )
    return [int(number) for number in wanted]
