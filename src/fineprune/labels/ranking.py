"""From the evidence to suspects: scores, suggestions, and how many labels are wrong.

The rule belongs to the family of confident learning (Northcutt, Jiang, Chuang, JAIR 2021): the
share of a class is compared with what is usual for the samples of this class, and the labels of the
samples that clearly belong to a class tell which mistakes are frequent. Let q[k] be the share of
class k in the evidence on a sample with the label y. Then

- t[k] is the mean of q[k] over the samples labelled k;
- the tenth of the samples labelled k with the largest q[k] sets a threshold, and the samples whose
  q[k] reaches it, whatever their label, clearly belong to class k;
- J[y, k] estimates the share of the samples labelled y that belong to class k, from the labels of
  those that clearly do;
- the probability of class k is taken as proportional to q[k] / t[k] * J[y, k], and the score is the
  log odds that the class is not y.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fineprune.labels.evidence import Evidence

# The part of the samples of a class that clearly belong to it, and their least number.
_CLEAR, _LEAST_CLEAR = 0.1, 10

# The mean probability of a mistake, times this, is added to that of each mistake. So frequent
# mistakes count for more only if they are much more frequent than others, because hard samples with
# a right label look like mistakes.
_SMOOTHING = 1.0

# No share is below the smallest positive number in half precision.
_SMALLEST = 2.0**-24


@dataclass(frozen=True, eq=False)
class Ranking:
    """What the evidence says of each sample.

    Attributes:
        scores: The log odds that the label is wrong; float32, shape (N,). -inf for a sample that
            was never recorded.
        suggestions: The most probable class besides the label; int64, shape (N,). -1 for a sample
            that was never recorded.
        joint: For a label y and a class k, the estimated number of samples that are labelled y and
            belong to class k; float64, shape (C, C). Row y sums to the number of samples labelled
            y.
    """

    scores: Tensor
    suggestions: Tensor
    joint: Tensor


def rank(evidence: Evidence) -> Ranking:
    """Rank all samples by how much the evidence contradicts their labels.

    Args:
        evidence: The evidence, which has been flushed. All results lie on its device.
    """
    classes = evidence.num_classes
    labels, own = labels_and_shares(evidence)
    known = labels >= 0
    sizes = torch.bincount(labels[known], minlength=classes)
    usual = torch.zeros_like(sizes, dtype=torch.float64).index_add_(
        0, labels[known], own[known].double()
    ) / sizes.clamp(min=1)
    clear = clear_counts(evidence, thresholds(own[known], labels[known], classes))
    prior = smoothed(mistake_rates(clear, sizes)).log()
    # A class without samples suggests itself for none.
    usual = torch.where(sizes > 0, usual, torch.inf).clamp(min=_SMALLEST).log()
    scores = torch.full_like(own, -torch.inf)
    suggestions = torch.full_like(labels, -1)
    joint = torch.zeros(classes, classes, dtype=torch.float64, device=labels.device)
    for chunk in evidence.chunks():
        part = chunk.labels >= 0
        index, given = chunk.index[part], chunk.labels[part]
        logs = chunk.shares[part].clamp(min=_SMALLEST).double().log() - usual + prior[given]
        logs = logs.log_softmax(1)
        joint.index_add_(0, given, logs.exp())
        label = logs.gather(1, given[:, None])[:, 0]
        others = logs.scatter(1, given[:, None], -torch.inf)
        scores[index] = (others.logsumexp(1) - label).float()
        suggestions[index] = others.argmax(1)
    return Ranking(scores, suggestions, joint)


def labels_and_shares(evidence: Evidence) -> tuple[Tensor, Tensor]:
    """Return the label of each sample and its share in the evidence.

    Returns:
        The labels, int64, -1 if unknown; the shares, float32; both of shape (N,).
    """
    labels = evidence.labels.long()
    parts = [
        chunk.shares.gather(1, chunk.labels.clamp(min=0)[:, None])[:, 0]
        for chunk in evidence.chunks()
    ]
    return labels, torch.cat(parts)


def thresholds(own: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the share that a sample of each class needs to belong to it clearly.

    Args:
        own: The share of its label for each sample; float32, shape (n,).
        labels: The labels; int64, shape (n,).
        classes: The number of classes.

    Returns:
        The thresholds; float32, shape (C,). Infinite for a class without samples.
    """
    order = own.argsort(descending=True, stable=True)
    order = order[labels[order].argsort(stable=True)]  # Class after class, large shares first.
    sizes = torch.bincount(labels, minlength=classes)
    number = (sizes * _CLEAR).ceil().long().clamp(min=_LEAST_CLEAR).minimum(sizes)
    last = sizes.cumsum(0) - sizes + number - 1
    reached = own[order][last.clamp(0, len(own) - 1)]
    return torch.where(sizes > 0, reached, torch.inf)


def clear_counts(evidence: Evidence, threshold: Tensor) -> Tensor:
    """Count the samples that clearly belong to each class, by their labels.

    Args:
        evidence: The evidence.
        threshold: The result of ``thresholds``.

    Returns:
        For a label y and a class k, the number of samples labelled y whose share of k reaches the
        threshold; float64, shape (C, C).
    """
    counts = torch.zeros(
        len(threshold), len(threshold), dtype=torch.float64, device=threshold.device
    )
    for chunk in evidence.chunks():
        part = chunk.labels >= 0
        counts.index_add_(0, chunk.labels[part], (chunk.shares[part] >= threshold).double())
    return counts


def mistake_rates(clear: Tensor, sizes: Tensor) -> Tensor:
    """Estimate which share of the samples of each label belongs to each class.

    The samples that clearly belong to a class stand for all that belong to it, of which there are
    assumed to be as many as there are labels of this class.

    Args:
        clear: The result of ``clear_counts``; float64, shape (C, C).
        sizes: The number of samples with each label; int64, shape (C,).

    Returns:
        The shares, float64, shape (C, C). Each row sums to one; that of a label without samples
        is one for its own class.
    """
    classes = torch.arange(len(sizes), device=sizes.device)
    # P(label y | class k) times the number of samples of class k.
    joint = clear / clear.sum(0).clamp(min=1) * sizes
    joint[classes, classes] = joint.diagonal().clamp(min=1.0)
    return joint / joint.sum(1, keepdim=True)


def smoothed(rates: Tensor) -> Tensor:
    """Add to the rate of each mistake a multiple of the mean rate, and scale the rows to one."""
    classes = len(rates)
    mistakes = (1 - rates.diagonal()).sum() / (classes * (classes - 1))
    added = torch.full_like(rates, float(_SMOOTHING * mistakes) + 1e-6).fill_diagonal_(0)
    return (rates + added) / (rates + added).sum(1, keepdim=True)
