"""The options that every policy takes, and how they are applied to a plan.

A policy chooses samples by its own rule. The options then say which epochs train all samples, which
samples must not be left out for too long, and how the losses are weighted.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from numbers import Real
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError, check_whole_number, explaining
from fineprune.pruning.lowest import lowest
from fineprune.pruning.plan import EpochPlan

# How often in a row each sample was skipped is stored in one byte.
LONGEST_SKIP = 255

# The number of random bits in the keys by which samples are compared, so that ties are rare. The
# other 24 bits hold the order of preference, and the class or how long a sample was skipped.
_RANDOM_BITS = 40

# Prevents a share such as 0.29 * 100 = 28.999999999999996 from being rounded to another integer.
_TINY = 1e-9

Labels = npt.NDArray[np.int64]
Skips = npt.NDArray[np.uint8]


class Options(TypedDict, total=False):
    """The keyword arguments of a policy that become its ``PlanOptions``."""

    anneal: float
    rescale: bool
    keep_per_class: float
    max_skips: int | None


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of a policy. By default, all of them are off.

    Attributes:
        anneal: The share of the last epochs, in [0, 1], that train all samples.
        rescale: Whether the losses are weighted such that the weighted sum over the kept samples
            has the expectation of the sum over all samples. The mean weight is then above one,
            which raises the effective learning rate.
        keep_per_class: The share of each class's samples, in [0, 1], that every epoch trains at
            least. It needs ``Pruner(..., labels=...)``.
        max_skips: A sample that was skipped in this many epochs in a row (1 to 255) is trained in
            the next one; None for no limit.

    Raises:
        InputError: A value is out of range.
    """

    anneal: float = 0.0
    rescale: bool = False
    keep_per_class: float = 0.0
    max_skips: int | None = None

    def __post_init__(self) -> None:
        for name in ("anneal", "keep_per_class"):
            check_share(name, getattr(self, name))
        if not isinstance(self.rescale, bool):
            raise InputError(f"expected rescale as True or False, got {self.rescale!r}")
        if self.max_skips is not None:
            check_whole_number("max_skips", self.max_skips, 1)
            if self.max_skips > LONGEST_SKIP:
                raise InputError(
                    f"expected max_skips of at most {LONGEST_SKIP}, got {self.max_skips}"
                )

    @property
    def exchanges(self) -> bool:
        """Whether plans may have to keep other samples than the policy chose."""
        return self.keep_per_class > 0 or self.max_skips is not None

    def settings(self) -> dict[str, Any] | None:
        """Return the options, with which a saved state must agree; None if all are off."""
        return None if self == PlanOptions() else asdict(self)


NAMES = tuple(field.name for field in fields(PlanOptions))


def check_share(name: str, value: object) -> None:
    """Raise InputError unless ``value`` is a number in [0, 1]."""
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= float(value) <= 1:
        raise InputError(f"expected {name} as a share in [0, 1], got {value!r}")


def annealed_epochs(anneal: float, epochs: int) -> int:
    """Return the number of last epochs that train all samples, rounded up."""
    return math.ceil(anneal * epochs - _TINY)


def class_numbers(labels: Any, num_samples: int) -> Labels:
    """Return the class of each sample as numbers from 0 without gaps, int64, shape (N,).

    Args:
        labels: One integer per sample: a sequence, an array or a tensor.
        num_samples: Number of samples N in the data set.
    """
    given = labels.detach().cpu().numpy() if isinstance(labels, torch.Tensor) else labels
    # Numpy refuses lists of different lengths.
    with explaining("expected labels as integers of shape (N,)", ValueError):
        values: npt.NDArray[Any] = np.asarray(given)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise InputError(
            f"expected labels as integers of shape (N,), got {values.dtype} of shape {values.shape}"
        )
    if len(values) != num_samples:
        raise InputError(
            f"expected one label for each of {num_samples} samples, got {len(values)} labels"
        )
    numbers: Labels = np.unique(values, return_inverse=True)[1].astype(np.int64)
    return numbers


def class_quotas(labels: Labels, keep_per_class: float) -> npt.NDArray[np.int64]:
    """Return the number of samples of each class that every epoch trains, rounded up."""
    quotas: npt.NDArray[np.int64] = np.ceil(np.bincount(labels) * keep_per_class - _TINY).astype(
        np.int64
    )
    return quotas


