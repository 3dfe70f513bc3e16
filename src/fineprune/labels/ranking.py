"""From the evidence to suspects: the one rule by which labels are ranked.

The rule belongs to the family of confident learning (Northcutt, Jiang, Chuang, JAIR 2021). Let q[k]
be the mean softmax of class k over the visits of a sample, and y its label. Then

- t[k] is the usual share of class k: the mean of q[k] over the samples labelled k and one more
  sample, whose share is the mean of q[y] over all samples. So a class with many samples has a t[k]
  of its own, and a class with few or none has nearly that of all.
- J[y, k] counts the samples labelled y whose largest q[k] / t[k] is that of class k (of y, if
  several are the largest) and at least one, and half a sample more: the confident joint, which
  tells frequent mistakes from rare ones.
- l[k] = log q[k] - log t[k] + log(J[y, k]) / 4 for each class k.
- The score is the largest l[k] of another class than y, minus l[y]. The suggestion is that class.
- A sample is a suspect if its score is above 0. The number of suspects is the estimated number of
  wrong labels.

Where the numbers come from: with a quarter of log J, both random and consistent mistakes are ranked
well; none of it ranks consistent mistakes worse, and all of it random ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fineprune.labels.evidence import Chunk, Evidence

# The power of the confident joint.
_JOINT_POWER = 0.25

# No share is below the smallest positive number in half precision.
_SMALLEST = 2.0**-24


@dataclass(frozen=True, eq=False)
class Ranking:
    """What the evidence says about each sample.

    Attributes:
        labels: The label of each sample; int64, shape (N,). -1 for one that was never recorded.
        scores: How strongly another class contradicts each label, above 0 for suspects; float32,
            shape (N,). -inf for one that was never recorded.
        suggestions: This class; int64, shape (N,). -1 for one that was never recorded.
        answered: The share of the samples labelled k whose largest mean softmax is that of class k;
            float64, shape (C,). NaN for a class without samples.
        visits: The mean number of visits of the recorded samples.
    """

    labels: Tensor
    scores: Tensor
    suggestions: Tensor
    answered: Tensor
    visits: float

    @property
    def num_suspects(self) -> int:
        """The number of suspects, which is the estimated number of wrong labels."""
        return int((self.scores > 0).sum())

    @property
    def joint(self) -> Tensor:
        """The number of samples labelled y that seem to belong to class k; int64, shape (C, C).

        These are all recorded samples: suspects under their suggestions, the others under their
        labels.
        """
        seeming = torch.where(self.scores > 0, self.suggestions, self.labels)
        known = self.labels >= 0
        classes = len(self.answered)
        pairs = self.labels[known] * classes + seeming[known]
        return pairs.bincount(minlength=classes**2).view(classes, classes)

    def suspects(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what ``LabelWatch.suspects`` does."""
        scores, suggestions = self.scores.cpu(), self.suggestions.cpu()
        indices = scores.argsort(descending=True, stable=True)
        return indices, scores[indices], suggestions[indices]


def rank(evidence: Evidence) -> Ranking:
    """Rank all samples by how much the evidence, which was flushed, contradicts their labels.

    The ranking lies on its device if that is a CPU or a CUDA GPU. Others may have no float64.
    """
    if evidence.labels.device.type not in ("cpu", "cuda"):
        evidence = evidence.on_cpu()
    classes = evidence.num_classes
    labels = evidence.labels.long()
    known = labels >= 0
    sizes = labels[known].bincount(minlength=classes)
    own, is_strongest = torch.zeros_like(evidence.loss), torch.zeros_like(known)
    for part in _known(evidence):
        own[part.index] = part.shares.gather(1, part.labels[:, None])[:, 0]
        is_strongest[part.index] = part.shares.argmax(1) == part.labels
    usual = usual_shares(own[known], labels[known], sizes)
    # The joint has a row and a column for each class: in float32, which counts to 16 million.
    joint = torch.full((classes, classes), 0.5, device=labels.device)
    for part in _known(evidence):
        ratios = part.shares / usual
        largest, strongest = ratios.max(1)
        of_label = ratios.gather(1, part.labels[:, None])[:, 0]
        strongest = torch.where(of_label == largest, part.labels, strongest)
        joint.index_put_((part.labels, strongest), (largest >= 1).float(), accumulate=True)
    factors = (_JOINT_POWER * joint.log()).sub_(usual.log())
    scores = torch.full_like(evidence.loss, -torch.inf)
    suggestions = torch.full_like(labels, -1)
    for part in _known(evidence):
        given = part.labels[:, None]
        logs = part.shares.clamp_(min=_SMALLEST).log_().add_(factors[part.labels])
        of_label = logs.gather(1, given)[:, 0]
        largest, suggestions[part.index] = logs.scatter_(1, given, -torch.inf).max(1)
        scores[part.index] = largest - of_label
    answered = labels[is_strongest].bincount(minlength=classes).double() / sizes
    visits = float(evidence.visits[known].double().mean())
    return Ranking(labels, scores, suggestions, answered, visits)


def usual_shares(own: Tensor, labels: Tensor, sizes: Tensor) -> Tensor:
    """Return the usual share of each class, t; float32, shape (C,).

    Args:
        own: The share q[y] of each recorded sample; float32, shape (n,).
        labels: Their labels; int64, shape (n,).
        sizes: The samples of each class; int64, shape (C,).
    """
    shares = own.double()
    sums = torch.zeros(len(sizes), dtype=torch.float64, device=own.device)
    means = (sums.index_add_(0, labels, shares) + shares.mean()) / (sizes + 1)
    return means.clamp_(min=_SMALLEST).float()


def _known(evidence: Evidence) -> Iterator[Chunk]:
    """Yield the evidence on the samples that were recorded."""
    for chunk in evidence.chunks():
        known = chunk.labels >= 0
        if not known.all():
            chunk = Chunk(chunk.index[known], chunk.labels[known], chunk.shares[known])
        yield chunk
