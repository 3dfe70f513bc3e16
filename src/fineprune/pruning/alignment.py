"""Alignment: how well the losses of each sample follow those of clean samples over the epochs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError, explaining

# Number of samples per block, so that many samples need little more memory than their losses.
_BLOCK = 1 << 16

Floats = npt.NDArray[np.float32]


def alignment(trajectories: Floats, clean: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the correlation of each sample's losses with the mean losses of the clean samples.

    Args:
        trajectories: The loss of each sample in each epoch, NaN in one that skipped it; float32,
            shape (epochs, N).
        clean: The indices of the clean samples, int64, shape (n,).

    Returns:
        Pearson's correlation over the epochs in which both are known, NaN where it is undefined;
        float64, shape (N,).
    """
    of_clean = trajectories[:, clean].astype(np.float64)
    number = np.count_nonzero(~np.isnan(of_clean), axis=1)
    with np.errstate(invalid="ignore"):  # The mean of no losses.
        means = np.nansum(of_clean, axis=1) / number
    total = trajectories.shape[1]
    blocks = [trajectories[:, at : at + _BLOCK] for at in range(0, total, _BLOCK)]
    return np.concatenate([np.zeros(0), *(_correlations(block, means) for block in blocks)])


def _correlations(block: Floats, means: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the correlation of each column with the means, where neither is NaN."""
    known = ~np.isnan(block) & ~np.isnan(means)[:, None]
    number = known.sum(0)
    with np.errstate(invalid="ignore"):  # No epochs, or only one.
        x, y = (np.where(known, of, 0.0) for of in (block.astype(np.float64), means[:, None]))
        x = np.where(known, x - x.sum(0) / number, 0.0)
        y = np.where(known, y - y.sum(0) / number, 0.0)
        result: npt.NDArray[np.float64] = (x * y).sum(0) / np.sqrt((x * x).sum(0) * (y * y).sum(0))
    return result


def clean_indices(reference: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of the clean samples in ascending order. InputError: they are wrong."""
    with explaining("expected reference as whole numbers", (TypeError, ValueError)):
        values = np.asarray(reference)
    whole = values.ndim == 1 and values.dtype.kind in "iu"
    ascending = np.unique(values).tolist() if whole else []
    if not len(ascending) or len(ascending) < len(values) or ascending[0] < 0:
        raise InputError(
            f"expected reference as one or more different indices of at least 0, got "
            f"{reference!r}: give the indices of clean samples"
        )
    return tuple(ascending)


def lowest(
    values: npt.NDArray[Any], number: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Return the indices of the ``number`` smallest values (none NaN), of at least one.

    The random stream chooses among equal values, so the result is the same on every machine.
    """
    largest = np.partition(values, number - 1)[number - 1]
    below = np.flatnonzero(values < largest)
    equal = np.flatnonzero(values == largest)
    missing = number - len(below)
    if missing < len(equal):
        equal = rng.choice(equal, missing, replace=False, shuffle=False)
    return np.concatenate([below, equal])
