"""How far two runs skip, or suspect, the same samples, compared with chance."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from fineprune.inspection.inspected import Inspected
from fineprune.inspection.suspects import suspicion_in
from fineprune.runs.run import split_by


@dataclass(frozen=True)
class Overlap:
    """How far two rankings of the same samples agree.

    Attributes:
        one, other: The names of the runs.
        size: The number of samples that are taken from the top of each ranking.
        jaccard: The size of the intersection of both sets divided by that of their union.
        by_chance: The same value, as expected for two random sets of this size.
        rank_correlation: Spearman's rank correlation of both rankings over all samples that both
            rank. None if it is not defined because all samples of a ranking are equal.
    """

    one: str
    other: str
    size: int
    jaccard: float
    by_chance: float
    rank_correlation: float | None


def skipped_overlaps(runs: Sequence[Inspected], size: int | None = None) -> list[Overlap]:
    """Return the overlap of the most skipped samples for each pair of runs that skip samples.

    Runs on other training samples, or with other labels, are not compared with each other.

    Args:
        runs: The runs.
        size: The number of samples to compare; None for a tenth of all.
    """
    counts = [(run, run.times_skipped().astype(np.float64)) for run in runs]
    return _overlaps(((run, values) for run, values in counts if values.any()), size)


def suspect_overlaps(runs: Sequence[Inspected], size: int | None = None) -> list[Overlap]:
    """Return the overlap of the most suspicious samples for each pair of runs.

    The arguments are those of ``skipped_overlaps``.
    """
    return _overlaps(((run, suspicion_in(run).astype(np.float64)) for run in runs), size)


def expected_jaccard(size: int, samples: int) -> float:
    """Return the Jaccard index that two random sets are expected to have, to first order."""
    common = size * size / samples
    return common / (2 * size - common) if size else 0.0


def largest(
    values: npt.NDArray[Any], size: int | None = None, seed: int = 0
) -> npt.NDArray[np.int64]:
    """Return the samples with the largest values.

    Args:
        values: The value of each sample, NaN for the smallest one; shape (N,).
        size: How many samples to return; None for a tenth of all, at least one.
        seed: Seeds the choice among samples with equal values, which favours no kind of them.
    """
    size = max(1, len(values) // 10) if size is None else size
    chance = np.random.default_rng(seed).random(len(values))
    return np.lexsort((chance, -np.nan_to_num(values, nan=-np.inf)))[:size]


def _overlaps(
    rankings: Iterable[tuple[Inspected, npt.NDArray[np.float64]]], size: int | None
) -> list[Overlap]:
    result = []
    for number, as_many in split_by(lambda ranking: len(ranking[1]), rankings).items():
        # Each run breaks ties with its own random numbers. With the same ones, equal samples would
        # be chosen alike in all runs, and the overlap would exceed chance.
        ranked = [(*of, largest(of[1], size, seed)) for seed, of in enumerate(as_many)]
        for (one, values, top), (other, others, other_top) in combinations(ranked, 2):
            if not np.array_equal(one.labels, other.labels):
                continue
            common = len(np.intersect1d(top, other_top, assume_unique=True))
            known = ~np.isnan(values) & ~np.isnan(others)
            result.append(
                Overlap(
                    one.name,
                    other.name,
                    len(top),
                    common / (2 * len(top) - common) if len(top) else 0.0,
                    expected_jaccard(len(top), number),
                    _rank_correlation(values[known], others[known]),
                )
            )
    return result


def _rank_correlation(
    values: npt.NDArray[np.float64], others: npt.NDArray[np.float64]
) -> float | None:
    if len(values) < 2 or np.ptp(values) == 0 or np.ptp(others) == 0:
        return None
    return float(stats.spearmanr(values, others).statistic)
