"""From the evidence to suspects: scores, suggestions, and how many labels are wrong.

The rule belongs to the family of confident learning (Northcutt, Jiang, Chuang, JAIR 2021): the
share of a class is compared with what is usual for the samples of this class, and the labels of the
samples that clearly belong to a class tell which mistakes are frequent. Let q[k] be the share of
class k in the evidence on a sample with the label y. Then

- t[k] is the mean of q[k] over the samples labelled k, and at least half of the mean of q[y] over
  all samples, because any share would be large beside that of a class that was not learned. A
  single sample says nothing of what is usual, so t[k] is then the mean of q[y] over all samples.
- The fifth of the samples labelled k with the largest q[k] sets a threshold; in a small class, ten
  samples do, but at most half of them. It is at least half of the share of each class in an
  untrained network. All samples whose q[k] reaches it and is at least half of q[y], whatever their
  label, clearly belong to class k. ``clear_counts`` counts them.
- J[y, k] is the share of the samples labelled y that belong to class k. ``mistake_rates`` estimates
  it from these counts.
- P[k] is proportional to q[k] / t[k] * J'[y, k], where J' is J with the rates of the mistakes drawn
  towards their mean, the more so the more evenly they are spread and the fewer samples they come
  from. Hard samples look like mistakes between similar classes, and only frequent mistakes in few
  pairs of classes stand out against that. ``drawn_together`` does this. If no class was learned,
  all rates are their mean.
- The score is the log of (1 - P[y]) / P[y] plus a constant, and the suggestion is the other class
  with the largest P[k].
- A network that answers nearly all samples as they are labelled has learned the wrong labels by
  heart, and what tells them is how often it answered otherwise before. So the log of this share of
  the visits is added to the score, the less J says of single mistakes the earlier. ``by_heart``
  says to which part it is added.
- A sample contradicts its label if q[k] / t[k] of another class is more than twice q[y] / t[y]. The
  number of wrong labels is estimated by J, by counting the samples that contradict, and, if they
  were learned by heart, by counting those that were ``learned_late``. The largest estimate counts.
  Wrong labels that are rarely trained belong to no class clearly, so J misses them; frequent
  mistakes between two classes are learned as if they were right, so few of their samples
  contradict; and nothing contradicts that was learned by heart long ago.
- The constant makes as many scores positive as labels are estimated to be wrong. It changes the
  prior of a mistake, which J alone would make too small where it misses labels.
- If mistakes are in few pairs of classes, the samples that rank first are called confused, as many
  as J estimates to be wrong. If mistakes are spread evenly, the loss ranks them better.
- Mistakes are consistent if J estimates more of them than samples contradict. In trainings with
  correct labels, it estimates fewer, at the latest one epoch after most samples are learned.
- The other samples, which are no suspects, are learned if their labels have more than half of the
  evidence, on average; with half of the labels wrong, where no label has, if the network is
  ``settled``. Then, some wrong labels may have been learned, too, and are among them.

The functions below name y of each recorded sample ``labels``, int64, and q[y] ``own``, float32, of
shape (n,); the number of samples labelled so for each class ``sizes``, int64, shape (C,); and the
result of ``clear_counts`` ``clear``.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fineprune.labels.evidence import Evidence

# The part of the samples of a class that clearly belong to it, and their least number.
_CLEAR, _LEAST_CLEAR = 0.2, 10

# The least share of a sample that clearly belongs to a class, beside that of its label and that of
# an untrained network, and the least t[k], beside the mean share of all labels.
_LEAST_BESIDE = 0.5

# A class with fewer samples than this part of the mean of all classes is rare.
_RARE = 0.5

# How far above chance the largest threshold is in a network that has learned something: 0 if it is
# that of an untrained network, and 1 for certainty. Below the first number, it has learned nothing.
_UNLEARNED, _SOMETHING = 0.1, 0.2

# The share of the samples that are answered as they are labelled from which on a network begins to
# have learned its labels by heart, and from which on it has. Both are smaller by up to the last
# number if J says nothing of single mistakes.
_BEGINS_BY_HEART, _BY_HEART, _EARLIER = 0.95, 0.98, 0.05

# By how many standard deviations more samples must have been learned late than in between.
_DEVIATIONS = 2.5

# Steps in which the number of samples of each class is estimated. Few, because what is estimated
# from few clear samples would be taken too far.
_STEPS = 2

# If a few dozen samples clearly belong to a class, a single one of them would make its mistake seem
# far more frequent than one that none has. From 42 on, only the first of two parts counts.
_FEW = 12

# From this spread on (0 for mistakes in one pair of classes, 1 for equally many in all pairs), all
# mistakes are taken to be equally frequent.
_EVEN = 1 / 3

# Of a class that was not learned, more than this share are suspects. Beside them, so many times the
# share of the other classes are, or nearly all, and they are at least so many: a few samples with
# wrong labels are no class (docs/results/adaptive.md, "Small classes").
_NOT_LEARNED = 2 / 3
_BESIDE_OTHERS, _NEARLY_ALL, _FEWEST = 1.5, 0.95, 5

# Below this share of wrong labels, all labels count as right: skipping was not measured to pay.
FEW_WRONG = 0.05

# Before the first number of visits of each sample, the estimate of the number of wrong labels is
# far too high, and from the second one on, it is not too high.
EARLY, ENOUGH = 10, 20

# With smaller shares of samples with a loss near zero and of samples that the network answers as
# they are labelled, it has learned little, and the estimate is far too high. The second one matters
# if many labels are wrong, since few losses are near zero then. It was at most 0.49 where the
# estimate was far too high, and at least 0.56 in full trainings of 30 epochs where it was right
# (docs/results/labels.md). With half of the labels wrong, it is as small in any network. One that
# has learned the others well answers these as they are labelled in most visits, on average: in more
# than 70 %, and in at most 63 % where most suspects had correct labels (small networks).
_NEAR_ZERO = 0.1  # as a share of the loss of chance
_FEW_NEAR_ZERO, _FEW_ANSWERED, _SETTLED = 0.05, 0.55, 0.7

# Between these shares of its visits, the network wavers whether to answer a sample as labelled.
_WAVERS = 0.2, 0.8

# After 30 epochs of the trainings of docs/results/labels.md, one counts 1.4 to 3.2 times the true
# number of wrong labels, because hard samples count, and five counts 0.2 to 0.6 times as many.
_CONTRADICTS = 2.0

# No share is below the smallest positive number in half precision.
_SMALLEST = 2.0**-24


@dataclass(frozen=True, eq=False)
class Ranking:
    """What the evidence says about each sample.

    Attributes:
        labels: The label of each sample; int64, shape (N,). -1 for a sample that was never
            recorded.
        scores: The log odds that each label is wrong; float32, shape (N,). As many are positive as
            labels are estimated to be wrong, unless scores are equal. -inf for a sample that was
            never recorded.
        suggestions: The most probable class besides the label; int64, shape (N,). -1 for a sample
            that was never recorded.
        joint: The estimated number of samples labelled y that belong to class k, for each y and k;
            float64, shape (C, C). Row y sums to the number of samples labelled y.
        confused: Which labels are probably confused with another class, if most mistakes are in few
            pairs of classes (otherwise, none); bool, shape (N,).
        consistent: Whether the estimate in ``joint`` is at least the number of samples that
            contradict their labels.
        learned: Whether the samples that are not suspects were learned.
        learned_little: Whether the network has learned so little that far too many labels look
            wrong.
        answered: The share of the recorded samples whose label has the largest mean softmax.
        by_heart: Whether wrong labels were learned by heart, so that ``learned_late`` counts them.
        visits: The mean number of visits of the recorded samples, rounded.
        near_zero: The share of the recorded samples whose mean loss is near zero.
        agreed: The share of the visits of each sample in which the network answered it as it is
            labelled; float32, shape (N,). NaN for a sample that was never recorded.
    """

    labels: Tensor
    scores: Tensor
    suggestions: Tensor
    joint: Tensor
    confused: Tensor
    consistent: bool
    learned: bool
    learned_little: bool
    answered: float
    by_heart: bool
    visits: int
    near_zero: float
    agreed: Tensor

    @property
    def num_suspects(self) -> int:
        """The estimated number of wrong labels, rounded."""
        return round(num_wrong(self.joint))

    @property
    def unlearned(self) -> Tensor:
        """Which samples belong to classes that were not learned, most of which are suspects.

        Returns:
            bool, shape (N,).
        """
        return of_unlearned_classes(self.labels, self.scores > 0, _NOT_LEARNED)

    @property
    def to_skip(self) -> Tensor:
        """Which suspects to train without: not those of classes that were not learned or are rare.

        A class is rare if it has fewer than half as many samples as classes have on average. Its
        hard samples are suspects more often than those of other classes, and are missed more.

        Returns:
            bool, shape (N,).
        """
        sizes = self.labels[self.labels >= 0].bincount(minlength=len(self.joint))
        return (self.scores > 0) & ~self.unlearned & ~rare_classes(sizes)[self.labels]

    @property
    def to_skip_again(self) -> Tensor:
        """Which suspects to train without in a second training, from its first epoch on.

        After 20 visits, or if labels were learned by heart, these are those ``to_skip``. Before,
        many suspects are hard samples, and where labels are right, they can be most of a part of
        their class, which the second training would not learn. So those over which the network
        wavers are not skipped either, and none is if the others are fewer than 5 % of the samples.
        With fewer than 10 visits, or if the network has ``learned_little``, none is skipped at all.

        Returns:
            bool, shape (N,).
        """
        to_skip = self.to_skip
        if self.too_early:
            return torch.zeros_like(to_skip)
        if self.visits < ENOUGH and not self.by_heart:
            to_skip &= (self.agreed <= _WAVERS[0]) | (self.agreed >= _WAVERS[1])
            if int(to_skip.sum()) < FEW_WRONG * int((self.labels >= 0).sum()):
                return torch.zeros_like(to_skip)
        return to_skip

    @property
    def too_early(self) -> bool:
        """Whether there were fewer than 10 visits, or the network has ``learned_little``."""
        return self.visits < EARLY or self.learned_little

    def suspects(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what ``LabelWatch.suspects`` does."""
        scores, suggestions = self.scores.cpu(), self.suggestions.cpu()
        indices = scores.argsort(descending=True, stable=True)
        return indices, scores[indices], suggestions[indices]