def exchanged(
    kept: npt.NDArray[np.int64],
    num_samples: int,
    rng: np.random.Generator,
    forced: npt.NDArray[np.bool_] | None = None,
    skips: Skips | None = None,
    labels: Labels | None = None,
    quotas: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.int64]:
    """Exchange random kept samples for those that must be kept, and return as many, sorted.

    If more samples must be kept than the plan has, those that were skipped the longest are kept,
    first those in ``forced``.

    Args:
        kept: The samples that the policy chose, int64, shape (number kept,).
        num_samples: Number of samples N in the data set.
        rng: Chooses the samples that are exchanged.
        forced: The samples that must be kept, shape (N,); None for no samples.
        skips: The number of epochs in a row in which each sample was skipped, shape (N,).
        labels: The class of each sample, shape (N,).
        quotas: The number of samples of each class that must be kept.
    """
    # One integer per sample is compared, since this takes less time than comparing three arrays.
    # Its first bits are the order of preference, its last ones are random.
    key = rng.integers(1 << _RANDOM_BITS, size=num_samples, dtype=np.uint64)
    # In order of preference: 0 forced, 1 needed for its class, 2 kept by the policy, 3 skipped.
    tier = np.full(num_samples, 3, dtype=np.uint8)
    tier[kept] = 2
    if forced is not None:
        tier[forced] = 0
    if labels is not None and quotas is not None:
        order = np.argsort(_above(labels, _above(tier, key, 0), 2), kind="stable")
        sizes = np.bincount(labels, minlength=len(quotas))
        rank = np.arange(num_samples) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        needed = order[rank < quotas[labels[order]]]
        tier[needed] = np.minimum(tier[needed], 1)
    if skips is not None:
        waited = np.where(tier < 2, LONGEST_SKIP - skips, 0)
        key = _above(waited, key, 0)
    return np.sort(lowest(_above(tier, key, 8), len(kept), rng))


def _above(
    values: npt.NDArray[Any], key: npt.NDArray[np.uint64], bits: int
) -> npt.NDArray[np.uint64]:
    """Return keys that compare by ``values`` first, which use the bits above the given number."""
    return (values.astype(np.uint64) << np.uint64(_RANDOM_BITS + bits)) | key


def sum_preserving(
    kept: torch.Tensor,
    num_samples: int,
    weights: torch.Tensor | None,
    forced: npt.NDArray[np.bool_] | None = None,
    groups: Labels | None = None,
) -> torch.Tensor:
    """Return weights with which the kept samples of each group stand for the whole group.

    They are float32, shape (N,). A forced sample stands for itself, with weight one. The weights of
    the other kept samples of a group have the number of the group's other samples as their sum.

    Args:
        kept: Indices of the kept samples, int64, shape (number kept,).
        num_samples: Number of samples N in the data set.
        weights: The weights of the policy, float32, shape (N,); None for equal weights.
        forced: The samples that were not chosen at random, shape (N,); None for no samples.
        groups: The group of each sample, shape (N,); None for one group.
    """
    given = np.ones(num_samples) if weights is None else weights.numpy().astype(np.float64)
    number = np.zeros(num_samples, dtype=np.int64) if groups is None else groups
    is_kept = np.zeros(num_samples, dtype=np.bool_)
    is_kept[kept.numpy()] = True
    alone = np.zeros(num_samples, dtype=np.bool_) if forced is None else forced
    if (alone & ~is_kept).any():  # Not all of them fit, so they were chosen at random, too.
        alone = np.zeros(num_samples, dtype=np.bool_)
    others = np.bincount(number[~alone], minlength=int(number.max()) + 1)
    chosen = is_kept & ~alone
    sums = np.bincount(number[chosen], given[chosen], minlength=len(others))
    factors = np.divide(others, sums, out=np.ones(len(others)), where=sums > 0)
    result = np.where(alone, 1.0, given * factors[number])
    return torch.from_numpy(result.astype(np.float32))


class AppliedOptions:
    """Applies the options of a policy to its plans, by what they need to know about the samples.

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
        self._labels = self._quotas = None
        if options.keep_per_class and given is not None:
            self._labels, self._quotas = given, class_quotas(given, options.keep_per_class)
        self._skips: Skips | None = None
        if options.max_skips is not None:
            self._skips = np.zeros(num_samples, dtype=np.uint8)

    def check_room(self, numbers: Iterable[int | None]) -> None:
        """Raise InputError if an epoch keeps too few samples for the share of each class.

        Args:
            numbers: How many samples each epoch keeps; None if it depends on data.
        """
        if self._quotas is None:
            return
        needed = int(self._quotas.sum())
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
            chosen = exchanged(kept.numpy(), total, rng, forced, skips, labels, self._quotas)
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
        """Return how often in a row each sample was skipped, uint8, (N,); None if not counted."""
        return None if self._skips is None else torch.from_numpy(self._skips.copy())

    def load_skips(self, skips: torch.Tensor | None) -> None:
        """Continue from the result of ``skips``; None is ignored."""
        if skips is not None:
            self._skips = skips.numpy().copy()
