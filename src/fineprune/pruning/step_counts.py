"""How many samples an epoch keeps once whole batches are made of them, and how many steps that is.

Pure functions of the epoch: learning rates and step counts are planned with them before any
training, and every rank gets the same answer.
"""

import math
import warnings
from dataclasses import dataclass

from fineprune.errors import InputError
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.sampler import samples_per_rank

# A rounding that costs this share of the saving or more deserves a warning.
_WORTH_A_WARNING = 0.1


@dataclass(frozen=True)
class BatchShape:
    """How samples become optimizer steps.

    Attributes:
        batch_size: samples in a batch on each rank; None where it is not known.
        accumulation: batches in an optimizer step.
        num_replicas: ranks that share an epoch's samples.
        drop_last: whether an incomplete last batch is left out.

    Raises:
        InputError: a value is not a whole number of at least 1, or accumulation comes without a
            batch size.
    """

    batch_size: int | None = None
    accumulation: int = 1
    num_replicas: int = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_least("batch_size", 1 if self.batch_size is None else self.batch_size, 1)
        check_least("accumulation", self.accumulation, 1)
        check_least("num_replicas", self.num_replicas, 1)
        if self.accumulation > 1 and self.batch_size is None:
            raise InputError(
                f"expected batch_size beside accumulation={self.accumulation}, got None"
            )

    @property
    def multiple(self) -> int:
        """Samples in one optimizer step of all ranks; the number of ranks without a batch size."""
        return self.num_replicas * (self.batch_size or 1) * self.accumulation


def num_kept(policy: Policy, num_samples: int, epoch: int, shape: BatchShape) -> int | None:
    """Return how many samples an epoch keeps: rounded up to whole steps if it skips any.

    None where that depends on data. Rounding up removes padding, incomplete batches and half
    accumulation windows from pruned epochs; full ones are never rounded.
    """
    wanted = policy.num_kept(epoch)
    if wanted is None or wanted >= num_samples:
        return wanted
    return min(_rounded_up(wanted, shape.multiple), num_samples)


def total_steps(policy: Policy, num_samples: int, shape: BatchShape) -> int:
    """Count the optimizer steps of all epochs ([P] formula 5, with the smaller batches).

    Raises:
        InputError: there is no batch size, or the policy's numbers depend on data.
    """
    if shape.batch_size is None:
        raise InputError("expected Pruner(..., batch_size=...) to count steps, got None")
    total = 0
    for epoch in range(policy.epochs):
        kept = num_kept(policy, num_samples, epoch, shape)
        if kept is None:
            raise InputError(
                f"expected a policy whose epochs' lengths are known in advance, got "
                f"{policy.name!r}: drive the learning rate by progress instead"
            )
        own = samples_per_rank(kept, shape.num_replicas, shape.drop_last)
        batches = own // shape.batch_size if shape.drop_last else -(-own // shape.batch_size)
        total += math.ceil(batches / shape.accumulation)
    return total


def check_rounding(policy: Policy, num_samples: int, shape: BatchShape) -> None:
    """Fail or warn at the start where whole batches would undo the pruning.

    Raises:
        InputError: nothing would be skipped.
    """
    wanted = {policy.num_kept(epoch) for epoch in range(policy.epochs)}
    for keep in wanted:
        if keep is None or keep >= num_samples:
            continue
        skip = num_samples - keep
        left = num_samples - _rounded_up(keep, shape.multiple)
        if left > (1 - _WORTH_A_WARNING) * skip:
            continue
        said = (
            f"{skip} of {num_samples} samples are to be skipped, but whole steps of "
            f"{shape.multiple} samples (batch x ranks x accumulation) leave {max(left, 0)} skipped"
        )
        if left <= 0:
            raise InputError(f"{said}: expected a larger prune or a smaller batch_size")
        warnings.warn(f"{said}: a tenth of the saving or more is lost", UserWarning, stacklevel=4)


def check_least(name: str, value: object, least: int) -> None:
    """Raise InputError unless ``value`` is a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"expected {name} to be a whole number of at least {least}, got {value!r}")


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
