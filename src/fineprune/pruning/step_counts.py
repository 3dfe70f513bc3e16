"""How many samples an epoch keeps after rounding to whole batches, and how many steps it takes.

These functions depend on the epoch only, so that learning rates and step counts can be planned
before the training, and all ranks get the same results.
"""

import math
from dataclasses import dataclass
from numbers import Integral

from fineprune.errors import InputError, check_whole_number, warn_user
from fineprune.pruning.policies.policy import Policy
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
            raise InputError(
                f"expected batch_size beside accumulation={self.accumulation}, got None"
            )

    @property
    def multiple(self) -> int:
        """Number of samples per optimizer step of all ranks.

        If the batch size is not known, it is the number of ranks.
        """
        return self.num_replicas * (self.batch_size or 1) * self.accumulation


def bind(policy: Policy, num_samples: int, shape: BatchShape) -> None:
    """Tell a policy the number of samples and the size of the optimizer steps."""
    policy.bind(num_samples)
    own = samples_per_rank(num_samples, shape.num_replicas, shape.drop_last)
    policy.bind_steps(shape.multiple, math.ceil(_batches(own, shape) / shape.accumulation))


def _batches(samples: int, shape: BatchShape) -> int:
    """Return the number of batches in which a rank trains its samples of an epoch."""
    size = shape.batch_size or 1
    return samples // size if shape.drop_last else -(-samples // size)


def batches_of(kept: int, shape: BatchShape) -> int:
    """Return the number of batches per rank of an epoch that keeps ``kept`` samples."""
    _check_batch_size(shape)
    return _batches(samples_per_rank(kept, shape.num_replicas, shape.drop_last), shape)


def steps_of(kept: int, shape: BatchShape) -> int:
    """Return the number of optimizer steps of an epoch that keeps ``kept`` samples."""
    return math.ceil(batches_of(kept, shape) / shape.accumulation)


def num_kept(policy: Policy, num_samples: int, epoch: int, shape: BatchShape) -> int | None:
    """Return how many samples an epoch keeps, rounded up to whole steps if it skips any.

    Because of the rounding, pruned epochs have no padding, no incomplete batches and no incomplete
    accumulation. Full epochs are not rounded. The result is None if it depends on data.
    """
    wanted = _wanted(policy, num_samples, epoch)
    if wanted is None or wanted == num_samples:
        return wanted
    return min(_rounded_up(wanted, shape.multiple), num_samples)


def total_steps(policy: Policy, num_samples: int, shape: BatchShape) -> int:
    """Return the number of optimizer steps of all epochs ([P] formula 5, with fewer batches)."""
    _check_batch_size(shape)
    total = known_steps(policy, num_samples, shape)
    if total is None:
        raise InputError(
            f"expected a policy whose epochs' lengths are known in advance, got {policy.name!r}: "
            f"drive the learning rate by progress instead"
        )
    return total


def known_steps(policy: Policy, num_samples: int, shape: BatchShape) -> int | None:
    """Return ``total_steps``; None if they depend on data, or there is no batch size."""
    if shape.batch_size is None:
        return None
    if policy.total_steps is not None:
        return policy.total_steps
    return _steps_of_epochs(policy, num_samples, shape, policy.epochs)


def steps_before(policy: Policy, num_samples: int, shape: BatchShape, epoch: int) -> int | None:
    """Return the number of optimizer steps of all epochs before one; None if it is not known."""
    own = policy.steps_before(epoch)
    return _steps_of_epochs(policy, num_samples, shape, epoch) if own is None else own


def _steps_of_epochs(
    policy: Policy, num_samples: int, shape: BatchShape, number: int
) -> int | None:
    """Return the number of optimizer steps of the first epochs; None if it depends on data."""
    total = 0
    for epoch in range(number):
        kept = num_kept(policy, num_samples, epoch, shape)
        if kept is None:
            return None
        total += steps_of(kept, shape)
    return total


def predicted_saving(policy: Policy, num_samples: int, shape: BatchShape) -> float | None:
    """Return the share of the steps that a training saves; None if it depends on data.

    Without a batch size, it is the share of the sample-steps.
    """
    if shape.batch_size is not None:
        full = policy.epochs * steps_of(num_samples, shape)
        steps = known_steps(policy, num_samples, shape)
        return (full - steps) / full if steps is not None and full else None
    kept = [num_kept(policy, num_samples, epoch, shape) for epoch in range(policy.epochs)]
    known = [number for number in kept if number is not None]
    if len(known) < len(kept):
        return None
    full = policy.epochs * num_samples
    return (full - sum(known)) / full


def check_rounding(policy: Policy, num_samples: int, shape: BatchShape) -> None:
    """Warn the user if nothing is skipped, or rounding loses a tenth of the saving or more.

    The policy must be bound.
    """
    wanted = {_wanted(policy, num_samples, epoch) for epoch in range(policy.epochs)}
    scheduled = hasattr(policy, "schedule") and getattr(policy, "prune", 0) > 0
    trial = policy.epochs == 1 or policy.anneals(0)  # It is clear that nothing is skipped.
    if wanted == {num_samples} and scheduled and not trial:
        warn_user(
            f"policy {policy.name!r} skips no sample in any of its {policy.epochs} epochs: give a "
            f"schedule that prunes some of them, and a share of at least one sample",
            UserWarning,
        )
    for keep in wanted:
        if keep is None or keep == num_samples:
            continue
        skip = num_samples - keep
        left = num_samples - _rounded_up(keep, shape.multiple)
        if left > (1 - _WORTH_A_WARNING) * skip:
            continue
        cost = (
            f"the policy skips {skip} of {num_samples} samples, but whole steps of "
            f"{shape.multiple} samples (batch x ranks x accumulation) leave {max(left, 0)} skipped"
        )
        if left <= 0:
            raise InputError(f"{cost}: expected a larger prune or save, or a smaller batch_size")
        warn_user(f"{cost}: a tenth of the saving or more is lost", UserWarning)


def _wanted(policy: Policy, num_samples: int, epoch: int) -> int | None:
    """Return how many samples the policy wants to keep, from 1 to N; None if it depends on data."""
    if policy.anneals(epoch):
        return num_samples
    wanted = policy.num_kept(epoch)
    if wanted is None:
        return None
    whole = isinstance(wanted, Integral) and not isinstance(wanted, bool)
    if not whole or not 1 <= wanted <= num_samples:
        raise InputError(
            f"expected num_kept({epoch}) of policy {policy.name!r} to be a whole number from 1 to "
            f"{num_samples} or None, got {wanted!r}"
        )
    return int(wanted)


def _check_batch_size(shape: BatchShape) -> None:
    if shape.batch_size is None:
        raise InputError("expected Pruner(..., batch_size=...) to count steps, got None")


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
