"""How stale a gradient may become: the two rules that keep a bound of the staleness.

The staleness of a gradient is the number of updates between its worker's read and its own update.
"""

from collections.abc import Sequence


def may_start(in_flight: int, bound: int | None) -> bool:
    """Return whether a worker may read now, so that its gradient can be kept within the bound.

    Args:
        in_flight: The number of other gradients that living workers have read for and that are
            not applied.
        bound: The bound of the staleness; None for no bound.
    """
    return bound is None or in_flight <= bound


def may_apply(version: int, others: Sequence[int], bound: int | None) -> bool:
    """Return whether the others in flight stay within the bound if a gradient is applied now.

    Args:
        version: The version of the parameters now.
        others: The versions that the others in flight have read.
        bound: The bound of the staleness; None for no bound.
    """
    if bound is None:
        return True
    return all(read + bound >= version + 1 + place for place, read in enumerate(sorted(others)))