def rank(evidence: Evidence) -> Ranking:
    """Rank all samples by how much the evidence contradicts their labels, and count wrong labels.

    Args:
        evidence: The evidence, which has been flushed. The ranking lies on its device if that is a
            CPU or a CUDA GPU. Others may have no float64, so theirs lies on the CPU.
    """
    if evidence.labels.device.type not in ("cpu", "cuda"):
        evidence = evidence.on_cpu()
    labels, own = labels_and_shares(evidence)
    known = labels >= 0
    classes = evidence.num_classes
    sizes = torch.bincount(labels[known], minlength=classes)
    threshold = thresholds(own[known], labels[known], sizes)
    clear = clear_counts(evidence, threshold)
    estimated = mistake_rates(clear, sizes)
    drawn = drawn_part(clear)
    untrained = unlearned_part(threshold)
    rates = drawn_together(estimated, clear, drawn, untrained)
    usual = usual_shares(own[known], labels[known], sizes)
    factors = (rates / usual).float()
    scores = torch.full_like(own, -torch.inf)
    suggestions = torch.full_like(labels, -1)
    seeming = labels.clone()
    answered = 0
    for chunk in evidence.chunks():
        part = chunk.labels >= 0
        index, given = chunk.index[part], chunk.labels[part, None]
        shares = chunk.shares[part]
        answered += int((shares.argmax(1) == given[:, 0]).sum())
        wrong = contradicting(shares, given, usual)
        odds = shares.clamp(min=_SMALLEST) * factors[given[:, 0]]
        # If only one class was recorded, all odds of the others are zero.
        logs = odds.clamp(min=torch.finfo(odds.dtype).tiny).log()
        others = logs.scatter(1, given, -torch.inf)
        scores[index] = others.logsumexp(1) - logs.gather(1, given)[:, 0]
        suggestions[index] = others.argmax(1)
        seeming[index] = torch.where(wrong, suggestions[index], given[:, 0])
    by_samples = pair_counts(labels[known], seeming[known], classes)
    by_rates = estimated * sizes[:, None]
    joint = max(by_rates, by_samples, key=num_wrong)
    consistent = joint is by_rates
    share_answered = answered / int(known.sum())
    used = clear.sum(0) > 0
    mean_drawn = float(drawn[used].sum() / used.sum().clamp(min=1))
    heart = by_heart(share_answered, mean_drawn)
    scores += heart * otherwise_part(evidence).log()
    if heart == 1:
        late = torch.where(learned_late(evidence, labels, sizes), suggestions, labels)
        joint = max(joint, pair_counts(labels[known], late[known], classes), key=num_wrong)
    scores -= level_between(scores[known], round(num_wrong(joint)))
    number = round(num_wrong(by_rates)) if spread(clear) < _EVEN else 0
    confused = scores > level_between(scores[known], number)
    near_zero = (evidence.loss[known] < _NEAR_ZERO * math.log(classes)).float().mean()
    uncertain = float(near_zero) < _FEW_NEAR_ZERO and share_answered < _FEW_ANSWERED
    agreed = evidence.agreed / evidence.visits
    suspects = scores > 0
    well = not untrained and settled(agreed, labels, suspects)
    return Ranking(
        labels,
        scores,
        suggestions,
        joint,
        confused,
        consistent=consistent,
        learned=well if uncertain else float(own[known & ~suspects].mean()) > 1 / 2,
        learned_little=uncertain and not well,
        answered=share_answered,
        by_heart=heart == 1,
        visits=round(float(evidence.visits[known].float().mean())),
        near_zero=float(near_zero),
        agreed=agreed,
    )


