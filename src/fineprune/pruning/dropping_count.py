"""Algorithm 1: a batch's losses become marks, marks become counts, counts say which samples stay.

Pure functions on NumPy arrays. Counts are small integers, so a histogram finds the threshold of a
selection in linear time, and everything runs over blocks, so that a hundred million samples need
little more memory than their counts.
"""

import numpy as np
import numpy.typing as npt

# Samples handled at once: large enough to amortise NumPy's calls, small enough to stay in cache.
_BLOCK = 1 << 18

_LARGEST_KEY = np.iinfo(np.uint32).max

Array = npt.NDArray[np.generic]
Counts = npt.NDArray[np.integer]


def counts_dtype(longest_window: int) -> np.dtype[np.integer]:
    """Return the smallest dtype that holds a window's counts: one byte up to 255 epochs."""
    if longest_window <= np.iinfo(np.uint8).max:
        return np.dtype(np.uint8)
    return np.dtype(np.int16 if longest_window <= np.iinfo(np.int16).max else np.int32)


def batch_sums(
    losses: npt.NDArray[np.float32], sizes: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Sum each batch's finite losses in float64 and count them.

    Kept as sums so that the parts of a batch on several ranks can be added before the mean is
    taken: the paper's batch loss is the mean over the whole batch ([P] section 4.2).

    Args:
        losses: float32, shape (n,), batch after batch.
        sizes: int64, shape (batches,), each batch's number of losses; their sum is n.

    Returns:
        float64, shape (batches, 2): the sum and the number of finite losses.
    """
    finite = np.isfinite(losses)
    sums = np.zeros((len(sizes), 2))
    filled = np.flatnonzero(sizes)  # reduceat repeats a neighbour for an empty batch
    if len(filled):
        starts = (np.cumsum(sizes) - sizes)[filled]
        sums[filled, 0] = np.add.reduceat(np.where(finite, losses, 0.0).astype(np.float64), starts)
        sums[filled, 1] = np.add.reduceat(finite.astype(np.float64), starts)
    return sums


def batch_means(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return each batch's mean loss from ``batch_sums``; NaN where no loss was finite."""
    counted = sums[:, 1]
    means = np.full(len(sums), np.nan)
    np.divide(sums[:, 0], counted, out=means, where=counted > 0)
    return means


def exceeds(
    losses: npt.NDArray[np.float32], means: npt.NDArray[np.float64], tolerance: float
) -> npt.NDArray[np.bool_]:
    """Say which losses earn a mark: finite and above ``mean + tolerance * |mean|``.

    Algorithm 1, line 5, with the absolute value so that a positive tolerance is lenient for
    negative losses too.

    Args:
        losses: float32, shape (n,).
        means: float64, shape (n,), the mean of each loss's batch.
        tolerance: the paper's tolerance, a share of the mean.
    """
    with np.errstate(invalid="ignore"):  # a NaN compares as False, which is what is wanted
        return (losses > means + tolerance * np.abs(means)) & np.isfinite(losses)


def add_marks(counts: Counts, marks: npt.NDArray[np.bool_], clear: bool) -> None:
    """End an epoch in place: clear if the epoch is a boundary, then add its marks."""
    if clear:
        counts[:] = 0
    largest = np.iinfo(counts.dtype).max  # only a repeated epoch could get here; never wrap to 0
    np.add(counts, marks, out=counts, where=counts < largest, casting="unsafe")


def keep_least_counted(
    counts: Counts, num_kept: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Choose the samples with the smallest counts (Algorithm 2, line 7: KeepList).

    Samples tied at the threshold are chosen uniformly at random.

    Args:
        counts: integers, shape (N,), none negative.
        num_kept: how many to keep, from 0 to N.
        rng: the stream that breaks the ties.

    Returns:
        Indices of the kept samples, sorted; int64, shape (num_kept,).
    """
    below = np.concatenate([[0], np.cumsum(_histogram(counts))])  # samples with a smaller count
    threshold = int(np.searchsorted(below, num_kept, side="right")) - 1
    if threshold == len(below) - 1:  # everything is kept
        return np.arange(len(counts))
    tied = int(below[threshold + 1] - below[threshold])
    wanted = num_kept - int(below[threshold])
    kept = np.empty(num_kept, dtype=np.int64)
    filled = 0
    for begin in range(0, len(counts), _BLOCK):
        block = counts[begin : begin + _BLOCK]
        keep = block < threshold
        ties = block == threshold
        number = int(np.count_nonzero(ties))
        # Sharing the wanted ties out over the blocks by a hypergeometric draw and choosing inside
        # each block gives every subset the same chance, without an array of all ties.
        take = int(rng.hypergeometric(number, tied - number, wanted)) if wanted else 0
        if take:
            keep |= _choose(ties, take, rng)
        tied -= number
        wanted -= take
        chosen = np.flatnonzero(keep)
        kept[filled : filled + len(chosen)] = chosen
        kept[filled : filled + len(chosen)] += begin
        filled += len(chosen)
    return kept


def _choose(
    ties: npt.NDArray[np.bool_], take: int, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Choose ``take`` of the True entries, as a mask: those with the smallest random keys."""
    keys = rng.integers(0, _LARGEST_KEY, size=len(ties), dtype=np.uint32)
    keys[~ties] = _LARGEST_KEY
    last = np.partition(keys, take - 1)[take - 1]
    chosen: npt.NDArray[np.bool_] = keys <= last
    surplus = int(np.count_nonzero(chosen)) - take
    if surplus:  # equal keys, one in thousands of blocks
        chosen[np.flatnonzero(keys == last)[-surplus:]] = False
    return chosen


def _histogram(counts: Counts) -> npt.NDArray[np.int64]:
    histogram = np.zeros(int(counts.max(initial=0)) + 1, dtype=np.int64)
    for begin in range(0, len(counts), _BLOCK):
        block = np.bincount(counts[begin : begin + _BLOCK], minlength=len(histogram))
        histogram += block
    return histogram
