"""Which mistakes are frequent: what the samples that clearly belong to a class say of its labels.

Let q[k] be the share of class k in the evidence on a sample with the label y. Then

- The fifth of the samples labelled k with the largest q[k] sets a threshold; in a small class, ten
  samples do, but at most half of them. It is at least half of the share of each class in an
  untrained network. All samples whose q[k] reaches it and is at least half of q[y], whatever their
  label, clearly belong to class k. ``clear_counts`` counts them.
- J[y, k] is the share of the samples labelled y that belong to class k. ``mistake_rates`` estimates
  it from these counts.
- J' is J with the rates of the mistakes drawn towards their mean, the more so the more evenly they
  are spread and the fewer samples they come from. Hard samples look like mistakes between similar
  classes, and only frequent mistakes in few pairs of classes stand out against that.
  ``drawn_together`` does this. If no class was learned, all rates are their mean.

The functions below name y of each recorded sample ``labels``, int64, and q[y] ``own``, float32, of
shape (n,); the number of samples labelled so for each class ``sizes``, int64, shape (C,); and the
result of ``clear_counts`` ``clear``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fineprune.labels.evidence import Evidence

# The part of the samples of a class that clearly belong to it, and their least number.
_CLEAR, _LEAST_CLEAR = 0.2, 10

# The least share of a sample that clearly belongs to a class, beside that of its label and that of
# an untrained network.
_LEAST_BESIDE = 0.5

# How far above chance the largest threshold is in a network that has learned something: 0 if it is
# that of an untrained network, and 1 for certainty. Below the first number, it has learned nothing.
_UNLEARNED, _SOMETHING = 0.1, 0.2

# Steps in which the number of samples of each class is estimated. Few, because what is estimated
# from few clear samples would be taken too far.
_STEPS = 2

# If a few dozen samples clearly belong to a class, a single one of them would make its mistake seem
# far more frequent than one that none has. From 42 on, only the first of two parts counts.
_FEW = 12

# From this spread on (0 for mistakes in one pair of classes, 1 for equally many in all pairs), all
# mistakes are taken to be equally frequent.
_EVEN = 1 / 3

# No share is below the smallest positive number in half precision.
SMALLEST = 2.0**-24


@dataclass(frozen=True, eq=False)
class Mistakes:
    """Which share of the samples with each label seems to belong to each class.

    Attributes:
        rates: The shares J[y, k]; float64, shape (C, C). Each row sums to one.
        drawn: The same with the rates of the mistakes drawn together, J'.
        part: To which part they were drawn, as the mean of the classes; in 0..1.
        in_few_pairs: Whether most mistakes are in few pairs of classes.
        unlearned: To which part the network has learned nothing; in 0..1.
    """

    rates: Tensor
    drawn: Tensor
    part: float
    in_few_pairs: bool
    unlearned: float


def estimate_mistakes(evidence: Evidence, own: Tensor, labels: Tensor, sizes: Tensor) -> Mistakes:
    """Estimate which mistakes are frequent from the evidence, which has been flushed."""
    threshold = thresholds(own, labels, sizes)
    clear = clear_counts(evidence, threshold)
    rates = mistake_rates(clear, sizes)
    part = drawn_part(clear)
    unlearned = unlearned_part(threshold)
    used = clear.sum(0) > 0
    return Mistakes(
        rates,
        drawn_together(rates, clear, part, unlearned),
        part=float(part[used].sum() / used.sum().clamp(min=1)),
        in_few_pairs=bool(spread(clear) < _EVEN),
        unlearned=unlearned,
    )


def thresholds(own: Tensor, labels: Tensor, sizes: Tensor) -> Tensor:
    """Return the share that a sample of each class needs to belong to it clearly.

    They are float32, shape (C,), and infinite for a class without samples.
    """
    number = (sizes * _CLEAR).ceil().long().clamp(min=_LEAST_CLEAR).minimum((sizes + 1) // 2)
    reached = -nth_of_class(-own, labels, sizes, number)
    return torch.where(sizes > 0, reached.clamp(min=_LEAST_BESIDE / len(sizes)), torch.inf)


def nth_of_class(values: Tensor, labels: Tensor, sizes: Tensor, number: Tensor) -> Tensor:
    """Return the value of each class that so many of its samples reach at most; shape (C,).

    For a class without samples, it means nothing.

    Args:
        values: The value of each sample; shape (n,).
        number: The number of samples of each class, at least 1; int64, shape (C,).
    """
    order = values.argsort(stable=True)
    order = order[labels[order].argsort(stable=True)]  # Class after class, small values first.
    last = sizes.cumsum(0) - sizes + number - 1
    return values[order][last.clamp(0, len(values) - 1)]


def clear_counts(evidence: Evidence, threshold: Tensor) -> Tensor:
    """Return, for a label y and a class k, how many samples labelled y clearly belong to class k.

    The counts are float64, shape (C, C).
    """
    counts = torch.zeros(
        len(threshold), len(threshold), dtype=torch.float64, device=threshold.device
    )
    for chunk in evidence.chunks():
        part = chunk.labels >= 0
        shares, given = chunk.shares[part], chunk.labels[part]
        least = threshold.maximum(_LEAST_BESIDE * shares.gather(1, given[:, None]))
        counts.index_add_(0, given, (shares >= least).double())
    return counts


def mistake_rates(clear: Tensor, sizes: Tensor) -> Tensor:
    """Estimate which share of the samples with each label belongs to each class.

    The samples that clearly belong to a class stand for all that do: they give the probability of
    each label in this class. The number of samples of each class is estimated from these and from
    the numbers of labels, by a few steps of expectation and maximisation from the latter.

    Returns:
        The shares J[y, k]; float64, shape (C, C). Each row sums to one. That of a label of which no
        sample clearly belongs to a class is one for its own class.
    """
    labelled = sizes.double()
    given = clear / clear.sum(0).clamp(min=1)
    numbers = labelled
    for _ in range(_STEPS):
        expected = given @ numbers
        numbers = numbers * (given.T @ (labelled / expected.clamp(min=SMALLEST)))
    joint = given * numbers
    joint += torch.diag((joint.sum(1) == 0).double())
    return joint / joint.sum(1, keepdim=True)


def unlearned_part(threshold: Tensor) -> float:
    """Return to which part a network has learned nothing, from the result of ``thresholds``."""
    used = threshold[threshold.isfinite()]
    chance = 1 / max(len(used), 2)
    learned = (float(used.max()) - chance) / (1 - chance)
    return min(max((_SOMETHING - learned) / (_SOMETHING - _UNLEARNED), 0.0), 1.0)


def drawn_part(clear: Tensor) -> Tensor:
    """Return by which part the rates of the mistakes of each class are drawn; float64, shape (C,).

    With s as the result of ``spread``, n[k] as the number of samples that clearly belong to class
    k, and f as the larger one of 1 / n[k] and (12 / n[k])^3, this is 3 * (s + f), at most 1.
    """
    number = clear.sum(0).clamp(min=1)
    few = (1 / number).maximum((_FEW / number) ** 3)
    return ((spread(clear) + few) / _EVEN).clamp(max=1)


def drawn_together(rates: Tensor, clear: Tensor, drawn: Tensor, unlearned: float) -> Tensor:
    """Draw the rates of the mistakes towards their mean.

    In a network that has learned nothing, all are drawn completely, and so are those of right
    labels. Each row of the result sums to one.

    Args:
        rates: The result of ``mistake_rates``.
        drawn: The result of ``drawn_part``.
        unlearned: The result of ``unlearned_part``.
    """
    mean = (1 - rates.diagonal()).sum() / max(_pairs(clear), 1)
    part = drawn + (1 - drawn) * unlearned
    result = torch.lerp(rates, mean.expand_as(rates), part.expand_as(rates)) + SMALLEST
    right = rates.diagonal()
    used = clear.sum(0) > 0
    right = torch.where(used, torch.lerp(right, right[used].mean(), unlearned), right)
    result.diagonal().copy_(right.clamp(min=SMALLEST))
    return result / result.sum(1, keepdim=True)


def _pairs(clear: Tensor) -> int:
    """Return the number of ordered pairs of the classes to which samples clearly belong."""
    classes = int((clear.sum(0) > 0).sum())
    return classes * (classes - 1)


def spread(clear: Tensor) -> Tensor:
    """Return how evenly mistakes are spread over the pairs of classes; float64, shape ().

    This is the square of the mean rate over the mean of the squared rates, scaled so that it is 0
    if all mistakes are between one pair of classes, and 1 if all pairs have equally many. The
    squares are estimated without the bias that comes from counting few samples. Only classes to
    which samples clearly belong count, because no label uses the others.
    """
    number = clear.sum(0).clamp(min=2)
    pairs = max(_pairs(clear), 2)
    first = (clear / number).fill_diagonal_(0).sum() / pairs
    second = (clear * (clear - 1) / (number * (number - 1))).fill_diagonal_(0).sum() / pairs
    ratio = first**2 / second.clamp(min=SMALLEST**2)
    return ((ratio * pairs - 1) / (pairs - 1)).clamp(0, 1)
