"""Chooses the samples of an epoch without any rank knowing the counts of all samples.

The ranks add up the histograms of their counts, which gives the threshold of Algorithm 2. How many
of the samples that tie with it each rank keeps is a random draw that all ranks make alike. Ranks
that then keep more samples than others hand some of them over, so that all train equally many.
"""

import numpy as np
import numpy.typing as npt

from fineprune.pruning.dropping_count import (
    Counts,
    Threshold,
    count_histogram,
    keep_by_threshold,
    threshold_of,
)
from fineprune.pruning.permutation import Permutation
from fineprune.pruning.random_streams import stream
from fineprune.pruning.replicas import Replicas
from fineprune.pruning.sampler import samples_per_rank
from fineprune.pruning.sharded.share import Indices, Share, owned_samples

# NumPy draws from hypergeometric distributions over fewer samples than this.
MOST_TIES = 10**9

Numbers = npt.NDArray[np.int64]


def full_share(
    epoch: int, num_samples: int, replicas: Replicas, seed: int, drop_last: bool
) -> Share:
    """Return what this rank trains in an epoch that skips nothing: all samples that it owns.

    If the samples do not divide among the ranks, some ranks repeat one of theirs or, with
    ``drop_last``, leave one out, as in ``DistributedSampler``.
    """
    owned = owned_samples(num_samples, replicas.size, replicas.rank)
    order = Permutation(len(owned), _own_stream(seed, epoch, "order", replicas))
    length = samples_per_rank(num_samples, replicas.size, drop_last)
    return Share(epoch, owned, None, np.empty(0, dtype=np.int64), order, length)


def pruned_share(
    epoch: int, num_samples: int, num_kept: int, counts: Counts, replicas: Replicas, seed: int
) -> Share:
    """Return what this rank trains in an epoch that skips samples. All ranks must call it.

    Args:
        epoch: The epoch, counted from 0.
        num_samples: Number of samples N of all ranks together.
        num_kept: Number of samples that all ranks together keep, below N and a multiple of the
            number of ranks.
        counts: The counts of the samples that this rank owns.
        replicas: The ranks that share the samples.
        seed: The seed of the run, which is the same on every rank.
    """
    owned = owned_samples(num_samples, replicas.size, replicas.rank)
    threshold, kept_per_rank = _threshold(epoch, num_kept, counts, replicas, seed)
    ties = _own_stream(seed, epoch, "select", replicas)
    kept = keep_by_threshold(counts, threshold, ties, np.int32)
    surplus = kept_per_rank - num_kept // replicas.size
    own_surplus = int(surplus[replicas.rank])
    length = len(kept) - own_surplus
    order = Permutation(max(len(kept), length), _own_stream(seed, epoch, "order", replicas))
    nothing = np.empty(0, dtype=np.int64)
    share = Share(epoch, owned, kept, nothing, order, length)
    if not surplus.any():
        return share
    # The samples at the end of the order are a random choice.
    offered = share.indices(length, len(kept)) if own_surplus > 0 else nothing
    received = _handed_over(offered, surplus, replicas)
    return Share(epoch, owned, kept, received, order, length)


def _threshold(
    epoch: int, num_kept: int, counts: Counts, replicas: Replicas, seed: int
) -> tuple[Threshold, Numbers]:
    """Return the threshold with the numbers of this rank, and how many samples each rank keeps."""
    own = count_histogram(counts)
    largest = int(replicas.maximum(np.array([len(own)]))[0])
    own = np.concatenate([own, np.zeros(largest - len(own), dtype=np.int64)])
    value, _, _, wanted = threshold_of(replicas.sum(own), num_kept)
    numbers = np.stack(replicas.gather(np.array([own[:value].sum(), own[value]])))
    below, tied = numbers[:, 0], numbers[:, 1]
    taken = share_ties(tied, wanted, stream(seed, epoch, "ties of each rank"))
    rank = replicas.rank
    mine = Threshold(value, int(below[rank]), int(tied[rank]), int(taken[rank]))
    return mine, below + taken


def share_ties(tied: Numbers, wanted: int, rng: np.random.Generator) -> Numbers:
    """Draw how many of its tied samples each rank keeps; int64, shape (R,).

    Every choice of ``wanted`` samples among those of all ranks has the same probability.

    Args:
        tied: Number of tied samples of each rank; int64, shape (R,).
        wanted: How many of them are kept, at most their sum.
        rng: The random stream, which is the same on every rank.
    """
    taken = np.zeros_like(tied)
    # Imagine a random key for each sample; those with the smallest keys are kept. As long as there
    # are too many samples, draw how many have a key in the lower half, and continue in one half.
    while tied.sum() >= MOST_TIES:
        lower = rng.binomial(tied, 0.5)
        if lower.sum() <= wanted:
            taken += lower
            wanted -= int(lower.sum())
            tied = tied - lower
        else:
            tied = lower
    return taken + rng.multivariate_hypergeometric(tied, wanted, method="marginals")


def _handed_over(offered: Indices, surplus: Numbers, replicas: Replicas) -> Indices:
    """Exchange surplus samples, and return those that this rank receives.

    Args:
        offered: The samples that this rank hands over.
        surplus: How many samples each rank hands over, or receives if it is negative; int64, shape
            (R,), with the sum 0.
        replicas: The ranks.
    """
    takes = np.maximum(-surplus, 0)
    handed = np.concatenate(replicas.gather(offered))
    end = int(takes[: replicas.rank + 1].sum())
    return handed[end - int(takes[replicas.rank]) : end].copy()


def _own_stream(seed: int, epoch: int, purpose: str, replicas: Replicas) -> np.random.Generator:
    return stream(seed, epoch, f"{purpose} of rank {replicas.rank}")
