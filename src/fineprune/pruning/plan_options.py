"""The options that every policy takes, and how they are applied to a plan.

A policy chooses samples by its own rule. The options then say which epochs train all samples, which
samples must not be left out for too long, and how the losses are weighted.
"""

import math
import operator
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from numbers import Real
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError, check_whole_number, explaining, warn_user
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
        anneal: The share of the epochs, in [0, 1], that train all samples, at the end of the
            training.
        rescale: Whether the losses are weighted so that the expected weighted sum over the kept
            samples is the sum over all samples. The mean weight is then above one, which raises the
            effective learning rate.
        keep_per_class: The smallest share of each class's samples, in [0, 1], that every epoch
            trains. It needs ``Pruner(..., labels=...)``.
        max_skips: The largest number of epochs in a row (1 to 255) in which a sample may be
            skipped; None for no limit.

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
        """Return the options, which a saved state must match; None if all are off."""
        return None if self == PlanOptions() else asdict(self)


NAMES = tuple(field.name for field in fields(PlanOptions))


def check_share(name: str, value: object, interval: str = "[0, 1]") -> float:
    """Return ``value`` as a float.

    Args:
        name: What the value is called.
        value: What was given.
        interval: Whether 0 and 1 are allowed; one of "[0, 1]", "[0, 1)", "(0, 1]" and "(0, 1)".

    Raises:
        InputError: It is no number in the interval.
    """
    share = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    above = operator.le if interval.startswith("[") else operator.lt
    below = operator.le if interval.endswith("]") else operator.lt
    if not (above(0, share) and below(share, 1)):
        raise InputError(f"expected {name} as a share in {interval}, got {value!r}")
    return share


def annealed_epochs(anneal: float, epochs: int) -> int:
    """Return the number of last epochs that train all samples, rounded up."""
    return math.ceil(anneal * epochs - _TINY)


