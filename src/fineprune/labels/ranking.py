"""From the evidence to suspects: scores, suggestions, and how many labels are wrong.

The rule belongs to the family of confident learning (Northcutt, Jiang, Chuang, JAIR 2021): the
share of a class is compared with what is usual for the samples of this class, and the labels of the
samples that clearly belong to a class tell which mistakes are frequent. Let q[k] be the share of
class k in the evidence on a sample with the label y. Then

- t[k] is the mean of q[k] over the samples labelled k, and at least half of the mean of q[y] over
  all samples, because any share would be large beside that of a class that was not learned. A
  single sample says nothing of what is usual, so t[k] is then the mean of q[y] over all samples.
- P[k] is proportional to q[k] / t[k] * J'[y, k], where J' says which mistakes are frequent
  (``mistakes.py``).
- The score is the log of (1 - P[y]) / P[y] plus a constant, and the suggestion is the other class
  with the largest P[k].
- A network that answers nearly all samples as they are labelled has learned the wrong labels by
  heart (``by_heart.py``). So the log of the share of the visits in which it answered otherwise is
  added to the score, the less J says of single mistakes the earlier.
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
  settled: it answered them, and those of classes that were not learned, as they are labelled in
  most visits. Then, some wrong labels may have been learned, too, and are among them.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fineprune.labels.by_heart import by_heart, learned_late, otherwise_part
from fineprune.labels.evidence import Evidence
from fineprune.labels.mistakes import SMALLEST, estimate_mistakes
from fineprune.labels.spared_classes import of_unlearned_classes, rare_classes

# The least t[k], beside the mean share of all labels.
_LEAST_BESIDE = 0.5

# Of a class that was not learned, more than this share are suspects.
_NOT_LEARNED = 2 / 3

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
        unlearned: Which samples belong to classes that were not learned, most of which are
            suspects; bool, shape (N,).
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
    unlearned: Tensor

    @property
    def num_suspects(self) -> int:
        """The estimated number of wrong labels, rounded."""
        return round(num_wrong(self.joint))

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
    mistakes = estimate_mistakes(evidence, own[known], labels[known], sizes)
    usual = usual_shares(own[known], labels[known], sizes)
    factors = (mistakes.drawn / usual).float()
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
        odds = shares.clamp(min=SMALLEST) * factors[given[:, 0]]
        # If only one class was recorded, all odds of the others are zero.
        logs = odds.clamp(min=torch.finfo(odds.dtype).tiny).log()
        others = logs.scatter(1, given, -torch.inf)
        scores[index] = others.logsumexp(1) - logs.gather(1, given)[:, 0]
        suggestions[index] = others.argmax(1)
        seeming[index] = torch.where(wrong, suggestions[index], given[:, 0])
    by_samples = pair_counts(labels[known], seeming[known], classes)
    by_rates = mistakes.rates * sizes[:, None]
    joint = max(by_rates, by_samples, key=num_wrong)
    consistent = joint is by_rates
    share_answered = answered / int(known.sum())
    heart = by_heart(share_answered, mistakes.part)
    scores += heart * otherwise_part(evidence).log()
    if heart == 1:
        late = torch.where(learned_late(evidence, labels, sizes), suggestions, labels)
        joint = max(joint, pair_counts(labels[known], late[known], classes), key=num_wrong)
    scores -= level_between(scores[known], round(num_wrong(joint)))
    number = round(num_wrong(by_rates)) if mistakes.in_few_pairs else 0
    confused = scores > level_between(scores[known], number)
    near_zero = (evidence.loss[known] < _NEAR_ZERO * math.log(classes)).float().mean()
    uncertain = float(near_zero) < _FEW_NEAR_ZERO and share_answered < _FEW_ANSWERED
    agreed = evidence.agreed / evidence.visits
    suspects = scores > 0
    unlearned = of_unlearned_classes(labels, suspects, _NOT_LEARNED)
    rest = agreed[known & (~suspects | unlearned)]
    settled = mistakes.unlearned == 0 and float(rest.mean()) > _SETTLED
    return Ranking(
        labels,
        scores,
        suggestions,
        joint,
        confused,
        consistent=consistent,
        learned=settled if uncertain else float(own[known & ~suspects].mean()) > 1 / 2,
        learned_little=uncertain and not settled,
        answered=share_answered,
        by_heart=heart == 1,
        visits=round(float(evidence.visits[known].float().mean())),
        near_zero=float(near_zero),
        agreed=agreed,
        unlearned=unlearned,
    )


def usual_shares(own: Tensor, labels: Tensor, sizes: Tensor) -> Tensor:
    """Return the share of each class that is usual for its samples, t; float64, shape (C,).

    It is infinite for a class without samples.
    """
    shares = own.double()
    sums = torch.zeros(len(sizes), dtype=torch.float64, device=own.device)
    mean = shares.mean()
    means = torch.where(sizes == 1, mean, sums.index_add(0, labels, shares) / sizes)
    usual = means.maximum(_LEAST_BESIDE * mean).clamp(min=SMALLEST)
    return torch.where(sizes > 0, usual, torch.inf)


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
