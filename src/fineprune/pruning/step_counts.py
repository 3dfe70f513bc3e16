"""How many samples an epoch keeps after rounding to whole batches, and how many steps it takes.

The numbers depend on the epoch only, so they are known before the training, on all ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral

from fineprune.errors import InputError, check_whole_number, shown
from fineprune.pruning.epoch import Epoch
from fineprune.pruning.plan import EpochPlan, check_plan
from fineprune.pruning.policies.policy import Policy, Training
from fineprune.pruning.random_streams import stream
from fineprune.pruning.sampler import samples_per_rank
from fineprune.pruning.schedule import check_epoch


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
        """Number of samples in one batch of all ranks; None if it is not known."""
        return None if self.batch_size is None else self.batch_size * self.num_replicas

    @property
    def multiple(self) -> int:
        """Samples per optimizer step of all ranks; without a batch size, the number of ranks."""
        return (self.samples_per_batch or self.num_replicas) * self.accumulation

    def planned(self, kept: int) -> int:
        """Return how many samples all ranks train of ``kept``, padding included."""
        if self.drop_last and self.batch_size is not None:
            return self.batches_of(kept) * self.batch_size * self.num_replicas
        return samples_per_rank(kept, self.num_replicas, self.drop_last) * self.num_replicas

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

    Raises:
        InputError: The policy cannot work with this size, or names impossible lengths.
    """

    def __init__(self, policy: Policy, num_samples: int, shape: BatchShape, seed: int = 0) -> None:
        self.policy = policy
        self.num_samples = num_samples
        self.shape = shape
        self._seed = seed
        known = replace(shape, batch_size=shape.batch_size or 1)
        full = known.steps_of(num_samples)
        policy.begin(Training(num_samples, known.multiple, full, seed))
        wanted = policy.lengths()
        self._wanted = None if wanted is None else _checked(wanted, policy, num_samples)

    def num_kept(self, epoch: int) -> int | None:
        """Return how many samples an epoch keeps, rounded up to whole steps if it skips any.

        None if the number depends on data.
        """
        wanted = None if self._wanted is None else self._wanted[epoch]
        if wanted is None or wanted == self.num_samples:
            return wanted
        return min(-(-wanted // self.shape.multiple) * self.shape.multiple, self.num_samples)

    def plan(self, epoch: int) -> EpochPlan:
        """Let the policy choose the samples of an epoch. InputError: it returns something wrong."""
        number = self.num_kept(epoch)
        if number == self.num_samples:
            return EpochPlan.full(epoch, self.num_samples)
        try:
            plan = self.policy.select(epoch, number, stream(self._seed, epoch, "select"))
            return check_plan(plan, epoch, number, self.num_samples)
        except InputError as error:
            raise InputError(f"policy {self.policy.name!r} in epoch {epoch}: {error}") from error

    def length(self, epoch: int, *known: Epoch | None) -> int:
        """Return how many samples an epoch trains: one of those that are known, or in advance."""
        check_epoch(epoch, self.policy.epochs)
        for one in known:
            if one is not None and one.number == epoch:
                return one.plan.number
        kept = self.num_kept(epoch)
        if kept is None:
            raise InputError(
                f"expected an epoch whose length is known in advance, got epoch {epoch} of policy "
                f"{self.policy.name!r}, whose length depends on data: ask when it is the current "
                f"one"
            )
        return kept

    def total_steps(self) -> int:
        """Return the number of optimizer steps of all epochs ([P] formula 5, fewer batches)."""
        self.shape.batches_of(self.num_samples)  # This needs the batch size.
        total = self.steps_before(self.policy.epochs)
        if total is None:
            raise InputError(
                f"expected a policy whose epochs have lengths known in advance, got "
                f"{self.policy.name!r}: compute the learning rate from the progress in epochs "
                f"instead"
            )
        return total

    def steps_before(self, epoch: int) -> int | None:
        """Return the number of steps before an epoch; None if it depends on data, or is unknown."""
        if self.shape.batch_size is None:
            return None
        if self._wanted is None:
            return None if self.policy.budget is None else self.policy.budget.used_before(epoch)
        kept = map(self.num_kept, range(epoch))
        return sum(self.shape.steps_of(number) for number in kept if number is not None)

    def check_rounding(self) -> None:
        """Raise InputError if rounding to whole steps leaves nothing to skip in an epoch."""
        for epoch, wanted in enumerate(self._wanted or ()):
            if wanted < self.num_samples == self.num_kept(epoch):
                raise InputError(
                    f"the policy skips {self.num_samples - wanted} of {self.num_samples} samples, "
                    f"but none after rounding to whole steps of {self.shape.multiple} samples "
                    f"(batch x ranks x accumulation): expected a larger prune or save, or a "
                    f"smaller batch_size"
                )


def _checked(wanted: object, policy: Policy, num_samples: int) -> list[int]:
    """Return the lengths that a policy wants, each from 1 to N."""
    whole = isinstance(wanted, Sequence) and all(
        isinstance(number, Integral)
        and not isinstance(number, bool)
        and 1 <= int(number) <= num_samples
        for number in wanted
    )
    if not isinstance(wanted, Sequence) or not whole or len(wanted) != policy.epochs:
        raise InputError(
            f"expected lengths() of policy {policy.name!r} to be None or {policy.epochs} whole "
            f"numbers from 1 to {num_samples}, got {shown(repr(wanted))}"
        )
    return [int(number) for number in wanted]
