"""The samples with the smallest values, in linear time and with random ties."""

from typing import Any

import numpy as np
import numpy.typing as npt


def lowest(
    values: npt.NDArray[Any], number: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Return the indices of the ``number`` smallest values, in no particular order.

    Which indices are returned depends on the values and the random stream only, so that it is the
    same on every machine.

    Args:
        values: Numbers, none of which is NaN, shape (N,).
        number: How many indices to return, from 0 to N.
        rng: Chooses among equal values if not all of them are returned.
    """
    if not number:
        return np.empty(0, dtype=np.int64)
    largest = np.partition(values, number - 1)[number - 1]
    below = np.flatnonzero(values < largest)
    equal = np.flatnonzero(values == largest)
    missing = number - len(below)
    if missing < len(equal):
        equal = rng.choice(equal, missing, replace=False, shuffle=False)
    return np.concatenate([below, equal])
