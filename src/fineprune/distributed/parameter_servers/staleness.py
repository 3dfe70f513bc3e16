"""The two rules that keep the staleness of gradients within a bound.

The staleness of a gradient is the number of updates after its worker read the parameters and before
the gradient is applied.
"""

from collections.abc import Sequence


def may_start(in_flight: int, bound: int | None) -> bool:
    """Return whether a worker may read now, so that its gradient can be kept within the bound.

    Args:
        in_flight: The number of other living workers that have read the parameters for a gradient
            that is not applied yet.
        bound: The largest allowed staleness; None for no bound.
    """
    return bound is None or in_flight <= bound


def may_apply(version: int, others: Sequence[int], bound: int | None) -> bool:
    """Return whether all other gradients in flight can stay within the bound if one is applied now.

    Args:
        version: The current version of the parameters.
        others: The versions that were read for the other gradients in flight.
        bound: The largest allowed staleness; None for no bound.
    """
    if bound is None:
        return True
    return all(read + bound >= version + 1 + place for place, read in enumerate(sorted(others)))
