"""AppliedOptions: the options of a policy, together with what they need to know about the samples.

The rules are pure functions in ``plan_options``; this class holds the classes of the samples and
how often in a row each sample was skipped.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from fineprune.errors import InputError
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.plan_options import (
    LONGEST_SKIP,
    Labels,
    PlanOptions,
    Skips,
    class_numbers,
    class_quotas,
    exchanged,
    sum_preserving,
)


class AppliedOptions:
    """Applies the options of a policy to its plans.

    Args:
        options: The options of the policy.
        num_samples: Number of samples N in the data set.
        labels: The class of each sample, for ``keep_per_class``: integers, shape (N,).
    """

    def __init__(self, options: PlanOptions, num_samples: int, labels: Any = None) -> None:
        self._options = options
        self._num_samples = num_samples
        given = None if labels is None else class_numbers(labels, num_samples)
        if options.keep_per_class and given is None:
            raise InputError(
                f"expected Pruner(..., labels=...) with the class of each sample, since the policy "
                f"has keep_per_class={options.keep_per_class}, got none"
            )
        self._labels: Labels | None = given if options.keep_per_class else None
        self._skips: Skips | None = None
        if options.max_skips is not None:
            self._skips = np.zeros(num_samples, dtype=np.uint8)

    def check_room(self, numbers: Iterable[int | None]) -> None:
        """Raise InputError if an epoch keeps too few samples for the share of each class.

        Args:
            numbers: How many samples each epoch keeps; None if it depends on data.
        """
        if self._labels is None:
            return
        needed = int(class_quotas(self._labels, self._options.keep_per_class).sum())
        for epoch, number in enumerate(numbers):
            if number is not None and number < needed:
                raise InputError(
                    f"expected keep_per_class to leave samples to skip, got "
                    f"{self._options.keep_per_class}, which needs {needed} samples, while epoch "
                    f"{epoch} keeps {number}: set a smaller keep_per_class"
                )

    def apply(self, plan: EpochPlan, rng: np.random.Generator) -> EpochPlan:
        """Return the plan of a policy after its options were applied; it keeps as many samples.

        Args:
            plan: The plan that the policy made.
            rng: Chooses which samples are exchanged. Nothing is drawn if the options exchange none.
        """
        options, total, skips, labels = self._options, self._num_samples, self._skips, self._labels
        if len(plan.kept) == total:
            return plan
        most = options.max_skips
        forced = None if skips is None or most is None else skips >= most
        kept, weights = plan.kept, plan.weights
        if options.exchanges:
            quotas = None if labels is None else class_quotas(labels, options.keep_per_class)
            chosen = exchanged(kept.numpy(), total, rng, forced, skips, labels, quotas)
            kept = torch.from_numpy(chosen)
        if options.rescale and (weights is None or options.exchanges):
            weights = sum_preserving(kept, total, weights, forced, labels)
        return EpochPlan(plan.epoch, kept, weights)

    def end_epoch(self, plan: EpochPlan) -> None:
        """Count an epoch that trained the samples of a plan and skipped the others."""
        if self._skips is not None:
            np.add(self._skips, 1, out=self._skips, where=self._skips < LONGEST_SKIP)
            self._skips[plan.kept.numpy()] = 0

    def skips(self) -> torch.Tensor | None:
        """Return in how many epochs in a row each sample was skipped, uint8, shape (N,), a copy.

        It is None without ``max_skips``.
        """
        return None if self._skips is None else torch.from_numpy(self._skips.copy())

    def load_skips(self, skips: torch.Tensor | None) -> None:
        """Continue from the result of ``skips``; None is ignored."""
        if skips is not None:
            self._skips = skips.numpy().copy()
