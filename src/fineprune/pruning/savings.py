"""Formulas 2-7 of the paper: how much a schedule will save, known before the training."""

import copy
import warnings
from dataclasses import dataclass

import numpy as np

from fineprune.errors import InputError, check_positive, check_whole_number
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.schedule import Schedule
from fineprune.pruning.step_counts import BatchShape, StepCounts


def closed_form_pruned_epochs(schedule: Schedule) -> int:
    """Evaluate the paper's formula 3, or formula 4 if the window does not divide the epochs.

    As printed, they hold the start constant, count every remainder epoch as pruned, and may have a
    negative last term. ``Schedule.pruned_epochs`` is exact.

    Raises:
        InputError: The windows differ in length, for which the paper has no formula.
    """
    n, w, a = schedule.epochs, schedule.window, schedule.start
    r, c = schedule.block, schedule.count
    if isinstance(w, tuple) or isinstance(a, tuple):
        raise InputError(f"expected windows of one length, as formulas 3 and 4 have, got {w}")
    pruned = ((w - a) // r * c + (w - a) % r) * (n // w)
    if n % w:
        pruned += (n % w - a) // r * c + (n % w - a) % r
    return pruned


@dataclass(frozen=True)
class Savings:
    """What a training with a policy will cost, compared with training on all data.

    The names with ``full`` are of the training that skips nothing.

    Attributes:
        pruned_epochs: Number of epochs that skip samples.
        samples, samples_full: Number of samples trained in all epochs.
        steps, steps_full: Number of optimizer steps (the paper's formula 5, with fewer batches in
            pruned epochs).
        time, time_full: Predicted time in seconds (formulas 6 and 2); None without a step time.
    """

    pruned_epochs: int
    samples: int
    samples_full: int
    steps: int
    steps_full: int
    time: float | None
    time_full: float | None

    @property
    def skipped_share(self) -> float:
        """The share of all sample-steps that are skipped."""
        return (self.samples_full - self.samples) / self.samples_full

    @property
    def saving(self) -> float:
        """The share of the time that is saved (formula 7 / 2); of the steps without a step time."""
        if self.time is None or self.time_full is None:
            return (self.steps_full - self.steps) / self.steps_full
        return 1 - self.time / self.time_full


def planned_numbers(counts: StepCounts) -> list[int]:
    """Return how many samples each epoch keeps if nothing is learned. It uses the policy up."""
    policy = counts.policy
    nothing = np.zeros(counts.num_samples, dtype=np.float32)
    numbers = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Such as one that no logits were recorded.
        for epoch in range(policy.epochs):
            number = counts.num_kept(epoch)
            if number is None:
                number = policy.select(epoch, None, np.random.default_rng(0)).number
                policy.learn(epoch, nothing, nothing > 0, None)
            numbers.append(number)
    return numbers


def predict_savings(
    policy: Policy,
    num_samples: int,
    batch_size: int,
    *,
    step_time: float | None = None,
    overhead: float = 0.0,
    drop_last: bool = False,
    accumulation: int = 1,
    num_replicas: int = 1,
) -> Savings:
    """Predict what a training with a policy will cost, by stepping through its epochs.

    Args:
        policy: The policy.
        num_samples: Number of samples N in the data set.
        batch_size: Number of samples per batch and rank.
        step_time: Seconds per optimizer step, the paper's T.
        overhead: Seconds of bookkeeping per pruned epoch, the paper's t0.
        drop_last, accumulation, num_replicas: As in ``Pruner``.

    Raises:
        InputError: A value is out of range, or the number of samples per epoch depends on data.
    """
    if step_time is not None:
        check_positive("step_time (seconds)", step_time)
    if not overhead >= 0:
        raise InputError(f"expected overhead in seconds of at least 0, got {overhead}")
    check_whole_number("num_samples", num_samples, 1)
    shape = BatchShape(batch_size, accumulation, num_replicas, drop_last)
    # The caller's policy must not learn.
    counts = StepCounts(copy.deepcopy(policy), num_samples, shape)
    counts.check_rounding()
    steps = counts.total_steps()
    steps_full = policy.epochs * shape.steps_of(num_samples)
    if not steps_full:
        raise InputError(
            f"expected batch_size of at most {num_samples // num_replicas}, the samples of each "
            f"rank, with drop_last, got {batch_size}: every batch would be dropped"
        )
    kept = planned_numbers(counts)
    pruned_epochs = sum(number < num_samples for number in kept)
    return Savings(
        pruned_epochs=pruned_epochs,
        samples=sum(kept),
        samples_full=num_samples * policy.epochs,
        steps=steps,
        steps_full=steps_full,
        time=None if step_time is None else steps * step_time + pruned_epochs * overhead,
        time_full=None if step_time is None else steps_full * step_time,
    )
