"""How stale gradients get: the rules of the strategies, and a simulation of their events.

The staleness of a gradient is the number of updates between its worker's read and its own update.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fineprune.errors import InputError


@dataclass(frozen=True)
class Push:
    """One gradient that was applied, in a simulation.

    Attributes:
        worker, step: who computed it, and which of its own steps it was, both from 0.
        version: the parameters' version that it made, from 1.
        staleness: updates since its worker's read.
        time: when it was applied, in the unit of the delays.
    """

    worker: int
    step: int
    version: int
    staleness: int
    time: float


def may_start(in_flight: int, bound: int | None) -> bool:
    """Say whether a worker may read now, so that its gradient can be kept within the bound.

    Args:
        in_flight: gradients of living workers that are read for but not applied, its own apart.
        bound: of the staleness; None for no bound.
    """
    return bound is None or in_flight <= bound


def may_apply(version: int, others: Sequence[int], bound: int | None) -> bool:
    """Say whether the others in flight stay within the bound if a gradient is applied now.

    Args:
        version: of the parameters as they stand.
        others: the versions that the others in flight have read.
        bound: of the staleness; None for no bound.
    """
    if bound is None:
        return True
    return all(read + bound >= version + 1 + place for place, read in enumerate(sorted(others)))


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
        delay: from a worker and its step, both from 0, to how long it computes. Of two that end at
            once, the worker of the lower number is first.
        workers: how many.
        batches: how many gradients are applied.
        quorum: None for asynchronous updates; otherwise each update takes the first `quorum`
            gradients (fewer in the last) that were read for at its version, and discards later
            ones.
        bound: of the staleness of asynchronous updates.

    Returns:
        The gradients that were applied, in their order.

    Raises:
        InputError: a setting is out of range.
    """
    if workers < 1 or batches < 0:
        raise InputError(f"expected workers >= 1, batches >= 0, got {workers}, {batches}")
    if quorum is not None and not 1 <= quorum <= workers:
        raise InputError(f"expected a quorum of 1 to {workers} workers, got {quorum}")
    if bound is not None and (bound < 0 or quorum is not None):
        raise InputError(f"expected a bound of at least 0, without a quorum, got {bound}")
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