def settled(agreed: Tensor, labels: Tensor, suspects: Tensor) -> bool:
    """Return whether a network answered most samples that are no suspects as they are labelled.

    Suspects of classes that were not learned count as well.

    Args:
        agreed: The share of the visits of each sample in which it was answered so; shape (N,).
        labels: The labels; int64, shape (N,), -1 if unknown.
        suspects: Which samples are suspects; bool, shape (N,).
    """
    unlearned = of_unlearned_classes(labels, suspects, _NOT_LEARNED)
    counted = (labels >= 0) & (~suspects | unlearned)
    return float(agreed[counted].mean()) > _SETTLED


def rare_classes(sizes: Tensor) -> Tensor:
    """Return which classes have fewer than half as many samples as classes have on average.

    Classes without samples do not count for the average.
    """
    return sizes < _RARE * (sizes.sum() / (sizes > 0).sum())


def of_unlearned_classes(
    labels: Tensor, marked: Tensor, least: float, counted: Tensor | None = None
) -> Tensor:
    """Return which samples belong to classes that look wrong as a whole; bool, shape (N,).

    Args:
        labels: The labels; int64, shape (N,), -1 if unknown.
        marked: Which samples look wrong; bool, shape (N,).
        least: More than this share of such a class are marked.
        counted: Which samples count for the shares; bool, shape (N,). By default, all of them.
    """
    known = labels >= 0
    used = known if counted is None else known & counted
    classes = max(int(labels.max()) + 1, 1)
    sizes = labels[used].bincount(minlength=classes)
    numbers = labels[used & marked].bincount(minlength=classes)
    shares = numbers / sizes.clamp(min=1)
    others = (numbers.sum() - numbers) / (sizes.sum() - sizes).clamp(min=1)
    beside = (_BESIDE_OTHERS * others).clamp(max=_NEARLY_ALL)
    unlearned = (shares > least) & (shares > beside) & (sizes >= _FEWEST)
    return known & unlearned[labels]


