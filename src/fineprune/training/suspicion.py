"""How well a suspicion finds the wrong labels, if it is known which labels are wrong."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError
from fineprune.labels.label_watch import LabelWatch
from fineprune.pruning.policies.policy import Policy

# The figures that ``detection`` returns.
FIGURES = ("roc_area", "average_precision", "suspects", "precision", "recall", "r_precision")

_Counts = npt.NDArray[np.int64]


class Suspicion(NamedTuple):
    """Which samples are suspected of wrong labels at one time.

    Attributes:
        values: One value per sample, of which the larger is the more suspicious; float32, shape
            (N,).
        suspects: The number of samples that are called suspicious: the estimated number of wrong
            labels, or what the policy itself suspects. None if it does not say.
    """

    values: torch.Tensor
    suspects: int | None


def suspicion_of(policy: Policy) -> Suspicion | None:
    """Return the current suspicion of a policy; None if it suspects no samples."""
    values = policy.suspicion()
    return None if values is None else Suspicion(values, policy.num_suspects())


def suspicion_by_evidence(watch: LabelWatch) -> Suspicion:
    """Return the suspicion that the evidence on the labels gives."""
    ranking = watch.ranking()
    return Suspicion(ranking.scores.cpu(), ranking.num_suspects)


def detection(suspicion: Suspicion, wrong: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Return how well a suspicion finds the wrong labels.

    Equal values are treated as if they were in a random order: a precision or recall is its mean
    over all orders. For the average precision, samples with equal values have the same rank. NaN is
    the least suspicious value. ``wrong`` says which labels are wrong; bool, shape (N,).

    Returns:
        The figures of ``runs.summary.Detection``, each of which is None if it is not defined.
        ``suspects`` and what follows from it are those of the suspicion.
    """
    values, suspects = suspicion
    if tuple(values.shape) != wrong.shape:
        raise InputError(
            f"expected one value for each of {len(wrong)} samples from suspicion() of the policy, "
            f"got shape {tuple(values.shape)}"
        )
    hits, misses = _tied_groups(values.cpu().numpy(), wrong)
    number = int(hits.sum())
    # The share of the pairs of a wrong and a right label in which the wrong one is the more
    # suspicious, where a pair of equal values counts half (the statistic of Mann and Whitney).
    pairs = number * int(misses.sum())
    less_suspicious = misses.sum() - np.cumsum(misses)
    ordered = int((hits * (2 * less_suspicious + misses)).sum())
    # The sum over the groups of the increase in recall times the precision at the end of the group.
    precision = np.cumsum(hits) / np.cumsum(hits + misses)
    found = _expected_hits(hits, misses, suspects or 0)
    return {
        "roc_area": ordered / (2 * pairs) if pairs else None,
        "average_precision": float((hits * precision).sum()) / number if number else None,
        "suspects": suspects,
        "precision": found / suspects if suspects else None,
        # With no suspects, it is 0. If it were None, a mean over seeds would be too high.
        "recall": found / number if number and suspects is not None else None,
        "r_precision": _expected_hits(hits, misses, number) / number if number else None,
    }


def _expected_hits(hits: _Counts, misses: _Counts, chosen: int) -> float:
    """Return how many of the ``chosen`` most suspicious labels are wrong.

    If the last group is chosen in part only, the result is the mean over all ways to choose from
    it.
    """
    sizes = hits + misses
    taken = np.clip(chosen - (np.cumsum(sizes) - sizes), 0, sizes)
    return float((hits * (taken / sizes)).sum())


def _tied_groups(
    values: npt.NDArray[np.floating], wrong: npt.NDArray[np.bool_]
) -> tuple[_Counts, _Counts]:
    """Count the wrong and the right labels with each value, from the largest value to the least."""
    ranked = np.where(np.isnan(values), -np.inf, values)
    distinct, group = np.unique(ranked, return_inverse=True)
    hits = np.bincount(group[wrong], minlength=len(distinct))[::-1]
    misses = np.bincount(group[~wrong], minlength=len(distinct))[::-1]
    return hits.astype(np.int64), misses.astype(np.int64)
