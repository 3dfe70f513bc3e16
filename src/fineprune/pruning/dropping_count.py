"""Algorithm 1: losses become marks, marks become counts, and counts decide which samples are kept.

Counts are small integers, so a histogram finds the threshold of a selection in linear time. It
works on one block of samples at a time, so that 10^8 samples need little more memory than counts.
"""

import numpy as np
import numpy.typing as npt

# Number of samples per block: large enough to amortise NumPy's calls, small enough for the cache.
_BLOCK = 1 << 18

_LARGEST_KEY = np.iinfo(np.uint32).max

Counts = npt.NDArray[np.integer]


def counts_dtype(longest_window: int) -> np.dtype[np.integer]:
    """Return the smallest dtype for the counts of a window: one byte for up to 255 epochs."""
    if longest_window <= np.iinfo(np.uint8).max:
        return np.dtype(np.uint8)
    return np.dtype(np.int16 if longest_window <= np.iinfo(np.int16).max else np.int32)


def batch_sums(
    losses: npt.NDArray[np.float32], sizes: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return the sum of the finite losses of each batch, their number, and that of the others.

    Those of several ranks are added before the mean is taken ([P] section 4.2). ``losses`` are
    those of all batches, shape (n,), and ``sizes`` the number in each. The result is float64, shape
    (batches, 3).
    """
    finite = np.isfinite(losses)
    starts = np.cumsum(sizes) - sizes
    parts = np.where(finite, losses, 0.0), finite, ~finite
    sums: npt.NDArray[np.float64] = np.stack(
        [np.add.reduceat(part.astype(np.float64), starts) for part in parts], axis=1
    )
    return sums


def batch_means(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the mean loss of each batch from its ``batch_sums``; NaN if no loss was finite."""
    with np.errstate(invalid="ignore"):
        means: npt.NDArray[np.float64] = sums[:, 0] / sums[:, 1]
    return means


def exceeds(
    losses: npt.NDArray[np.float32], means: npt.NDArray[np.float64], tolerance: float
) -> npt.NDArray[np.bool_]:
    """Return which losses are marked: finite ones above the mean of their batch plus a tolerance.

    The threshold is ``mean + tolerance * |mean|`` (Algorithm 1, line 5). All have shape (n,).
    """
    threshold = means + tolerance * np.abs(means) if tolerance else means
    with np.errstate(invalid="ignore"):  # A comparison with NaN is False, as it should be here.
        return (losses > threshold) & np.isfinite(losses)


def add_marks(counts: Counts, marks: npt.NDArray[np.bool_]) -> None:
    """Add the marks of an epoch, bool, to the counts, integers, in place; shape (N,) each."""
    # Only epochs that are repeated could reach the largest value. It must not wrap around to 0.
    largest = np.iinfo(counts.dtype).max
    np.add(counts, marks, out=counts, where=counts < largest, casting="unsafe")


def keep_least_counted(
    counts: Counts, num_kept: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Return the sorted samples with the smallest counts (Algorithm 2, line 7: KeepList).

    ``counts`` are at least 0, shape (N,). The random stream breaks ties.
    """
    # How many samples have smaller counts than 0, 1, and so on. The threshold is the largest count
    # below which no more samples lie than are kept.
    below = np.concatenate([[0], np.cumsum(_histogram(counts))])
    threshold = int(np.searchsorted(below, num_kept, side="right")) - 1
    # If all samples are kept, the threshold exceeds all counts, and none ties with it.
    tied = int(below[min(threshold + 1, len(below) - 1)] - below[threshold])
    wanted = num_kept - int(below[threshold])
    kept = np.empty(num_kept, dtype=np.int64)
    filled = 0
    for begin in range(0, len(counts), _BLOCK):
        block = counts[begin : begin + _BLOCK]
        keep = block < threshold
        ties = block == threshold
        number = int(np.count_nonzero(ties))
        # A hypergeometric draw decides how many of the wanted ties lie in this block. Choosing them
        # block by block gives every subset the same probability without an array of all ties.
        take = int(rng.hypergeometric(number, tied - number, wanted)) if wanted else 0
        if take:
            keep |= _choose(ties, take, rng)
        tied -= number
        wanted -= take
        chosen = np.flatnonzero(keep)
        kept[filled : filled + len(chosen)] = chosen + begin
        filled += len(chosen)
    return kept


def _histogram(counts: Counts) -> npt.NDArray[np.int64]:
    """Return how many of the counts, shape (N,), are 0, 1, and so on; int64, shape (max + 1,)."""
    histogram = np.zeros(int(counts.max(initial=0)) + 1, dtype=np.int64)
    for begin in range(0, len(counts), _BLOCK):
        histogram += np.bincount(counts[begin : begin + _BLOCK], minlength=len(histogram))
    return histogram


def _choose(
    ties: npt.NDArray[np.bool_], take: int, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Return a mask of ``take`` of the True entries: those with the smallest random keys."""
    keys = rng.integers(0, _LARGEST_KEY, size=len(ties), dtype=np.uint32)
    keys[~ties] = _LARGEST_KEY
    last = np.partition(keys, take - 1)[take - 1]
    chosen: npt.NDArray[np.bool_] = keys <= last
    surplus = int(np.count_nonzero(chosen)) - take
    if surplus:  # Some keys are equal, which happens in one of thousands of blocks.
        chosen[np.flatnonzero(keys == last)[-surplus:]] = False
    return chosen