def usual_shares(own: Tensor, labels: Tensor, sizes: Tensor) -> Tensor:
    """Return the share of each class that is usual for its samples, t; float64, shape (C,).

    It is infinite for a class without samples.
    """
    shares = own.double()
    sums = torch.zeros(len(sizes), dtype=torch.float64, device=own.device)
    mean = shares.mean()
    means = torch.where(sizes == 1, mean, sums.index_add(0, labels, shares) / sizes)
    usual = means.maximum(_LEAST_BESIDE * mean).clamp(min=_SMALLEST)
    return torch.where(sizes > 0, usual, torch.inf)


def by_heart(answered: float, drawn: float) -> float:
    """Return to which part a network has learned its labels by heart.

    Args:
        answered: The share of the samples that it answers as they are labelled.
        drawn: The mean of ``drawn_part`` over the classes to which samples clearly belong.
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
    fifth = (sizes * _CLEAR).ceil().long()
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


def level_between(scores: Tensor, number: int) -> float:
    """Return a level above which lie so many scores, or fewer if some of them are equal.

    The smallest score never lies above it.
    """
    ranked = scores.sort(descending=True).values
    number = min(number, len(scores) - 1)
    return float(ranked[max(number - 1, 0)] + ranked[number]) / 2


def contradicting(shares: Tensor, given: Tensor, usual: Tensor) -> Tensor:
    """Return which samples contradict their labels; bool, shape (n,).

    Args:
        shares: The share of each class for each sample; float32, shape (n, C).
        given: The labels; int64, shape (n, 1).
        usual: The result of ``usual_shares``.
    """
    beside_usual = shares / usual.float()
    own = beside_usual.gather(1, given)[:, 0]
    return beside_usual.scatter_(1, given, 0).amax(1) > _CONTRADICTS * own


def pair_counts(labels: Tensor, seeming: Tensor, classes: int) -> Tensor:
    """Count the samples with each label that seem to belong to each class; float64, shape (C, C).

    ``seeming`` holds these classes; int64, shape (n,).
    """
    pairs = labels * classes + seeming
    return pairs.bincount(minlength=classes**2).view(classes, classes).double()


def num_wrong(joint: Tensor) -> float:
    """Return the number of wrong labels in the ``joint`` of a ranking."""
    return float(joint.sum() - joint.trace())


def labels_and_shares(evidence: Evidence) -> tuple[Tensor, Tensor]:
    """Return the label of each sample, int64, -1 if unknown, and its share, float32; (N,) each."""
    labels = evidence.labels.long()
    own = torch.empty_like(evidence.weight)
    for chunk in evidence.chunks():
        own[chunk.index] = chunk.shares.gather(1, chunk.labels.clamp(min=0)[:, None])[:, 0]
    return labels, own


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
        numbers = numbers * (given.T @ (labelled / expected.clamp(min=_SMALLEST)))
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
    result = torch.lerp(rates, mean.expand_as(rates), part.expand_as(rates)) + _SMALLEST
    right = rates.diagonal()
    used = clear.sum(0) > 0
    right = torch.where(used, torch.lerp(right, right[used].mean(), unlearned), right)
    result.diagonal().copy_(right.clamp(min=_SMALLEST))
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
    ratio = first**2 / second.clamp(min=_SMALLEST**2)
    return ((ratio * pairs - 1) / (pairs - 1)).clamp(0, 1)
