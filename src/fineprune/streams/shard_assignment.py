"""Who reads which shards in an epoch, and which of their samples.

Each process computes this by itself, from the number of kept samples of each shard and the seeded
order of the shards. The shards are dealt to the ranks, and those of a rank to its workers, so that
all have about equally many kept samples. A ``DataLoader`` takes samples from its workers in turn,
and a worker that has no more drops out. From this follows how many samples each worker has yielded
when the rank has trained a given number of them.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from fineprune.errors import InputError


@dataclass(frozen=True)
class Assignment:
    """What one worker yields in an epoch.

    Attributes:
        shards: The shards that it reads, in this order.
        kept: Number of samples that the epoch keeps of these shards.
        begin, end: Number of samples that it yielded before the epoch was interrupted, and that it
            yields in the whole epoch. Beyond ``kept``, it reads its shards again.
    """

    shards: list[int]
    kept: int
    begin: int
    end: int


@dataclass(frozen=True)
class Coverage:
    """How many kept samples of an epoch are left out and repeated, since ranks have unequal shards.

    Attributes:
        missed: Number of kept samples that no rank trains.
        repeated: Number of samples that are trained again by a rank that has too few.
    """

    missed: int
    repeated: int


def deal(kept: Sequence[int], order: Sequence[int], takers: int) -> list[list[int]]:
    """Return the shards of each taker, in the given order, with about equally many kept samples.

    The fullest shard goes first, always to the taker that has the fewest samples. Shards without
    kept samples are left out.
    """
    loads = [(0, taker) for taker in range(takers)]
    taker_of = {}
    for shard in sorted((one for one in order if kept[one]), key=lambda one: -kept[one]):
        load, taker = loads[0]
        taker_of[shard] = taker
        heapq.heapreplace(loads, (load + kept[shard], taker))
    dealt: list[list[int]] = [[] for _ in range(takers)]
    for shard in order:
        if shard in taker_of:
            dealt[taker_of[shard]].append(shard)
    return dealt


def taken(lengths: Sequence[int], number: int) -> tuple[list[int], int]:
    """Return how many samples come from each worker if ``number`` are taken from them in turn.

    ``lengths`` says how many each has. The worker whose turn is next is returned, too; if it has no
    more samples, the turn is that of the next one that has.
    """
    counts = [0] * len(lengths)
    left, turn = number, 0
    while active := [one for one, length in enumerate(lengths) if length > counts[one]]:
        rounds = min(left // len(active), min(lengths[one] - counts[one] for one in active))
        if not rounds:  # Fewer are left than there are workers.
            for one in active[:left]:
                counts[one] += 1
                turn = (one + 1) % len(lengths)
            break
        for one in active:
            counts[one] += rounds
        left -= rounds * len(active)
    return counts, turn


def coverage(kept: Sequence[int], order: Sequence[int], ranks: int, each: int) -> Coverage:
    """Return what an epoch leaves out and repeats in which each rank trains ``each`` samples."""
    loads = [sum(kept[shard] for shard in shards) for shards in deal(kept, order, ranks)]
    return Coverage(
        missed=sum(max(load - each, 0) for load in loads),
        repeated=sum(max(each - load, 0) for load in loads),
    )


def assignment(
    kept: Sequence[int],
    order: Sequence[int],
    *,
    rank: int,
    ranks: int,
    worker: int,
    workers: int,
    each: int,
    trained: int,
) -> Assignment:
    """Return what one worker of one rank yields in an epoch.

    Args:
        kept: Number of kept samples of each shard.
        order: All shards in the order of the epoch.
        rank, ranks: Number of the rank, and of all ranks.
        worker, workers: Number of the worker within the rank, and of all its workers, at least 1.
        each: Number of samples that each rank trains in the epoch.
        trained: Number of samples that this rank has trained already.

    Raises:
        InputError: This rank has no kept samples.
    """
    own = deal(kept, order, ranks)[rank]
    if not own:
        filled = sum(1 for number in kept if number)
        raise InputError(
            f"expected kept samples in at least {ranks} shards, one for each rank, got them in "
            f"{filled}: write the samples to more shards, in a random order"
        )
    shards = deal(kept, own, workers)
    lengths = [sum(kept[shard] for shard in part) for part in shards]
    ends = _ends(lengths, each)
    begins, turn = taken(ends, trained)
    # The loader always begins with worker 0, so it takes the part of the worker whose turn it is.
    played = (worker + turn) % workers
    return Assignment(shards[played], lengths[played], begins[played], ends[played])


def _ends(lengths: Sequence[int], each: int) -> list[int]:
    """Return how many samples workers with so many kept ones (not all 0) yield, ``each`` in all."""
    missing = each - sum(lengths)
    if missing <= 0:
        return taken(lengths, each)[0]
    active = [one for one, length in enumerate(lengths) if length]
    ends = list(lengths)
    for place, one in enumerate(active):
        ends[one] += missing // len(active) + (place < missing % len(active))
    return ends
