"""A buffer that shuffles a stream as it passes."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np

T = TypeVar("T")

# Number of places that are drawn at a time, because drawing them one by one takes longer.
_DRAWS = 1024


def shuffled(items: Iterable[T], size: int, rng: np.random.Generator) -> Iterator[T]:
    """Yield the items in another order.

    The buffer is filled first. From then on, each new item takes the place of one that is chosen at
    random and yielded. The order depends on the number of items, ``size`` and ``rng`` only. With
    ``size`` 0, it stays as it is.
    """
    if not size:
        yield from items
        return
    buffer: list[T] = []
    draws: list[int] = []
    for item in items:
        if len(buffer) < size:
            buffer.append(item)
            continue
        if not draws:
            draws = rng.integers(size, size=_DRAWS).tolist()
        place = draws.pop()
        replaced, buffer[place] = buffer[place], item
        yield replaced
    for place in rng.permutation(len(buffer)).tolist():
        yield buffer[place]
