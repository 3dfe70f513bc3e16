"""Labels that a network has memorised, the wrong ones included.

The shares of the classes then no longer contradict the wrong ones. What tells them from the right
ones is how often, and for how long, the network answered otherwise before.
"""

import math

from torch import Tensor

from fineprune.labels.evidence import Evidence
from fineprune.labels.mistakes import nth_of_class

# From the first share of samples that are answered as they are labelled, a network begins to have
# learned its labels by heart; from the second one on, it has. Both are smaller by up to the last
# number if the rates of the mistakes say nothing of single ones.
_BEGINS_BY_HEART, _BY_HEART, _EARLIER = 0.95, 0.98, 0.05

# The part of the samples of a class that is learned first.
_FIRST = 0.2

# By how many standard deviations more samples must have been learned late than in between.
_DEVIATIONS = 2.5


def by_heart(answered: float, drawn: float) -> float:
    """Return to which part a network has learned its labels by heart.

    Args:
        answered: The share of the samples that it answers as they are labelled.
        drawn: To which part the rates of its mistakes were drawn; see ``Mistakes.part``.
    """
    begins = _BEGINS_BY_HEART - _EARLIER * drawn**2
    return min(max((answered - begins) / (_BY_HEART - _BEGINS_BY_HEART), 0.0), 1.0)


def otherwise_part(evidence: Evidence) -> Tensor:
    """Return in which share of its visits each sample was answered otherwise, shape (N,).

    Half a visit is added for each answer, so that no share is 0.
    """
    return (evidence.visits - evidence.agreed + 0.5) / (evidence.visits + 1)


def learned_late(evidence: Evidence, labels: Tensor, sizes: Tensor) -> Tensor:
    """Return which samples were learned clearly later than most; bool, shape (N,).

    Let n be how often a sample was answered otherwise before it was learned, as a multiple of how
    often this happened at most to the first fifth of its class, because a class may be learned late
    as a whole. Where labels are right, the number of samples with n falls at least as fast as
    1 / n. Wrong labels take longer to learn, so there is a valley, and behind it a hill. Each of
    the two ends where n is half as large again as at its beginning. The valley is chosen that makes
    the hill the highest beside it, and the samples behind the valley were learned late. None was if
    no hill is clearly higher than 1 / n allows, or if fewer than half of the samples lie before the
    valley.

    Args:
        labels: Those of all samples; int64, shape (N,), -1 if unknown.
    """
    known = labels >= 0
    otherwise = evidence.visits - evidence.agreed
    fifth = (sizes * _FIRST).ceil().long()
    times = nth_of_class(otherwise[known], labels[known], sizes, fifth).clamp(min=1)
    otherwise = otherwise // times[labels]
    counts = otherwise[known].bincount()
    at_least = counts.flip(0).cumsum(0).flip(0).tolist()
    most = len(at_least)
    at_least += [0] * (2 * most)
    rise, first = 1.0, most
    for start in range(2, most):
        middle = start + start // 2
        end = middle + middle // 2
        wider = math.log(end / middle) / math.log(middle / start)
        valley = wider * (at_least[start] - at_least[middle])
        hill = at_least[middle] - at_least[end]
        clearly = hill - valley > _DEVIATIONS * math.sqrt(hill + wider * valley)
        if clearly and at_least[start] <= at_least[0] / 2 and (hill + 1) / (valley + 1) > rise:
            rise, first = (hill + 1) / (valley + 1), middle
    return otherwise >= first
