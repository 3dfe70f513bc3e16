"""A simulation of workers that take as long as a script says: what the servers must reproduce."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from fineprune.distributed.parameter_servers.staleness import may_apply, may_start


@dataclass(frozen=True)
class Push:
    """One gradient that was applied.

    Attributes:
        worker, step: Who computed it, and which of its own steps it was, both from 0.
        version: The version of the parameters that it made, from 1.
        staleness: The number of updates since its worker's read.
        time: When it was applied, in the unit of the delays.
    """

    worker: int
    step: int
    version: int
    staleness: int
    time: float


def updates_of(batches, quorum):
    """Return the number of updates of an epoch: each averages ``quorum`` batches, the last fewer.

    Backup workers do not change it, since what they did in vain is queued again.
    """
    return -(-batches // quorum)


def simulate(
    delay: Callable[[int, int], float],
    workers: int,
    batches: int,
    *,
    quorum: int | None = None,
    bound: int | None = None,
) -> list[Push]:
    """Simulate an epoch of workers that take as long as a script says; all else takes no time.

    Args:
        delay: Returns how long a worker computes, given its number and its step, both from 0. If
            two workers end at the same time, the one with the lower number is first.
        workers: The number of workers.
        batches: The number of gradients that are applied.
        quorum: None for asynchronous updates; otherwise each update takes the first ``quorum``
            gradients (fewer in the last) that were read for at its version, and discards later
            ones.
        bound: The bound of the staleness of asynchronous updates.

    Returns:
        The gradients that were applied, in their order.
    """
    if workers < 1 or batches < 0:
        raise ValueError(f"expected workers >= 1, batches >= 0, got {workers}, {batches}")
    if quorum is not None and not 1 <= quorum <= workers:
        raise ValueError(f"expected a quorum of 1 to {workers} workers, got {quorum}")
    if bound is not None and (bound < 0 or quorum is not None):
        raise ValueError(f"expected a bound of at least 0, without a quorum, got {bound}")
    pushes: list[Push] = []
    version, queued, now = 0, batches, 0.0
    steps = [itertools.count() for _ in range(workers)]
    idle = list(range(workers))
    running: list[tuple[float, int, int]] = []  # ends, worker, step
    read: dict[int, int] = {}  # of all in flight
    staged: list[tuple[int, int]] = []  # worker, step

    def apply(taken: list[tuple[int, int]]) -> None:
        nonlocal version
        version += 1
        for worker, step in taken:
            staged.remove((worker, step))
            pushes.append(Push(worker, step, version, version - 1 - read.pop(worker), now))
            idle.append(worker)

    while len(pushes) < batches:
        for worker in sorted(idle):
            if queued and may_start(len(read), bound):
                idle.remove(worker)
                queued -= 1
                read[worker] = version
                step = next(steps[worker])
                heapq.heappush(running, (now + delay(worker, step), worker, step))
        ready = [
            one
            for one in staged
            if quorum is None
            and may_apply(version, [v for w, v in read.items() if w != one[0]], bound)
        ]
        if ready:
            apply(ready[:1])
            continue
        now, worker, step = heapq.heappop(running)
        if worker not in read:  # the update of its version was made without it
            idle.append(worker)
            continue
        staged.append((worker, step))
        if quorum is not None and len(staged) >= min(quorum, batches - len(pushes)):
            apply(sorted(staged))
            queued += len(read)
            read.clear()
    return pushes