def checked_labels(labels: Any, num_samples: int) -> npt.NDArray[np.integer]:
    """Return the class of each sample as integers, shape (N,).

    Raises:
        InputError: The labels are no integers, or of another number.
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
    return values


def _above(
    values: npt.NDArray[Any], key: npt.NDArray[np.uint64], bits: int
) -> npt.NDArray[np.uint64]:
    """Return keys that compare by ``values`` first, which use the bits above the given number."""
    return (values.astype(np.uint64) << np.uint64(_RANDOM_BITS + bits)) | key


class AppliedOptions:
    """Applies the options of a policy to its plans, by what they need to know about the samples.

    Args:
        options: The options of the policy.
        num_samples: Number of samples N in the data set.
        labels: The class of each sample, for ``keep_per_class``: integers, shape (N,).
    """

    def __init__(
        self,
        options: PlanOptions,
        num_samples: int,
        labels: npt.NDArray[np.integer] | None = None,
    ) -> None:
        self._options = options
        self._num_samples = num_samples
        if options.keep_per_class and labels is None:
            raise InputError(
                f"expected Pruner(..., labels=...) with the class of each sample, since the policy "
                f"has keep_per_class={options.keep_per_class}, got none"
            )
        # The class of each sample, and how many samples of each class every epoch trains.
        self._classes: tuple[Labels, npt.NDArray[np.int64]] | None = None
        if options.keep_per_class and labels is not None:
            given: Labels = np.unique(labels, return_inverse=True)[1].astype(np.int64)
            quotas = np.ceil(np.bincount(given) * options.keep_per_class - _TINY).astype(np.int64)
            self._classes = given, quotas
        # In how many epochs in a row each sample was skipped.
        self._skips: Skips | None = None
        self._has_warned = False
        if options.max_skips is not None:
            self._skips = np.zeros(num_samples, dtype=np.uint8)

    def check_room(self, numbers: Iterable[int | None]) -> None:
        """Raise InputError if an epoch keeps too few samples for the share of each class.

        Args:
            numbers: How many samples each epoch keeps; None if it depends on data.
        """
        if self._classes is None:
            return
        needed = int(self._classes[1].sum())
        for epoch, number in enumerate(numbers):
            if number is not None and number < needed:
                raise InputError(
                    f"expected keep_per_class to need at most the {number} samples that epoch "
                    f"{epoch} keeps, got {self._options.keep_per_class}, which needs {needed}: set "
                    f"a smaller keep_per_class"
                )

    def apply(self, plan: EpochPlan, rng: np.random.Generator) -> EpochPlan:
        """Return the plan of a policy after its options were applied; it keeps as many samples.

        Args:
            plan: The plan that the policy made.
            rng: Chooses which samples are exchanged. Nothing is drawn if the options exchange none.
        """
        options, skips = self._options, self._skips
        if len(plan.kept) == self._num_samples:
            return plan
        forced = np.zeros(self._num_samples, dtype=np.bool_)
        if skips is not None and options.max_skips is not None:
            forced = skips >= options.max_skips
        kept, weights = plan.kept, plan.weights
        if options.exchanges:
            kept = torch.from_numpy(self._exchanged(kept.numpy(), forced, rng))
        if options.rescale and (weights is None or options.exchanges):
            weights = self._sum_preserving(kept.numpy(), weights, forced)
        return EpochPlan(plan.epoch, kept, weights)

    def _exchanged(
        self, kept: npt.NDArray[np.int64], forced: npt.NDArray[np.bool_], rng: np.random.Generator
    ) -> npt.NDArray[np.int64]:
        """Exchange random kept samples for those that must be kept, and return as many, sorted.

        If more samples must be kept than the plan has, those that were skipped the longest are
        kept, first those in ``forced``, a bool of shape (N,).
        """
        total = self._num_samples
        # One integer per sample is compared, since this takes less time than comparing three
        # arrays. Its first bits are the order of preference, its last ones are random.
        key = rng.integers(1 << _RANDOM_BITS, size=total, dtype=np.uint64)
        # In order of preference: 0 forced, 1 needed for its class, 2 kept by the policy, 3 skipped.
        tier = np.full(total, 3, dtype=np.uint8)
        tier[kept] = 2
        tier[forced] = 0
        if self._classes is not None:
            labels, quotas = self._classes
            order = np.argsort(_above(labels, _above(tier, key, 0), 2), kind="stable")
            sizes = np.bincount(labels)
            rank = np.arange(total) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            needed = order[rank < quotas[labels[order]]]
            tier[needed] = np.minimum(tier[needed], 1)
        if self._skips is not None:
            waited = np.where(tier < 2, LONGEST_SKIP - self._skips, 0)
            key = _above(waited, key, 0)
        return np.sort(lowest(_above(tier, key, 8), len(kept), rng))

    def _sum_preserving(
        self,
        kept: npt.NDArray[np.int64],
        weights: torch.Tensor | None,
        forced: npt.NDArray[np.bool_],
    ) -> torch.Tensor:
        """Return weights with which the kept samples of each class stand for the whole class.

        They are float32, shape (N,), and start from the weights of the policy, if it has any.
        Without classes, the samples are one class. A sample in ``forced``, a bool of shape (N,),
        stands for itself, with weight one. The weights of the other kept samples of a class have
        the number of the class's other samples as their sum.
        """
        total = self._num_samples
        given = np.ones(total) if weights is None else weights.numpy().astype(np.float64)
        number = np.zeros(total, dtype=np.int64) if self._classes is None else self._classes[0]
        is_kept = np.zeros(total, dtype=np.bool_)
        is_kept[kept] = True
        if (forced & ~is_kept).any():  # Not all of them fit, so they were chosen at random, too.
            forced = np.zeros(total, dtype=np.bool_)
        others = np.bincount(number[~forced], minlength=int(number.max()) + 1)
        chosen = is_kept & ~forced
        sums = np.bincount(number[chosen], given[chosen], minlength=len(others))
        factors = np.divide(others, sums, out=np.ones(len(others)), where=sums > 0)
        result = np.where(forced, 1.0, given * factors[number])
        return torch.from_numpy(result.astype(np.float32))

    def end_epoch(self, plan: EpochPlan) -> None:
        """Count an epoch that trained the samples of a plan and skipped the others."""
        if self._skips is not None:
            np.add(self._skips, 1, out=self._skips, where=self._skips < LONGEST_SKIP)
            self._skips[plan.kept.numpy()] = 0
        needed = 0 if self._classes is None else int(self._classes[1].sum())
        if needed > len(plan.kept) and not self._has_warned:
            self._has_warned = True
            warn_user(
                f"keep_per_class={self._options.keep_per_class} needs {needed} samples, but epoch "
                f"{plan.epoch} kept only {len(plan.kept)}, so it trained too few of some classes: "
                f"set a smaller keep_per_class"
            )

    def skips(self) -> torch.Tensor | None:
        """Return how often in a row each sample was skipped, uint8, (N,); None if not counted."""
        return None if self._skips is None else torch.from_numpy(self._skips.copy())

    def load_skips(self, skips: torch.Tensor | None) -> None:
        """Continue from the result of ``skips``; None is ignored."""
        if skips is not None:
            self._skips = skips.numpy().copy()
